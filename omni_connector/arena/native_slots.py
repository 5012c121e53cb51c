# SPDX-License-Identifier: Apache-2.0
"""Keeps the books of an arena's slots for all blocks of a copy, in one call of machine code.

For a hundred blocks numpy takes some thirty calls, 150 us where the processor's caches hold other
things, as they do between two steps of an engine. The loops in kernels/slots.c take 10. They keep
the GIL, because the scheduler waits for them. Where the code cannot be compiled, `native_slots`
returns None.
"""

import ctypes
import functools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.eviction import KINDS
from omni_connector.runtime.machine_code import compiled_or_none

_RUN: Final = struct.Struct("=3q")

_GRANT: Final = struct.Struct("=3qd")

MOST_NEW: Final = 1 << 9
"""Most blocks that are examined in one call."""

NUM_PROMPTS: Final = 1 << 13
"""Numbers of prompts that the machine code takes are below this."""


class SlotArrays(NamedTuple):
    """The arrays of a pool and its eviction order, as in `struct slots` of kernels/slots.c."""

    generation: NDArray[np.int64]
    users: NDArray[np.int32]
    busy: NDArray[np.bool_]
    ready: NDArray[np.bool_]
    keyed: NDArray[np.bool_]
    tenant: NDArray[np.int64]
    privileged: NDArray[np.bool_]
    pinned_until: NDArray[np.float64]
    again: NDArray[np.bool_]
    favoured: NDArray[np.bool_]
    pinned: NDArray[np.bool_]
    hash: NDArray[np.int64]
    depth: NDArray[np.uint8]
    past: NDArray[np.int64]
    past_depth: NDArray[np.uint8]
    new: NDArray[np.float64]
    used_again: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class NewBlocks:
    """Blocks of one group that have filled, to be examined together.

    Attributes:
        group: position among the transferred groups.
        keys: of each block.
        rows: of the keys; see `rows_of`.
        runs: int64 (runs, 3) as bytes: of consecutive blocks of one prompt the number, and the
            prompt and tenant as for `SlotPool.keep`.
        seed: of their tags; see `seed_of`.
    """

    group: int
    keys: Sequence[bytes]
    rows: bytes
    runs: bytes
    seed: int

    @property
    def by_block(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompts and tenants, of each block."""
        counts, prompts, tenants = np.frombuffer(self.runs, np.int64).reshape(-1, 3).T
        return prompts.repeat(counts), tenants.repeat(counts)

    @property
    def owners(self) -> Counter[int]:
        """How many of the blocks each tenant will own."""
        owners = Counter[int]()
        for count, _, tenant in _RUN.iter_unpack(self.runs):
            owners[tenant] += count
        del owners[0]
        return owners


@dataclass(frozen=True, slots=True)
class Grant:
    """What the hints of a request ask for consecutive new blocks.

    Attributes:
        first, count: place of the first of them among the new blocks, and their number.
        tenant: who owns their slots, 0 for nobody.
        favours: whether they are to be favoured.
        pin_s: seconds for which they are to be pinned; 0 where they are not.
    """

    first: int
    count: int
    tenant: int
    favours: bool
    pin_s: float


class _Batch:
    """Memory for what is found out about new blocks of a group: `struct batch`."""

    def __init__(self) -> None:
        self._arrays = (
            np.empty(MOST_NEW, np.uint64),
            np.empty(MOST_NEW, np.int64),
            np.empty(MOST_NEW, np.int64),
            np.zeros(2 * MOST_NEW, np.int32),
        )
        self.addresses = [each.ctypes.data for each in self._arrays]
        bits = (2 * MOST_NEW).bit_length() - 1
        self.words = struct.pack("=5Q", *self.addresses, bits)


class NativeSlots:
    """The books of one pool. Slots are int64 arrays; all of them must be slots of the pool.

    Args:
        engine: LLVM's, with the code.
        arrays: of the pool, which it never replaces.
        rules: see `EvictionOrder.rules`.
        table: `struct table` of the slots' keys; see `NativeTable`.
    """

    def __init__(
        self,
        engine: Any,
        arrays: SlotArrays,
        rules: tuple[float, float, float],
        table: bytes,
    ) -> None:
        number = ctypes.c_int64
        pointer = ctypes.c_void_p
        text = ctypes.c_char_p
        seed = ctypes.c_uint64
        self._engine = engine  # the code is gone with it

        def call(name: str, *arguments: Any) -> Any:
            prototype = ctypes.PYFUNCTYPE(number, text, *arguments)
            return prototype(engine.get_function_address(name))

        rest = (text, pointer, number, pointer, pointer, pointer, number)
        self._begin = call("begin", text, text, pointer, *rest)
        self._filled = call("filled", text, pointer, pointer, number)
        self._privilege = call("privilege", pointer, text, number)
        self._let_go = call("let_go", pointer, number, pointer, pointer)
        # What `let_go` says: the slots by kind, and how many there are of each.
        self._by_kind = np.empty(0, np.int64)
        self._counts = (number * KINDS)()
        self._arrays = arrays
        self._table = table
        self._marks = np.zeros(NUM_PROMPTS, bool)
        pointers = [each.ctypes.data for each in (*arrays, self._marks)]
        size = len(arrays.generation)
        self._words = struct.pack(f"={len(pointers)}QQ3d", *pointers, size, *rules)
        given = (text, text, number, text, text, number, seed, number, text)
        self._examine = call("examine", *given)
        self._batches: list[_Batch] = []

    def begin(
        self,
        rows: bytes,
        slots: NDArray[np.int64],
        tenants: NDArray[np.int64],
        prompts: NDArray[np.int64] | None,
        listing: tuple[bytes, NDArray[np.uint64]] | None,
        tags: NDArray[np.uint64] | None,
        evicted: int,
    ) -> bool | None:
        """Copies of new blocks begin, into slots that were free or have been evicted.

        Args:
            rows: of their keys; see `rows_of`.
            tenants, prompts: of each block; see `SlotPool.keep`.
            listing: `struct own_index` of the arena's index, and the tag of each slot; None where
                no peer looks anything up.
            tags: of each block, if there is a listing.
            evicted: number of evictions; negative where nothing was evicted ever.

        Returns:
            Whether all blocks have one tenant; None, and changes nothing, where a key has fewer
            than 8 bytes or the number of a prompt is not below `NUM_PROMPTS`.
        """
        count = len(slots)
        index, listed = _addresses_of(listing)
        tags_at = None
        if listing is not None:
            tags = np.ascontiguousarray(tags, np.uint64)
            tags_at = tags.ctypes.data
        slots = np.ascontiguousarray(slots, np.int64)
        tenants = np.ascontiguousarray(tenants, np.int64)
        numbers = None if prompts is None else np.ascontiguousarray(prompts, np.int64)
        same = self._begin(
            self._words,
            self._table,
            index,
            listed,
            rows,
            slots.ctypes.data,
            count,
            tags_at,
            tenants.ctypes.data,
            None if numbers is None else numbers.ctypes.data,
            evicted,
        )
        return None if same < 0 else bool(same)

    def are_new(
        self, groups: Sequence[NewBlocks], indexes: bytes, num_indexes: int, *, picks: bool
    ) -> bool:
        """Whether blocks are all new and admitted, so that each may get a slot. The keys of a group
        have one length of 8 bytes or more, no key is there twice, and neither the pool nor an index
        has one.

        Args:
            groups: of each at least one block, and `MOST_NEW` at most.
            indexes: `struct index` of each, joined.
            picks: whether new blocks of some depths are passed over.
        """
        while len(self._batches) < len(groups):
            self._batches.append(_Batch())
        return all(
            self._examine(
                self._words,
                self._table,
                indexes,
                num_indexes,
                each.rows,
                each.runs,
                len(each.runs) // _RUN.size,
                each.seed,
                picks,
                batch.words,
            )
            for each, batch in zip(groups, self._batches, strict=False)
        )

    def begin_new(
        self,
        number: int,
        blocks: NewBlocks,
        slots: NDArray[np.int64],
        listing: tuple[bytes, NDArray[np.uint64]] | None,
        evicted: int,
    ) -> bool:
        """Copies of blocks begin that `are_new`; see `begin`.

        Args:
            number: of their group among those examined last.
        """
        tags, prompts, tenants, _ = self._batches[number].addresses
        index, listed = _addresses_of(listing)
        given = (self._table, index, listed, blocks.rows, slots.ctypes.data, len(slots))
        one_tenant = self._begin(self._words, *given, tags, tenants, prompts, evicted)
        assert one_tenant >= 0, "their keys are long enough"
        return bool(one_tenant)

    def filled(
        self, slots: NDArray[np.int64], listing: tuple[bytes, NDArray[np.uint64]] | None
    ) -> int:
        """Copies into these slots have ended well; returns how many slots nobody holds."""
        slots = np.ascontiguousarray(slots, np.int64)
        index, listed = _addresses_of(listing)
        return int(self._filled(self._words, index, listed, slots.ctypes.data, len(slots)))

    def privilege(
        self, slots: NDArray[np.int64], grants: Sequence[Grant], ends: Sequence[float]
    ) -> None:
        """Favour or pin slots that were given to new blocks since.

        Args:
            slots: of the new blocks.
            ends: when the pin of each grant ends; negative where nothing is pinned.
        """
        packed = b"".join(
            [
                _GRANT.pack(each.first, each.count, each.favours, end)
                for each, end in zip(grants, ends, strict=True)
            ]
        )
        self._privilege(self._words, slots.ctypes.data, packed, len(grants))

    def let_go(self, slots: NDArray[np.int64]) -> Sequence[tuple[int, NDArray[np.int64]]]:
        """One user less holds these slots, each of which is named once.

        Returns:
            If all of them are to be cached now, the slots by kind, as `EvictionOrder` numbers the
            kinds; else nothing.
        """
        slots = np.ascontiguousarray(slots, np.int64)
        if len(self._by_kind) < len(slots):
            self._by_kind = np.empty(len(slots), np.int64)
        given = (slots.ctypes.data, len(slots), self._by_kind.ctypes.data, self._counts)
        match self._let_go(self._words, *given):
            case 0:
                return ()
            case 1:  # most often
                return ((0, slots),)
        ends = accumulate(self._counts)
        return [
            (kind, self._by_kind[end - count : end].copy())
            for kind, (count, end) in enumerate(zip(self._counts, ends, strict=True))
            if count
        ]


def _addresses_of(
    listing: tuple[bytes, NDArray[np.uint64]] | None,
) -> tuple[bytes | None, int | None]:
    """What the code is told of a listing: the index, and where the tags of the slots lie."""
    if listing is None:
        return None, None
    index, tags_of_slots = listing
    return index, tags_of_slots.ctypes.data


@functools.cache
def native_slots() -> Any:
    """LLVM's engine for the code, compiled at the first call; None if that fails."""
    return compiled_or_none(__name__, "slots.ll", "Slots are kept with numpy, which is slower")
