# SPDX-License-Identifier: Apache-2.0
"""Copies and checksums of many slots in one call, without the GIL, past the processor's caches.

numpy copies one row in a call. Between two calls it takes the GIL, for which it waits while a model
runner computes in Python, and spins. A row of less than about 100 MiB it copies through the caches,
so that the processor reads each line of the target before it overwrites it: half as many bytes a
second. So this module makes a loop of its own, with stores that bypass the caches. It hashes each
chunk of a row right after it was copied, while the source's bytes are still in the caches.

llvmlite, which vLLM needs for numba, compiles the loop in a few ms. The checksum is that of the
library in which the package xxhash is written. Where one of them is missing, or the result is not
that of numpy and xxhash, `native_copy` is None, and who copies takes numpy.
"""

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

logger = logging.getLogger("vllm.omni_connector.native")

ALIGNMENT: Final = 64
"""Addresses of targets are multiples of this."""

_CHUNK: Final = 4096
"""Bytes copied before they are hashed: few enough to be still in the core's first cache."""

# copy(targets, sources, lengths, slots, rows, state, sums, reset, update, digest): row j of slot i
# goes from sources[i * rows + j] to targets[i * rows + j], and has lengths[j] bytes. Without a
# `state` nothing is hashed. Wide stores take 128 bytes a turn; memcpy copies what is left of a row.
_CODE: Final = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @copy(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows,
                  ptr %state, ptr %sums, ptr %reset, ptr %update, ptr %digest) {
entry:
  %hashes = icmp ne ptr %state, null
  %any = mul i64 %slots, %rows
  %nothing = icmp eq i64 %any, 0
  br i1 %nothing, label %end, label %slot

slot:
  %i = phi i64 [0, %entry], [%i.next, %slot.next]
  %first = mul i64 %i, %rows
  br i1 %hashes, label %slot.reset, label %row

slot.reset:
  %ignored = call i32 %reset(ptr %state)
  br label %row

row:
  %j = phi i64 [0, %slot], [0, %slot.reset], [%j.next, %row.next]
  %at = add i64 %first, %j
  %target.at = getelementptr i64, ptr %targets, i64 %at
  %source.at = getelementptr i64, ptr %sources, i64 %at
  %length.at = getelementptr i64, ptr %lengths, i64 %j
  %target = load ptr, ptr %target.at
  %source = load ptr, ptr %source.at
  %length = load i64, ptr %length.at
  br label %chunk

chunk:
  %from = phi i64 [0, %row], [%to, %chunk.next]
  %left = sub i64 %length, %from
  %last = icmp ule i64 %left, CHUNK
  %size = select i1 %last, i64 %left, i64 CHUNK
  %to = add i64 %from, %size
  %even = and i64 %size, -128
  %wide.end = add i64 %from, %even
  %no.wide = icmp eq i64 %even, 0
  br i1 %no.wide, label %rest, label %wide

wide:
  %c = phi i64 [%from, %chunk], [%c.next, %wide]
  %s0 = getelementptr i8, ptr %source, i64 %c
  %t0 = getelementptr i8, ptr %target, i64 %c
  %s1 = getelementptr i8, ptr %s0, i64 64
  %t1 = getelementptr i8, ptr %t0, i64 64
  %v0 = load <64 x i8>, ptr %s0, align 1
  %v1 = load <64 x i8>, ptr %s1, align 1
  store <64 x i8> %v0, ptr %t0, align 64, !nontemporal !0
  store <64 x i8> %v1, ptr %t1, align 64, !nontemporal !0
  %c.next = add i64 %c, 128
  %wide.done = icmp uge i64 %c.next, %wide.end
  br i1 %wide.done, label %rest, label %wide

rest:
  %rest.size = sub i64 %size, %even
  %rest.source = getelementptr i8, ptr %source, i64 %wide.end
  %rest.target = getelementptr i8, ptr %target, i64 %wide.end
  call void @llvm.memcpy.p0.p0.i64(ptr %rest.target, ptr %rest.source, i64 %rest.size, i1 false)
  br i1 %hashes, label %hash, label %chunk.next

hash:
  %chunk.source = getelementptr i8, ptr %source, i64 %from
  %ignored.2 = call i32 %update(ptr %state, ptr %chunk.source, i64 %size)
  br label %chunk.next

chunk.next:
  %chunk.done = icmp uge i64 %to, %length
  br i1 %chunk.done, label %row.next, label %chunk

row.next:
  %j.next = add i64 %j, 1
  %row.done = icmp eq i64 %j.next, %rows
  br i1 %row.done, label %slot.end, label %row

slot.end:
  br i1 %hashes, label %slot.sum, label %slot.next

slot.sum:
  %sum = call i64 %digest(ptr %state)
  %sum.at = getelementptr i64, ptr %sums, i64 %i
  store i64 %sum, ptr %sum.at
  br label %slot.next

slot.next:
  %i.next = add i64 %i, 1
  %slot.done = icmp eq i64 %i.next, %slots
  br i1 %slot.done, label %end, label %slot

end:
  fence seq_cst
  ret void
}

!0 = !{i32 1}
""".replace("CHUNK", str(_CHUNK))

NativeCopy = Callable[
    [NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], bool], NDArray[np.uint64]
]
"""Copies rows between addresses: targets and sources `(slots, rows)`, lengths in bytes `(rows,)`.
Given true, it returns the xxh3-64 of each slot's rows, else zeros. Targets are multiples of
`ALIGNMENT`. The caller answers for the addresses, and for the memory until the call has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a block's content as addresses, in the order in which a slot packs them.

    Attributes:
        starts, strides: address of each in block 0, and bytes from one block to the next `(rows,)`.
        offsets, lengths: its first byte in a slot, and its bytes `(rows,)`.
        num_blocks: how many blocks there are.
    """

    starts: NDArray[np.int64]
    strides: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_blocks: int

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], num_blocks: int) -> "Rows":
        """Rows of (start, stride, length), in slot order, whose memory the caller keeps."""
        starts, strides, lengths = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        return cls(starts, strides, np.cumsum(lengths) - lengths, lengths, num_blocks)

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
        return self.offsets + (slots.ctypes.data + slot_ids[:, None] * slots.strides[0])


def _require(ids: NDArray[np.int64], limit: int) -> None:
    # Outside of numpy, an id that does not exist is another's memory.
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise IndexError(f"ids from {ids.min()} to {ids.max()}, of {limit}")


@functools.cache
def native_copy() -> NativeCopy | None:
    """The copy, compiled at the first call; None where it cannot be had."""
    try:
        copy = _compiled()
        _check(copy)
    except Exception as error:  # noqa: BLE001 - whatever it is, numpy does the work
        logger.warning("KV blocks are copied by numpy: there is no native copy (%s)", error)
        return None
    return copy


def compiled(code: str) -> Any:
    """Machine code of LLVM's, which is there as long as what this returns.

    Raises:
        Exception: whatever keeps llvmlite from compiling it; or there is none.
    """
    llvm: Any = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    module = llvm.parse_assembly(code)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _compiled() -> NativeCopy:
    extension = importlib.import_module("xxhash._xxhash").__file__
    engine = compiled(_CODE)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    run = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, number, number, *[pointer] * 5)(
        engine.get_function_address("copy")
    )
    library = ctypes.CDLL(extension)
    create, free = library.XXH3_createState, library.XXH3_freeState
    create.restype, create.argtypes = pointer, []
    free.restype, free.argtypes = ctypes.c_int, [pointer]
    # Where it is there, this one takes the widest instructions that the processor has.
    update = getattr(library, "XXH3_64bits_update_dispatch", None) or library.XXH3_64bits_update
    calls = [
        ctypes.cast(function, pointer)
        for function in (library.XXH3_64bits_reset, update, library.XXH3_64bits_digest)
    ]

    def copy(
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        checksum: bool,
    ) -> NDArray[np.uint64]:
        slots, rows = targets.shape
        if sources.shape != targets.shape or lengths.shape != (rows,):
            raise ValueError(f"rows {targets.shape} from {sources.shape}, lengths {lengths.shape}")
        targets, sources, lengths = map(np.ascontiguousarray, (targets, sources, lengths))
        sums = np.zeros(slots, np.uint64)
        state = create() if checksum and rows else None
        if checksum and rows and not state:
            raise MemoryError("no memory for the state of a checksum")
        try:
            places = (array.ctypes.data for array in (targets, sources, lengths))
            run(*places, slots, rows, state, sums.ctypes.data, *calls)
        finally:
            if state:
                free(state)
        return sums

    copy.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return copy


def _check(copy: NativeCopy) -> None:
    """Raise RuntimeError unless it copies and hashes like numpy and xxhash."""
    size = 3 * _CHUNK
    room: Any = np.zeros(2 * size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    target = room[start : start + size]
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    lengths = np.array([_CHUNK + 1, 64, 200, 0], np.int64)
    offsets = np.array([0, _CHUNK + 64, _CHUNK + 128, 2 * _CHUNK], np.int64)
    sums = copy(
        (target.ctypes.data + offsets)[None], (source.ctypes.data + offsets)[None], lengths, True
    )
    expected, hashed = np.zeros(size, np.uint8), xxhash.xxh3_64()
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        row = source[offset : offset + length]
        expected[offset : offset + length] = row
        hashed.update(row.data)
    if not np.array_equal(target, expected) or sums.tolist() != [hashed.intdigest()]:
        raise RuntimeError("its results are not those of numpy and xxhash")
