# SPDX-License-Identifier: Apache-2.0
"""Keeps the books of an arena's slots for all blocks of a copy, in one call of machine code.

For a hundred blocks numpy takes some thirty calls, 150 us where the processor's caches hold other
things, as they do between two steps of an engine. The loops in kernels/slots.c take 10. They keep
the GIL, because the scheduler waits for them. Where the code cannot be compiled, `native_slots`
returns None.
"""

import ctypes
import functools
import logging
import struct
import sys
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.runtime.machine_code import CodeDeniedError, compiled, kernel

logger = logging.getLogger("vllm.omni_connector.native")

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
    again: NDArray[np.bool_]
    favoured: NDArray[np.bool_]
    pinned: NDArray[np.bool_]
    hash: NDArray[np.int64]
    depth: NDArray[np.uint8]
    past: NDArray[np.int64]
    past_depth: NDArray[np.uint8]
    new: NDArray[np.float64]
    used_again: NDArray[np.float64]


class NativeSlots:
    """The books of one pool. Slots are int64 arrays; all of them must be slots of the pool.

    Args:
        engine: LLVM's, with the code.
        arrays: of the pool, which it never replaces.
        most_new: contents of slots after which their counts by depth are halved.
        table: `struct table` of the slots' keys; see `NativeTable`.
    """

    def __init__(self, engine: Any, arrays: SlotArrays, most_new: float, table: bytes) -> None:
        number = ctypes.c_int64
        pointer = ctypes.c_void_p
        text = ctypes.c_char_p
        self._engine = engine  # the code is gone with it

        def call(name: str, *arguments: Any) -> Any:
            prototype = ctypes.PYFUNCTYPE(number, text, *arguments)
            return prototype(engine.get_function_address(name))

        rest = (text, pointer, number, pointer, pointer, pointer, number)
        self._begin = call("begin", text, text, pointer, *rest)
        self._filled = call("filled", text, pointer, pointer, number)
        self._let_go = call("let_go", pointer, number)
        self._arrays = arrays
        self._table = table
        self._marks = np.zeros(NUM_PROMPTS, bool)
        pointers = [each.ctypes.data for each in (*arrays, self._marks)]
        size = len(arrays.generation)
        self._words = struct.pack(f"={len(pointers)}QQd", *pointers, size, most_new)

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
        index, listed, tags_at = None, None, None
        if listing is not None:
            index, tags_of_slots = listing
            listed = tags_of_slots.ctypes.data
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

    def filled(
        self, slots: NDArray[np.int64], listing: tuple[bytes, NDArray[np.uint64]] | None
    ) -> int:
        """Copies into these slots have ended well; returns how many slots nobody holds."""
        slots = np.ascontiguousarray(slots, np.int64)
        index, listed = (None, None) if listing is None else (listing[0], listing[1].ctypes.data)
        return int(self._filled(self._words, index, listed, slots.ctypes.data, len(slots)))

    def let_go(self, slots: NDArray[np.int64]) -> bool:
        """One user less holds these slots, each of which is named once. Returns whether all of them
        are to be cached now, and none is favoured, pinned or used again."""
        slots = np.ascontiguousarray(slots, np.int64)
        return bool(self._let_go(self._words, slots.ctypes.data, len(slots)))


@functools.cache
def native_slots() -> Any:
    """LLVM's engine for the code, compiled at the first call; None if that fails."""
    try:
        if sys.byteorder != "little":
            raise OSError("this processor is big-endian")
        return compiled(kernel(__name__, "slots.ll"))
    except CodeDeniedError:  # which `compiled` has said
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, numpy does the work
        logger.warning(
            "Slots are kept with numpy, which is slower: machine code cannot be used (%s)", error
        )
        return None
