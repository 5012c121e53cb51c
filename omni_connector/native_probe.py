# SPDX-License-Identifier: Apache-2.0
"""The look-up of a prompt's leading blocks in the indexes of many engines, in one call.

numpy takes about ten microseconds for each index it asks, however few blocks it asks for, and a
hundred for a thousand blocks. This loop asks one index after the other for each block, beginning
with that which had the block before. It keeps the GIL: the scheduler waits for the answer.

As in `native_copy`, llvmlite compiles it; without llvmlite `native_probe` is None.
"""

import ctypes
import functools
import logging
import sys
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.native_code import CodeDeniedError
from omni_connector.native_copy import compiled

logger = logging.getLogger("vllm.omni_connector.native")

# An index is {fingerprints, cells, checks, generations, number of slots}, as arena/block_index.py
# lays them out. Others write to them meanwhile: each word is read once, and then used.
_CODE: Final = """
declare i64 @llvm.cttz.i64(i64, i1)

define i64 @probe(ptr %indexes, i64 %num_indexes, ptr %tags, i64 %num_tags,
                  ptr %owners, ptr %slots, ptr %generations) {
entry:
  %nothing = icmp eq i64 %num_tags, 0
  %nowhere = icmp eq i64 %num_indexes, 0
  %none = or i1 %nothing, %nowhere
  br i1 %none, label %empty, label %block

empty:
  ret i64 0

block:
  %i = phi i64 [0, %entry], [%i.next, %found]
  %first = phi i64 [0, %entry], [%v, %found]
  %tag.at = getelementptr i64, ptr %tags, i64 %i
  %tag = load i64, ptr %tag.at
  %high = lshr i64 %tag, 32
  %low = and i64 %tag, 127
  %byte = or i64 %low, 128
  %wanted = mul i64 %byte, 72340172838076673
  br label %index

index:
  %asked = phi i64 [0, %block], [%asked.next, %index.next]
  %v = phi i64 [%first, %block], [%v.next, %index.next]
  %index.at = getelementptr [5 x i64], ptr %indexes, i64 %v
  %cells.at = getelementptr i64, ptr %index.at, i64 1
  %checks.at = getelementptr i64, ptr %index.at, i64 2
  %uses.at = getelementptr i64, ptr %index.at, i64 3
  %count.at = getelementptr i64, ptr %index.at, i64 4
  %fingerprints = load ptr, ptr %index.at
  %cells = load ptr, ptr %cells.at
  %checks = load ptr, ptr %checks.at
  %uses = load ptr, ptr %uses.at
  %count = load i64, ptr %count.at
  %scaled = mul i64 %high, %count
  %bucket = lshr i64 %scaled, 32
  %word.at = getelementptr i64, ptr %fingerprints, i64 %bucket
  %word = load atomic i64, ptr %word.at monotonic, align 8
  %difference = xor i64 %word, %wanted
  %borrowed = sub i64 %difference, 72340172838076673
  %same = xor i64 %difference, -1
  %zeros = and i64 %borrowed, %same
  %matches = and i64 %zeros, -9187201950435737472
  br label %match

match:
  %left = phi i64 [%matches, %index], [%left.next, %match.next]
  %no.match = icmp eq i64 %left, 0
  br i1 %no.match, label %index.next, label %candidate

candidate:
  %bit = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %place = lshr i64 %bit, 3
  %bucket.cells = shl i64 %bucket, 3
  %cell = add i64 %bucket.cells, %place
  %cell.at = getelementptr i32, ptr %cells, i64 %cell
  %narrow = load atomic i32, ptr %cell.at monotonic, align 4
  %slot = zext i32 %narrow to i64
  %exists = icmp ult i64 %slot, %count
  br i1 %exists, label %entry.of.slot, label %match.next

entry.of.slot:
  %use.at = getelementptr i64, ptr %uses, i64 %slot
  %generation = load atomic i64, ptr %use.at monotonic, align 8
  %check.at = getelementptr i64, ptr %checks, i64 %slot
  %check = load atomic i64, ptr %check.at monotonic, align 8
  %mixed = mul i64 %generation, -7046029254386353131
  %right.check = xor i64 %mixed, %tag
  %is.right = icmp eq i64 %right.check, %check
  %is.valid = icmp sge i64 %generation, 0
  %is.found = and i1 %is.right, %is.valid
  br i1 %is.found, label %found, label %match.next

match.next:
  %less = sub i64 %left, 1
  %left.next = and i64 %left, %less
  br label %match

index.next:
  %asked.next = add i64 %asked, 1
  %after = add i64 %v, 1
  %wraps = icmp eq i64 %after, %num_indexes
  %v.next = select i1 %wraps, i64 0, i64 %after
  %all.asked = icmp eq i64 %asked.next, %num_indexes
  br i1 %all.asked, label %end, label %index

found:
  %owner.at = getelementptr i64, ptr %owners, i64 %i
  store i64 %v, ptr %owner.at
  %slot.at = getelementptr i64, ptr %slots, i64 %i
  store i64 %slot, ptr %slot.at
  %generation.at = getelementptr i64, ptr %generations, i64 %i
  store i64 %generation, ptr %generation.at
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %num_tags
  br i1 %done, label %all, label %block

all:
  ret i64 %num_tags

end:
  ret i64 %i
}
"""

NativeProbe = Callable[[bytes, int, NDArray[np.uint64], NDArray[np.int64]], int]
"""Given indexes (the five words of each), their number, tags (blocks,) and an array (3, blocks), it
returns how many leading blocks they have, and writes for each its index, slot and generation. The
caller answers for the memory until the call has ended."""


@functools.cache
def native_probe() -> NativeProbe | None:
    """The loop, compiled at the first call; None where it cannot be had."""
    try:
        if sys.byteorder != "little":
            raise OSError("the lowest byte of a word is not its first")
        engine = compiled(_CODE)
    except CodeDeniedError:  # which `compiled` has said
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, numpy does the work
        logger.warning("blocks are looked up by numpy: there is no native look-up (%s)", error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    run = ctypes.PYFUNCTYPE(
        number, ctypes.c_char_p, number, pointer, number, pointer, pointer, pointer
    )(engine.get_function_address("probe"))

    def probe(
        indexes: bytes, count: int, tags: NDArray[np.uint64], places: NDArray[np.int64]
    ) -> int:
        if places.shape != (3, len(tags)) or not places.flags.c_contiguous:
            raise ValueError(f"places {places.shape} for {len(tags)} tags")
        tags = np.ascontiguousarray(tags, np.uint64)
        start, step = places.ctypes.data, places.strides[0]
        return int(
            run(indexes, count, tags.ctypes.data, len(tags), start, start + step, start + 2 * step)
        )

    probe.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return probe
