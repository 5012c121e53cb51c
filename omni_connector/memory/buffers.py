# SPDX-License-Identifier: Apache-2.0
"""Memory for objects that are received, and threads that copy them."""

import collections
import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import TransportError

# Buffers of this size and more lie on pages of their own; numpy makes the smaller ones.
LARGE_BYTES: Final = 1 << 20

ALIGNMENT: Final = 64

_MADV_FREE: Final = 8
_MAX_THREADS: Final = 4
_BYTES_PER_THREAD: Final = 16 << 20

_Item = TypeVar("_Item")


class Buffers:
    """Buffers of bytes, each in use until the last array of it is gone.

    A fresh page costs more than the copy into it. So the largest buffer that came back is kept for
    the next object of about its size. Meanwhile the kernel may take its memory (MADV_FREE).
    """

    def __init__(self) -> None:
        # At most one. A deque needs no lock: buffers come back from finalizers, at any moment.
        self._spare: collections.deque[mmap.mmap] = collections.deque(maxlen=1)
        self._closed = False

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of so many bytes, of any content.

        Raises:
            TransportError: there is no memory.
        """
        try:
            if nbytes < LARGE_BYTES:
                return aligned(nbytes)
            pages = self._pages(nbytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise TransportError(f"no memory for an object of {nbytes} bytes: {error}") from error
        buffer: NDArray[np.uint8] = np.frombuffer(pages, np.uint8, count=nbytes)
        weakref.finalize(buffer, self._give_back, pages).atexit = False
        return buffer

    def close(self) -> None:
        """Keep no buffer any more. Buffers that are in use stay valid. Idempotent."""
        self._closed = True
        self._spare.clear()

    def _pages(self, nbytes: int) -> mmap.mmap:
        try:
            spare = self._spare.pop()
        except IndexError:
            pass
        else:
            if nbytes <= len(spare) <= 2 * nbytes:
                return spare
            if len(spare) > nbytes:
                self._spare.append(spare)
            del spare
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(pages, mmap.MADV_HUGEPAGE)
        return pages

    def _give_back(self, pages: mmap.mmap) -> None:
        # Runs on whatever thread lets go of the last array: it must neither wait nor fail.
        kept = 0
        with contextlib.suppress(IndexError):  # a thread may take it at any moment
            kept = len(self._spare[0])
        if not self._closed and len(pages) >= kept:
            _advise(pages, _MADV_FREE)
            self._spare.append(pages)


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """A new array of bytes, of any content, whose address is a multiple of `ALIGNMENT`."""
    room: NDArray[np.uint8] = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -int(room.ctypes.data) % ALIGNMENT  # numpy aligns to 16 bytes only
    return room[start : start + nbytes]


def _advise(pages: mmap.mmap, advice: int) -> None:
    # Kernels without huge pages, and some sandboxes, refuse this, which does no harm.
    with contextlib.suppress(OSError):
        pages.madvise(advice)


def share_out(work: Callable[[_Item], None], items: Iterable[_Item], nbytes: int) -> None:
    """Call `work` with each item, on several threads where that is worth it.

    Args:
        work: should spend its time without the GIL.
        items: what it is called with.
        nbytes: bytes that are copied in all.

    Raises:
        The first error that `work` raises. Items that are not begun by then are left out.
    """
    threads = min(_MAX_THREADS, nbytes // _BYTES_PER_THREAD)
    if threads > 1:
        threads = min(threads, len(os.sched_getaffinity(0)))
    # The threads share a list's iterator, so that the quicker ones take more items.
    left = iter(list(items))
    errors: list[BaseException] = []

    def take_part() -> None:
        try:
            for item in left:
                work(item)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)
            collections.deque(left, maxlen=0)

    # These threads make no turns, as they live within this one call, which waits for their end.
    others = [
        threading.Thread(target=take_part, name="omni-connector-copy", daemon=True)
        for _ in range(threads - 1)
    ]
    with contextlib.suppress(RuntimeError):  # the system has no more threads: fewer do the work
        for thread in others:
            thread.start()
    take_part()
    # Even if something is raised here, no thread may go on: its memory could be used again.
    while working := [each for each in others if each.is_alive()]:
        try:
            for thread in working:
                thread.join()
        except BaseException as error:  # noqa: BLE001 - raised below, as what a signal handler raises
            errors.append(error)
            collections.deque(left, maxlen=0)
    if errors:
        raise errors[0]
