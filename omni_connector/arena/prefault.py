# SPDX-License-Identifier: Apache-2.0
"""Prefault: has the kernel allocate and map an arena's memory before it is needed.

The first touch of a page costs many times a copy into it. With the memory allocated, a hand-off to
slots that were never used costs what it costs to used ones: 1.6 times a memcpy for 2,048 tokens
(benchmarks/results/handoff_default_arena.md). So a process at idle priority
(`populate`) allocates the arena's memory, from the start on, because low slots are used first. A
thread of the owner, and one of each reader, then maps the allocated part, which takes a tenth of
the time. All pause while a copy runs. A slot that is used before its turn is populated by a system
call before the copy.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena import populate
from omni_connector.arena.available import available_bytes, spared_bytes
from omni_connector.runtime.turns import COPIES, TurnThread

logger = logging.getLogger("vllm.omni_connector.worker")

# Constants of Linux that the standard library does not name.
MADV_POPULATE_READ: Final = populate.MADV_POPULATE_READ
MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_WINDOW: Final = 64 << 20
"""Bytes that the process allocates at one request. The memory left is checked before each."""

_STEP: Final = 2 << 20
"""Bytes mapped by one system call, a huge page. A copy that begins waits for one step at most."""

_LARGE = 64 << 20
"""Bytes of an arena from which on a process pays off; the thread alone populates smaller ones."""

_CLOSE_S: Final = 5.0
"""Longest wait, in seconds, for a thread to end at `stop`."""

_PAUSE_S: Final = 0.002
"""Seconds between two looks at whether a copy still runs."""

# A reader waits for its peer to allocate more: seconds of the first wait, which is doubled each
# time, and of the longest; and the number of waits without progress after which it ends.
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0
_WAITS: Final = 16

_IDLE = True
"""Whether the process runs at idle priority. Tests that wait for it set this to False."""


def overcommit_is_strict() -> bool:
    """Whether the kernel may refuse a page at its first touch, which kills with SIGBUS.

    With strict overcommit an arena must allocate all its memory when it is made.
    """
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:  # a container may hide it; the mode is then hardly ever this one
        return False


class _Steps:
    """Populates the page tables of a mapping, in steps of `_STEP` bytes, each once.

    Args:
        mapped: the mapping, from the start of the file.
        advice: `MADV_POPULATE_READ` or `MADV_POPULATE_WRITE`.
    """

    def __init__(self, mapped: mmap.mmap, advice: int) -> None:
        self._pages: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        self._advice = advice
        self._done = bytearray(-(-len(self._pages) // _STEP))

    @property
    def size(self) -> int:
        """Bytes of the mapping."""
        return len(self._pages)

    def map(self, start: int, end: int, pause: Callable[[], bool] | None = None) -> bool:
        """Map the bytes that are not mapped yet.

        Args:
            start, end: the bytes.
            pause: called before each step; may wait, and ends the mapping by returning False.

        Returns:
            Whether all are mapped.
        """
        for step in range(start // _STEP, -(-end // _STEP)):
            if self._done[step]:
                continue
            if pause is not None and not pause():
                return False
            self._done[step] = True
            at = step * _STEP
            address = self._pages.ctypes.data + at
            # An error (no memory, or Linux before 5.14) is ignored: the first touch maps the page.
            _madvise(address, min(_STEP, self.size - at), self._advice)
        return True


class Prefaulter:
    """Allocates and maps the memory of an arena in the background, from its start.

    Args:
        fd: the memfd; duplicated.
        mapped: the owner's mapping, from the start of the file.
        available: returns the bytes of memory left; below `spared_bytes` prefaulting ends.
        populated: called on the thread after each window, with the end of the allocated bytes. An
            error that it raises ends prefaulting.
        cores: the cores that the process runs on, and on whose memory node the pages lie; none for
            those of the caller.
    """

    def __init__(
        self,
        fd: int,
        mapped: mmap.mmap,
        available: Callable[[], int] = available_bytes,
        populated: Callable[[int], object] = lambda end: None,
        cores: Collection[int] = (),
    ) -> None:
        self._fd = os.dup(fd)
        self._cores = cores
        self._steps: _Steps | None = _Steps(mapped, MADV_POPULATE_WRITE)
        self._available = available
        self._populated = populated
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._whole = False
        self._thread = TurnThread("omni-connector-prefault", self._run)

    def touch(self, start: int, end: int) -> None:
        """Map bytes that are about to be written, now. Cheap if they are mapped already."""
        steps = self._steps
        if steps is not None and not self._whole:
            steps.map(start, end)

    def stop(self) -> None:
        """End the process and the thread, in bounded time. Idempotent."""
        self._stopped.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join(_CLOSE_S)
        self._steps = None  # it would keep the mapping alive
        self._populated = lambda end: None

    def _run(self) -> None:
        steps = self._steps
        assert steps is not None
        try:
            if steps.size < _LARGE:
                self._whole = steps.map(0, steps.size, self._go_on)
                if self._whole:
                    self._populated(steps.size)
                return
            with _shown_copies() as flag, self._start(steps.size, flag) as process:
                self._whole = self._populate(steps, process)
        except (OSError, ValueError, RuntimeError) as error:
            if not self._stopped.is_set():
                logger.warning(
                    "The arena's memory is not allocated before it is needed, so that the first "
                    "hand-offs take longer: %s",
                    error,
                )
        finally:
            os.close(self._fd)

    def _start(self, size: int, flag: int) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._stopped.is_set():
                raise OSError(errno.ECANCELED, "the arena is closed")
            numbers = (os.getpid(), self._fd, flag, size, _WINDOW, _IDLE, *self._cores)
            arguments = [str(int(number)) for number in numbers]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", populate.__file__, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._fd, flag),
            )
            return self._process

    def _populate(self, steps: _Steps, process: "subprocess.Popen[bytes]") -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        spared = spared_bytes()
        for start in range(0, steps.size, _WINDOW):
            left = self._available()
            if left - _WINDOW < spared:
                logger.warning(
                    "Stopped allocating the arena's memory in advance at %.2f of %.2f GiB: %.2f "
                    "GiB are available, and %.2f stay reserved for others. The rest is allocated "
                    "when it is first used",
                    start / 2**30,
                    steps.size / 2**30,
                    left / 2**30,
                    spared / 2**30,
                )
                return False
            process.stdin.write(b".")
            if not process.stdout.read(1):
                raise OSError(errno.EPIPE, f"the process that allocates it ended at byte {start}")
            end = min(start + _WINDOW, steps.size)
            if not steps.map(start, end, self._go_on):
                return False
            self._populated(end)
        logger.info("The arena's memory is allocated: %.2f GiB", steps.size / 2**30)
        return True

    def _go_on(self) -> bool:
        return _wait_for_copies(self._stopped)


class ReaderPrefaulter:
    """Maps a peer's arena in the background, as far as its owner has allocated it.

    A copy from pages that are not mapped takes 2.3 times as long (137 beside 60 ms for 512 MiB).
    Mapping more would allocate memory in the owner's place. So this waits for the owner, and ends
    after `_WAITS` waits without progress.

    Args:
        fd: the peer's memfd; duplicated.
        mapped: the reader's mapping, from the start of the file.
        on_mapped: called on the thread after each window, with the end of the mapped bytes.
        start: the byte from which on it maps.

    Attributes:
        end: the end of the mapped bytes.
        gave_up: whether it ended before all bytes were mapped, as no more came. Another one may go
            on from `end`.

    Raises:
        OSError, RuntimeError: there are no more descriptors, or threads.
    """

    def __init__(
        self,
        fd: int,
        mapped: mmap.mmap,
        on_mapped: Callable[[int], object] = lambda end: None,
        start: int = 0,
    ) -> None:
        self.end = start
        self.gave_up = False
        self._fd = os.dup(fd)
        self._steps = _Steps(mapped, MADV_POPULATE_READ)
        self._on_mapped = on_mapped
        self._stopped = threading.Event()
        try:
            self._thread = TurnThread("omni-connector-prefault", self._run)
        except BaseException:
            os.close(self._fd)
            del self._steps  # the thread object keeps `self` alive, and this the mapping
            raise

    def stop(self) -> None:
        """End the thread, in bounded time. Idempotent."""
        self._stopped.set()
        self._thread.join(_CLOSE_S)
        self._on_mapped = lambda end: None  # it would keep the mapping alive

    def abandon(self) -> None:
        """Close the descriptor in a forked child, which has no thread that would do so."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _run(self) -> None:
        steps = self._steps
        del self._steps  # it would keep the mapping alive after the thread
        waits = 0
        try:
            while self.end < steps.size and waits < _WAITS:
                start = self.end
                end = min(self._allocated(start, steps.size), start + _WINDOW)
                if end > start:
                    if not steps.map(start, end, lambda: _wait_for_copies(self._stopped)):
                        return
                    self._on_mapped(end)
                    self.end = end
                    waits = 0
                else:
                    waits += 1
                    pause = min(_FIRST_WAIT_S * 2**waits, _LONGEST_WAIT_S)
                    if self._stopped.wait(pause):
                        return
        finally:
            self.abandon()
        self.gave_up = self.end < steps.size

    def _allocated(self, start: int, size: int) -> int:
        """The end of the memory allocated from `start` on, in whole steps."""
        try:
            end = os.lseek(self._fd, start, os.SEEK_HOLE)
        except OSError:  # the kernel does not say: as if all were there
            return size
        return size if end >= size else max(start, end // _STEP * _STEP)


def prefault(fd: int, pages: NDArray[np.uint8], start: int, length: int) -> None:
    """Allocate pages of a mapped file, faster than by touching them.

    Args:
        fd: the file.
        pages: its writable mapping, from the start of the file.
        start: the first byte, which starts a page.
        length: bytes.

    Raises:
        OSError: there is no memory for the pages.
    """
    code = _madvise(pages.ctypes.data + start, length, MADV_POPULATE_WRITE)
    if code == errno.EINVAL:  # before Linux 5.14
        os.posix_fallocate(fd, start, length)
    elif code:
        raise OSError(code, os.strerror(code))


def _madvise(address: int, length: int, advice: int) -> int:
    """The error's code, or 0. Unlike `mmap.madvise` this releases the GIL."""
    while _libc.madvise(address, length, advice) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0


@contextlib.contextmanager
def _shown_copies() -> Iterator[int]:
    """Yields a file of one page whose first byte is not 0 while a copy runs in this process."""
    fd = os.memfd_create("omni-connector-copies", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as page, memoryview(page) as flag:
            COPIES.show(flag)
            try:
                yield fd
            finally:
                COPIES.hide(flag)
    finally:
        os.close(fd)


def _wait_for_copies(stopped: threading.Event) -> bool:
    """Wait while a copy runs; returns whether to go on."""
    while COPIES.running and not stopped.is_set():
        stopped.wait(_PAUSE_S)
    return not stopped.is_set()
