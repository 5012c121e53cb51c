# SPDX-License-Identifier: Apache-2.0
"""What a copier needs of a device: work in order beside the engine's, and fences between them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class RowPart(NamedTuple):
    """Consecutive bytes of longer rows, whose checksums are made part by part.

    Attributes:
        first: where they begin in a row.
        length: bytes of a row.
        sums: int64 `(n, 8)` in the device's memory: those that xxh3-64 begins with, or those behind
            the part before. Hashing may write them.
    """

    first: int
    length: int
    sums: torch.Tensor

    def ends(self, nbytes: int) -> bool:
        """Whether a part of so many bytes is the last one."""
        return self.first + nbytes == self.length


class Stream(ABC):
    """An order of work on a device, beside the engine's own.

    The device does the work some time after it was launched: in the order in which it was put on
    this stream, and in any order beside that of other streams. Only a fence orders two streams, and
    only `finish` tells the host that what it reads or reuses is there.
    """

    @abstractmethod
    def beside(self) -> "Stream":
        """Another stream of the same device, for other work. It uses what this one has pinned."""

    @abstractmethod
    def active(self) -> AbstractContextManager[object]:
        """While entered, `launch` puts work on this stream."""

    def launch(
        self, work: Callable[[], object], *, host: torch.Tensor | None = None, lands: bool = False
    ) -> None:
        """Have the device do `work` later.

        Args:
            work: one operation of torch on the device's tensors. CUDA's kernels and copies are
                asynchronous by themselves, so calling it puts it on the active stream.
            host: the memory of the host that it uses, which lies in one `host_buffer` or in one
                piece that was pinned.
            lands: whether it writes that memory, which nobody may read before it is finished.
        """
        work()

    @abstractmethod
    def fence(self) -> object:
        """Mark the engine's work so far; called on the engine's thread."""

    @abstractmethod
    def reached(self, fence: object) -> bool:
        """Whether what `fence` marked is done. Never waits.

        Raises:
            RuntimeError: the device has failed.
        """

    @abstractmethod
    def wait(self, fence: object) -> None:
        """Put no later work of this stream before what `fence` marked, or `mark` of another stream
        of the device."""

    @abstractmethod
    def mark(self) -> object:
        """Mark this stream's work so far."""

    @abstractmethod
    def finish(self, mark: object | None) -> None:
        """Block until what `mark` marked is done, or all of this stream's work if None.

        Raises:
            RuntimeError: the device has failed; it does no more of this stream's work.
        """

    @abstractmethod
    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """An int8 tensor in host memory that this stream copies to and from fastest.

        Raises:
            RuntimeError: there is no memory.
        """

    @abstractmethod
    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """An int8 tensor in the device's memory.

        Raises:
            RuntimeError: there is no memory.
        """

    @abstractmethod
    def can_hash(self, nbytes: int) -> bool:
        """Whether the device hashes rows of so many bytes: whole, or in parts of whole stripes."""

    @abstractmethod
    def prepare_hash(self, nbytes: int) -> None:
        """Allocate the memory that `hash` takes for rows of so many bytes in all.

        Raises:
            RuntimeError: there is no memory.
        """

    @abstractmethod
    def hash(
        self,
        rows: torch.Tensor,
        *,
        there: object,
        sums: torch.Tensor,
        part: RowPart | None = None,
    ) -> None:
        """Have the device hash rows later, beside the work of this stream. A later `mark` is
        reached when that is done, too.

        Args:
            rows: int8 `(n, nbytes)` in the device's memory, contiguous, of which it can, and no
                more bytes than it is prepared for. Nobody may write them before that.
            there: what `mark` has returned when the work that writes them was put on this stream.
            sums: int64 `(n,)` of a `host_buffer`: gets xxh3-64 of each row, which nobody may read
                before it is finished. Of a part that is not the last one `(n, 8)`: gets the sums
                behind it.
            part: which bytes of longer rows these are; None for whole rows.

        Raises:
            RuntimeError: the device has failed.
        """

    @abstractmethod
    def can_move(self, nbytes: int) -> bool:
        """Whether kernels of the device read and write rows of so many bytes in pinned memory. Rows
        lie at multiples of 16 bytes."""

    @abstractmethod
    def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        """Have kernels of the device copy rows later, in the order of this stream: one launch,
        wherever the rows of the host lie. Called while this stream is active.

        Args:
            staged: int8 `(n, nbytes)` in the device's memory, contiguous.
            rows: int64 `(n,)` there: the address of each row of the host, in a piece that was
                pinned.
            to_host: whether the rows of the host are written, which nobody may read before that is
                finished; else they are read.

        Raises:
            RuntimeError: the device has failed.
        """

    @abstractmethod
    def pin(self, slots: NDArray[np.uint8]) -> int:
        """Let this stream copy to and from `slots` itself, or only from them where they are
        read-only; returns 0 where it can, else the device's error code.

        May be called on any thread; after `close` it refuses.
        """

    @abstractmethod
    def unpin(self, slots: NDArray[np.uint8]) -> None:
        """Undo a `pin`, when no work with these slots is left.

        May be called on any thread; after `close` it does nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Undo every `pin`; calling it again does nothing."""
