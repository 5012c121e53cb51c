# SPDX-License-Identifier: Apache-2.0
"""Copies and checksums of many slots in one call, without the GIL, past the processor's caches.

numpy copies one row in a call. Between two calls it takes the GIL, for which it waits while a model
runner computes in Python, and spins. A row of less than about 100 MiB it copies through the caches,
so that the processor reads each line of the target before it overwrites it: half as many bytes a
second. So kernels/copy.c has a loop of its own, with stores that bypass the caches. It asks for the
source's bytes a while before it needs them, since the processor does not look beyond a page, and
makes the checksum, xxh3-64, from the very registers that it stores: a library reads all of it once
more.

Where the loop cannot be compiled, or its result is not that of numpy and xxhash, `native_copy` is
None, and who copies takes numpy.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.runtime.machine_code import CodeDeniedError, compiled, kernel

logger = logging.getLogger("vllm.omni_connector.native")

ALIGNMENT: Final = 64
"""Addresses of targets, and lengths of rows, are multiples of this."""

LEAST_HASHED: Final = 256
"""Bytes of a slot from which on it is hashed here: up to 240, xxh3 is another algorithm."""

SUMS: Final = 8
"""Sums of 64 bits of which a checksum is made."""

_FIRST_SUMS: Final = np.array(
    [
        0xC2B2AE3D,
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x85EBCA77,
        0x27D4EB2F165667C5,
        0x9E3779B1,
    ],
    np.uint64,
)
"""Those that xxh3-64 begins with."""

_STATE_BYTES: Final = 8 * (len(_FIRST_SUMS) + 2)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a block's content as addresses, in the order in which a slot packs them.

    Attributes:
        starts, strides: address of each in block 0, and bytes from one block to the next `(rows,)`.
        offsets, lengths: its first byte in a slot, and its bytes `(rows,)`.
        num_blocks: how many blocks there are.
        nbytes: of a block's content.
        whole: whether all lengths are multiples of `ALIGNMENT`.
    """

    starts: NDArray[np.int64]
    strides: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_blocks: int
    nbytes: int
    whole: bool

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], num_blocks: int) -> "Rows":
        """Rows of (start, stride, length), in slot order, whose memory the caller keeps."""
        starts, strides, lengths = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        ends = np.cumsum(lengths)
        whole = not (lengths % ALIGNMENT).any()
        places = starts, strides, ends - lengths, lengths
        return cls(*places, num_blocks, int(lengths.sum()), bool(whole))

    def between(self, first: int, end: int) -> "Rows":
        """The same rows of a slot's bytes from `first` to `end` alone, with offsets from `first`
        on."""
        edges = np.unique([first, end, *self.offsets.tolist()])
        edges = edges[(edges >= first) & (edges <= end)]
        begins = edges[:-1]
        row = np.searchsorted(self.offsets, begins, side="right") - 1
        lengths = np.diff(edges)
        return Rows(
            self.starts[row] + begins - self.offsets[row],
            self.strides[row],
            begins - first,
            lengths,
            self.num_blocks,
            end - first,
            not (lengths % ALIGNMENT).any(),
        )

    def blocks(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their addresses in blocks `(blocks, rows)`.

        Raises:
            IndexError: a block that does not exist.
        """
        _require(block_ids, self.num_blocks)
        return self.starts + block_ids[:, None] * self.strides

    def slots(self, slots: NDArray[np.uint8], slot_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their addresses in slots `(slots, rows)`.

        Raises:
            IndexError: a slot that does not exist.
        """
        _require(slot_ids, len(slots))
        return self.offsets + (_address(slots) + slot_ids[:, None] * slots.strides[0])


def _require(ids: NDArray[np.int64], limit: int) -> None:
    # Outside of numpy, an id that does not exist is another's memory.
    if ids.size and int(ids.view(np.uint64).max()) >= limit:  # one below 0 is a large one
        raise IndexError(f"ids from {ids.min()} to {ids.max()}, of {limit}")


def begin(slots: int, nbytes: int) -> NDArray[np.uint64]:
    """States of the checksums of `slots` slots of `nbytes` bytes, before the first copy."""
    states = np.empty((slots, SUMS + 2), np.uint64)
    states[:, :-2] = _FIRST_SUMS
    states[:, -2:] = nbytes // ALIGNMENT
    return states


def checksums(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The checksums `(slots,)` that states `(slots, 10)` give when all bytes were copied."""
    return states[:, -1].copy()


def _address(array: NDArray[Any]) -> int:
    """Where an array begins."""
    if array.size and array.flags.carray:
        memory: Any = array  # mypy does not know that arrays are buffers
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return array.ctypes.data  # ten times as slow


class NativeCopy:
    """Copies rows between addresses, for which the caller answers until the call has ended."""

    def __init__(self) -> None:
        self._engine = compiled(kernel(__name__, "copy.ll"))  # the code is gone with it
        pointer = ctypes.c_void_p
        number = ctypes.c_int64
        kind = ctypes.CFUNCTYPE(None, *(3 * [pointer]), number, number, pointer)
        self._copy = kind(self._engine.get_function_address("copy"))
        self._copy_hashed = kind(self._engine.get_function_address("copy_hashed"))
        hashing = ctypes.CFUNCTYPE(None, pointer, pointer, number, number, pointer)
        self._hash = hashing(self._engine.get_function_address("hash"))

    def __call__(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        states: NDArray[np.uint64],
        *,
        checksum: bool,
    ) -> None:
        """Copy the rows of some slots; arguments and errors as `copying`."""
        self.copying(targets, sources, lengths, states, checksum=checksum)(slice(0, len(targets)))

    def copying(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        states: NDArray[np.uint64],
        *,
        checksum: bool,
    ) -> "OfSlots":
        """What copies the rows of some slots, for several threads to call.

        Args:
            targets, sources: addresses `(slots, rows)`; targets are multiples of `ALIGNMENT`.
            lengths: bytes, multiples of `ALIGNMENT` `(rows,)`.
            states: of `begin` `(slots, 10)`, and then of the copy that had the bytes before these.
            checksum: whether to go on with the checksums; without, states have none.

        Raises:
            ValueError: arrays of other shapes; nothing was copied.
        """
        if sources.shape != targets.shape:
            raise ValueError(f"rows {targets.shape} from {sources.shape}, lengths {lengths.shape}")
        run = self._copy_hashed if checksum else self._copy
        return OfSlots(run, (targets, sources), lengths, states)

    def hash(
        self,
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        states: NDArray[np.uint64],
    ) -> None:
        """Go on with the checksums over rows that are not copied; arguments as `copying`."""
        self.hashing(sources, lengths, states)(slice(0, len(sources)))

    def hashing(
        self,
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        states: NDArray[np.uint64],
    ) -> "OfSlots":
        """As `copying`, of what `hash` does."""
        return OfSlots(self._hash, (sources,), lengths, states)


class OfSlots:
    """Machine code that goes over the rows of slots. All that Python does is done when it is made,
    once for all threads, as only one thread runs Python at a time.

    Args:
        run: the code.
        places: addresses `(slots, rows)`, one array or two.
        lengths: bytes `(rows,)`.
        states: of checksums `(slots, 10)`.

    Raises:
        ValueError: arrays of other shapes.
    """

    def __init__(
        self,
        run: Callable[..., None],
        places: tuple[NDArray[np.int64], ...],
        lengths: NDArray[np.int64],
        states: NDArray[np.uint64],
    ) -> None:
        slots, self._rows = places[0].shape
        if (
            lengths.shape != (self._rows,)
            or states.shape != (slots, SUMS + 2)
            or not states.flags.c_contiguous
        ):
            raise ValueError(
                f"rows {places[0].shape}, lengths {lengths.shape}, states {states.shape}"
            )
        self._run = run
        # Arrays of which only the addresses are used below.
        self._kept = [np.ascontiguousarray(each) for each in (*places, lengths)] + [states]
        *self._places, self._lengths, self._states = map(_address, self._kept)

    def __call__(self, slots: slice) -> None:
        """Go over some of the slots, from `start` to `stop`."""
        first = slots.start
        places = [each + first * self._rows * 8 for each in self._places]
        states = self._states + first * _STATE_BYTES
        self._run(*places, self._lengths, slots.stop - first, self._rows, states)


@functools.cache
def native_copy() -> NativeCopy | None:
    """The copy, compiled at the first call; None where it cannot be had."""
    try:
        copy = NativeCopy()
        _check(copy)
    except CodeDeniedError:  # which it has said
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, numpy does the work
        logger.warning(
            "KV blocks are copied with numpy, which is slower: machine code cannot be used (%s)",
            error,
        )
        return None
    return copy


def _check(copy: NativeCopy) -> None:
    """Raise RuntimeError unless it copies and hashes like numpy and xxhash."""
    for lengths in ([256], [1024], [64, 1024, 0, 2048, 192], [1088, 64 * 16, 4096]):
        ends = np.cumsum(lengths)
        size = int(ends[-1])
        starts = ends - lengths
        room: Any = np.zeros(2 * size + ALIGNMENT, np.uint8)
        target = room[-room.ctypes.data % ALIGNMENT :][: 2 * size].reshape(2, size)
        source = np.random.default_rng(0).integers(0, 256, (2, size), np.uint8)
        for checksum in (False, True):
            target[:] = 0
            states = begin(2, size)
            passed = begin(2, size)
            for rows in (slice(0, 1), slice(1, None)):  # as a copy of layers
                some = np.array(lengths[rows], np.int64)
                offsets = starts[rows] + size * np.arange(2)[:, None]
                places = offsets + target.ctypes.data, offsets + source.ctypes.data
                copy(*places, some, states, checksum=checksum)
                copy.hash(places[1], some, passed)
            hashes = [xxhash.xxh3_64_intdigest(content.data) for content in source]
            if (
                not np.array_equal(target, source)
                or (checksum and checksums(states).tolist() != hashes)
                or checksums(passed).tolist() != hashes
            ):
                raise RuntimeError("its results differ from those of numpy and xxhash")
