# SPDX-License-Identifier: Apache-2.0
"""Prefault: allocates the memory of an arena before it is needed, as first touches are slow."""

import ctypes
import errno
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

# A constant of Linux that the standard library does not name.
MADV_POPULATE_WRITE: Final = 23

# How many bytes ahead of the slots in use are allocated.
PREFAULT_AHEAD: Final = 256 << 20

_PREFAULT_CHUNK: Final = 16 << 20
_CLOSE_S: Final = 5.0


def overcommit_is_strict() -> bool:
    """Whether the kernel may refuse a page at its first touch, which kills with SIGBUS.

    In this mode an arena must allocate all its memory when it is made.
    """
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:  # a container may hide it; the mode is then hardly ever this one
        return False


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """Allocates the pages of a mapping from its start up to a moving mark, on a thread.

    Args:
        fd: the mapped file, of which this keeps a duplicate.
        mapped: the writable mapping, from the start of the file.
    """

    def __init__(self, fd: int, mapped: mmap.mmap) -> None:
        self._fd = os.dup(fd)
        self._pages = np.frombuffer(mapped, np.uint8)
        self._size = len(self._pages)
        self._wanted = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name="omni-connector-prefault", daemon=True
        )
        self._thread.start()

    def want(self, upto: int) -> None:
        """Move the mark to this many bytes, if it is not there yet. Cheap."""
        # This reads without the lock, as the mark only grows and a late chunk costs nothing.
        if self._wanted == self._size or upto < min(self._wanted + _PREFAULT_CHUNK, self._size):
            return
        with self._changed:
            self._wanted = max(self._wanted, min(upto, self._size))
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after its current chunk, in bounded time. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        done = 0
        while done < self._size:
            with self._changed:
                while not self._stopped and done >= self._wanted:
                    self._changed.wait()
                if self._stopped:
                    break
                upto = min(self._wanted, done + _PREFAULT_CHUNK)
            try:
                prefault(self._fd, self._pages, done, upto - done)
            except OSError as error:
                logger.warning(
                    "arena: stopped allocating memory ahead of use at %d of %d bytes: %s",
                    done,
                    self._size,
                    error,
                )
                break
            done = upto
        # Without this the thread's object would keep the mapping alive.
        del self._pages
        os.close(self._fd)


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
    address = pages.ctypes.data + start
    while _libc.madvise(address, length, MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # before Linux 5.14
            os.posix_fallocate(fd, start, length)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))
