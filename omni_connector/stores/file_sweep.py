# SPDX-License-Identifier: Apache-2.0
"""Keeps a folder of blocks within its size: who writes to it removes what was used longest ago.

One sweeper at a time works on a folder, by a lock on a file in it, which the kernel drops with its
process. Where the file system has no locks, several may work at once: they find the same blocks to
be the oldest, and none minds a file that has gone.
"""

import contextlib
import errno
import fcntl
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Generator
from typing import Final

import numpy as np

from omni_connector.stores.file_folder import BlockFolder

# A sweep begins beyond `_HIGH` of the size, and ends at `_LOW`. A writer asks for the next sweep
# once it has filled 1 / `_SHARE` of the room left, because a few others may write meanwhile.
_HIGH: Final = 0.95
_LOW: Final = 0.9
_SHARE: Final = 4

_EVERY_S: Final = 300.0  # between two sweeps, at least; and how long a total found is believed
_OTHER_SWEEPS_S: Final = 10.0  # until the next attempt while another process sweeps
_REST_S: Final = 1.0  # shortest rest after a sweep
_LEFT_OVER_S: Final = 3600.0  # age from which a temporary file belongs to a killed writer

# Without a given size: this part of what the file system would have free without the store.
_PART: Final = 10


class Sweeper:
    """What this process knows of the size of a folder, and its turns at sweeping it.

    Args:
        folder: that is swept.
        size: bytes that it may hold; None takes a tenth of what its file system would have free
            without it. What the file system has no room for is no part of the size either.
        clock: seconds, monotonic.
        wall: seconds since the epoch, as files have them.
    """

    def __init__(
        self,
        folder: BlockFolder,
        size: int | None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._size = size
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._written = 0
        self._total: int | None = None
        self._limit = 0
        self._full = False
        self._next = self._not_before = -math.inf

    def add(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            self._written += nbytes

    def no_room(self) -> None:
        """Say that the file system is full."""
        with self._lock:
            self._full = True

    def due(self) -> float:
        """Seconds until the next sweep is due."""
        now = self._clock()
        return max(0.0, self._not_before - now, 0.0 if self.urgent() else self._next - now)

    def sweep(self) -> Generator[None, None, None]:
        """Bring the folder within its size, in pieces. Nothing is done while another sweeps.

        Raises:
            OSError: the file system fails.
        """
        began = self._clock()
        self._not_before = began + _OTHER_SWEEPS_S
        fd = os.open(self._folder.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked(fd):
                return
            total = None if self.urgent() else self._told(fd)
            if total is not None:
                self._learn(total)
            if total is None or total > _HIGH * self._limit:
                with self._lock:
                    full, self._written, self._full = self._full, 0, False
                total = yield from self._scan_and_remove(full)
                with contextlib.suppress(OSError):  # on a full disk: the next one scans again
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d\n" % total, 0)
        finally:
            os.close(fd)
        now = self._clock()
        self._next = now + max(_EVERY_S, 20 * (now - began))
        self._not_before = now + max(_REST_S, 4 * (now - began))

    def urgent(self) -> bool:
        """Whether so much was written since the last sweep that the next one must not wait."""
        with self._lock:
            if self._total is None:
                return False
            return self._full or self._written * _SHARE > self._limit - self._total

    def _told(self, fd: int) -> int | None:
        """The size that another sweeper found lately."""
        if abs(self._wall() - os.fstat(fd).st_mtime) > _EVERY_S:
            return None
        text = os.pread(fd, 32, 0).strip()
        return int(text) if text.isdigit() else None

    def _learn(self, total: int) -> None:
        room = total + self._folder.free_bytes()
        with self._lock:
            self._total = total
            self._limit = min(room, room // _PART if self._size is None else self._size)

    def _scan_and_remove(self, full: bool) -> Generator[None, None, int]:
        sizes, times = array("q"), array("q")
        left_over = (self._wall() - _LEFT_OVER_S) * 1e9
        for file in self._folder.files():
            if file is None:
                yield
            elif not file.temporary:
                sizes.append(file.nbytes)
                times.append(file.used_ns)
            elif file.used_ns < left_over:
                self._folder.remove(file.path)
        total = sum(sizes)
        self._learn(total)
        if full:  # which the free bytes do not show where a quota or the inodes are used up
            self._limit = min(self._limit, total)
        if total <= _HIGH * self._limit:
            return total
        excess = total - int(_LOW * self._limit)
        used, taken = np.frombuffer(times, np.int64), np.frombuffer(sizes, np.int64)
        order = np.argsort(used, kind="stable")
        newest = used[order[np.searchsorted(np.cumsum(taken[order]), excess)]]
        excess -= int(taken[used < newest].sum())  # bytes of files as old as `newest`
        for file in self._folder.files():
            if file is None:
                yield
            elif not file.temporary and (
                file.used_ns < newest or (file.used_ns == newest and excess > 0)
            ):
                if self._folder.remove(file.path):
                    total -= file.nbytes
                if file.used_ns == newest:
                    excess -= file.nbytes
        self._learn(total)
        return total


def _locked(fd: int) -> bool:
    """Whether the lock was taken, or there are no locks on this file system."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    return True
