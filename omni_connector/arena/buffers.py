# SPDX-License-Identifier: Apache-2.0
"""Memory for objects that are received."""

import collections
import contextlib
import mmap
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import TransportError

LARGE_BYTES: Final = 2 << 20
"""Bytes from which on a buffer has pages of its own (a huge page); numpy allocates smaller ones."""

ALIGNMENT: Final = 64
"""Alignment of `aligned` arrays, in bytes: a cache line."""

_MADV_FREE: Final = 8


class Buffers:
    """Buffers of bytes. A buffer is in use until the last array on it is collected.

    A fresh page costs more than the copy into it. So the largest returned buffer is kept for the
    next object of about its size. Meanwhile the kernel may reclaim its memory (MADV_FREE).
    """

    def __init__(self) -> None:
        # One buffer at most. Finalizers return buffers at any moment; a deque needs no lock.
        self._spare: collections.deque[mmap.mmap] = collections.deque(maxlen=1)
        self._closed = False

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of `nbytes`, with any content.

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
        # A finalizer, on the thread that drops the last array: it must neither wait nor fail.
        kept = 0
        with contextlib.suppress(IndexError):  # there is none, or a thread has just taken it
            kept = len(self._spare[0])
        if not self._closed and len(pages) >= kept:
            _advise(pages, _MADV_FREE)
            self._spare.append(pages)


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """A new uint8 array, with any content, whose address is a multiple of `ALIGNMENT`."""
    room: NDArray[np.uint8] = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -int(room.ctypes.data) % ALIGNMENT  # numpy aligns to 16 bytes only
    return room[start : start + nbytes]


def _advise(pages: mmap.mmap, advice: int) -> None:
    # Kernels without huge pages, and some sandboxes, refuse this, which does no harm.
    with contextlib.suppress(OSError):
        pages.madvise(advice)
