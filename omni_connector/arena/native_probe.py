# SPDX-License-Identifier: Apache-2.0
"""Looks up blocks in the indexes of many engines, changes the own index, and computes tags, in one
call of machine code each.

numpy takes about 10 us for each index, however few blocks it looks up, and 100 us for a thousand
blocks. The loop in kernels/probe.c looks up each block first in the index that had the block
before, then in the others. It keeps the GIL, because the scheduler waits for the answer. To list 64
blocks in the own index takes 3 us, and numpy's calls 70. Where the code cannot be compiled,
`native_probe`, `native_change` and `native_tags` return None.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_connector.runtime.machine_code import compiled_or_none

NativeProbe = Callable[[bytes, int, NDArray[np.uint64], NDArray[np.int64], bool], int]
"""Takes the indexes (`struct index` of each, joined), their number, tags (blocks,), an array
(3, blocks) that it fills with each block's index, slot and generation, and whether to look up all
blocks. Else it stops at the first block that no index has. Returns the number of blocks that were
looked up, but for that one. With all blocks looked up, -1 stands for those that no index has. The
caller keeps all of that memory valid during the call."""

NativeChange = Callable[
    [bytes, NDArray[np.int64], NDArray[np.uint64] | None, NDArray[np.int64] | None], bool
]
"""Takes `struct own_index`, slots (slots,) that it removes from the index, and tags and generations
(slots,) with which it lists them anew, or None. Returns whether the index has all of these slots;
if not, nothing is changed. The caller holds a lock."""

NativeTags = Callable[[bytes, int, int, NDArray[np.uint64]], None]
"""Takes the hashes of blocks, all of one length of 8 bytes or more, joined; that length; the seed;
and an array (blocks,) that it fills with the tags. See `block_index.tags_of`."""


@functools.cache
def _engine() -> Any:
    """LLVM's engine for the code; None if it cannot be compiled."""
    otherwise = "Blocks are looked up with numpy, which is slower"
    return compiled_or_none(__name__, "probe.ll", otherwise)


@functools.cache
def native_change() -> NativeChange | None:
    """What changes an index, compiled at the first call; None if that fails."""
    if (engine := _engine()) is None:
        return None
    pointer = ctypes.c_void_p
    number = ctypes.c_int64
    prototype = ctypes.PYFUNCTYPE(number, ctypes.c_char_p, pointer, pointer, pointer, number)
    call = prototype(engine.get_function_address("change"))

    def change(
        index: bytes,
        slots: NDArray[np.int64],
        tags: NDArray[np.uint64] | None,
        generations: NDArray[np.int64] | None,
    ) -> bool:
        count = len(slots)
        slots = np.ascontiguousarray(slots, np.int64)
        if tags is None or generations is None:
            return bool(call(index, None, slots.ctypes.data, None, count))
        if not len(tags) == len(generations) == count:
            raise ValueError(f"{len(tags)} tags and {len(generations)} generations for {count}")
        tags = np.ascontiguousarray(tags, np.uint64)
        generations = np.ascontiguousarray(generations, np.int64)
        given = tags.ctypes.data, slots.ctypes.data, generations.ctypes.data
        return bool(call(index, *given, count))

    change.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return change


@functools.cache
def native_tags() -> NativeTags | None:
    """What computes tags, compiled at the first call; None if that fails."""
    if (engine := _engine()) is None:
        return None
    number = ctypes.c_int64
    prototype = ctypes.PYFUNCTYPE(
        None, ctypes.c_char_p, number, number, ctypes.c_uint64, ctypes.c_void_p
    )
    call = prototype(engine.get_function_address("tag"))

    def tag(hashes: bytes, hash_bytes: int, seed: int, tags: NDArray[np.uint64]) -> None:
        if hash_bytes < 8 or len(hashes) != len(tags) * hash_bytes:
            raise ValueError(f"{len(hashes)} bytes of {len(tags)} hashes of {hash_bytes}")
        call(hashes, hash_bytes, len(tags), seed, tags.ctypes.data)

    tag.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return tag


@functools.cache
def native_probe() -> NativeProbe | None:
    """The look-up, compiled at the first call; None if that fails."""
    if (engine := _engine()) is None:
        return None
    pointer = ctypes.c_void_p
    number = ctypes.c_int64
    arguments = ctypes.c_char_p, number, pointer, number, pointer, pointer, pointer
    leading = ctypes.PYFUNCTYPE(number, *arguments)(engine.get_function_address("probe"))
    each = ctypes.PYFUNCTYPE(None, *arguments)(engine.get_function_address("probe_each"))

    def probe(
        indexes: bytes,
        count: int,
        tags: NDArray[np.uint64],
        places: NDArray[np.int64],
        all_blocks: bool,
    ) -> int:
        if places.shape != (3, len(tags)) or not places.flags.c_contiguous:
            raise ValueError(f"places {places.shape} for {len(tags)} tags")
        tags = np.ascontiguousarray(tags, np.uint64)
        start, step = places.ctypes.data, places.strides[0]
        given = indexes, count, tags.ctypes.data, len(tags), start, start + step, start + 2 * step
        if all_blocks:
            each(*given)
            return len(tags)
        return int(leading(*given))

    probe.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return probe
