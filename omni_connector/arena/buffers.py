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

# Buffers of this size and more lie on pages of their own; numpy makes the smaller ones.
LARGE_BYTES: Final = 2 << 20

ALIGNMENT: Final = 64

_MADV_FREE: Final = 8


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
