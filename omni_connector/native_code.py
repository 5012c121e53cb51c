# SPDX-License-Identifier: Apache-2.0
"""The machine code of `native_copy`, as LLVM reads it.

`copy` and `copy_hashed` take (targets, sources, lengths, slots, rows, states). Row j of slot i goes
from sources[i * rows + j] to targets[i * rows + j], and has lengths[j] bytes, a multiple of 64. A
state is ten words for a slot, of which `copy` leaves the first eight alone: the eight sums of
xxh3-64, how many stripes of 64 bytes are still to come, and how many they are in all; when none is
left, instead of these the checksum.

xxh3-64 of more than 240 bytes is, by its specification
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): eight sums of 64 bits take a
stripe at once, with a part of the secret that begins 8 bytes later for each. After 16 stripes (a
block) the sums are scrambled, and the secret begins anew. The last stripe has a part of its own.
"""

import ctypes
import errno
import functools
import logging
import mmap
import os
from collections.abc import Iterable
from typing import Final

import numpy as np

logger = logging.getLogger("vllm.omni_connector.native")

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIMES_32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
FIRST_SUMS: Final = (
    _PRIMES_32[2],
    _PRIMES_64[0],
    _PRIMES_64[1],
    _PRIMES_64[2],
    _PRIMES_64[3],
    _PRIMES_32[1],
    _PRIMES_64[4],
    _PRIMES_32[0],
)
_AVALANCHE: Final = 0x165667919E3779F9
_SCRAMBLING, _MERGING, _LAST_STRIPE = 128, 11, 121
"""Where their parts of the secret begin."""

STRIPE: Final = 64
"""Bytes."""

_STRIPES: Final = 16

_AHEAD: Final = 8192
"""Bytes that are asked for before they are needed."""

_SUMS: Final = "<8 x i64>"


def _sums(values: Iterable[int]) -> str:
    return f"<{', '.join(f'i64 {value}' for value in values)}>"


def _secret(start: int) -> str:
    return _sums(np.frombuffer(_SECRET, "<u8", 8, start).tolist())


def _add(name: str, sums: str, stripe: str, secret: str) -> str:
    """Code for the sums `%name` of `sums` and a stripe."""
    return f"""
  %{name}.keyed = xor {_SUMS} {stripe}, {secret}
  %{name}.high = lshr {_SUMS} %{name}.keyed, {_sums([32] * 8)}
  %{name}.low = and {_SUMS} %{name}.keyed, {_sums([0xFFFFFFFF] * 8)}
  %{name}.product = mul {_SUMS} %{name}.high, %{name}.low
  %{name}.swapped = shufflevector {_SUMS} {stripe}, {_SUMS} poison,
    <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %{name}.sum = add {_SUMS} {sums}, %{name}.swapped
  %{name} = add {_SUMS} %{name}.sum, %{name}.product
"""


def _scramble(name: str, sums: str) -> str:
    """Code for `%name`: `sums` after a block. Factors of 32 bits, which processors have."""
    prime = _sums([_PRIMES_32[0]] * 8)
    return f"""
  %{name}.shifted = lshr {_SUMS} {sums}, {_sums([47] * 8)}
  %{name}.mixed = xor {_SUMS} {sums}, %{name}.shifted
  %{name}.keyed = xor {_SUMS} %{name}.mixed, {_secret(_SCRAMBLING)}
  %{name}.low = and {_SUMS} %{name}.keyed, {_sums([0xFFFFFFFF] * 8)}
  %{name}.high = lshr {_SUMS} %{name}.keyed, {_sums([32] * 8)}
  %{name}.low.product = mul {_SUMS} %{name}.low, {prime}
  %{name}.high.product = mul {_SUMS} %{name}.high, {prime}
  %{name}.carried = shl {_SUMS} %{name}.high.product, {_sums([32] * 8)}
  %{name} = add {_SUMS} %{name}.low.product, %{name}.carried
"""


def _copy(name: str, source: str, target: str) -> str:
    """Code for `%name`: a stripe that is copied."""
    return f"""
  %{name} = load {_SUMS}, ptr {source}, align 1
  store {_SUMS} %{name}, ptr {target}, align {STRIPE}, !nontemporal !0
"""


def _block(hashed: bool) -> str:
    """Code for `%sums.block`: a block that is copied, and added to `%sums`."""
    lines, sums = [], "%sums"
    for i in range(_STRIPES):
        lines.append(f"""
  %source.{i} = getelementptr {_SUMS}, ptr %source.here, i64 {i}
  %target.{i} = getelementptr {_SUMS}, ptr %target.here, i64 {i}
  %ahead.{i} = getelementptr {_SUMS}, ptr %ahead, i64 {i}
  call void @llvm.prefetch.p0(ptr %ahead.{i}, i32 0, i32 2, i32 1)
""")
        lines.append(_copy(f"stripe.{i}", f"%source.{i}", f"%target.{i}"))
        if hashed:
            lines.append(_add(f"sums.{i}", sums, f"%stripe.{i}", _secret(8 * i)))
            sums = f"%sums.{i}"
    lines.append(_scramble("sums.block", sums) if hashed else _same("sums.block", sums))
    return "".join(lines)


def _same(name: str, value: str) -> str:
    return f"\n  %{name} = or {_SUMS} {value}, zeroinitializer\n"


def _checksum() -> str:
    """Code for `%checksum` of `%sums` and `%bytes`."""
    lines = [
        f"""
  %merged = xor {_SUMS} %sums, {_secret(_MERGING)}
  %folded.0 = mul i64 %bytes, {_PRIMES_64[0]}
"""
    ]
    lines += [
        f"""
  %even.{i} = extractelement {_SUMS} %merged, i32 {2 * i}
  %odd.{i} = extractelement {_SUMS} %merged, i32 {2 * i + 1}
  %even.{i}.wide = zext i64 %even.{i} to i128
  %odd.{i}.wide = zext i64 %odd.{i} to i128
  %product.{i} = mul i128 %even.{i}.wide, %odd.{i}.wide
  %product.{i}.shifted = lshr i128 %product.{i}, 64
  %product.{i}.high = trunc i128 %product.{i}.shifted to i64
  %product.{i}.low = trunc i128 %product.{i} to i64
  %fold.{i} = xor i64 %product.{i}.low, %product.{i}.high
  %folded.{i + 1} = add i64 %folded.{i}, %fold.{i}
"""
        for i in range(4)
    ]
    lines.append(f"""
  %tumbled.shifted = lshr i64 %folded.4, 37
  %tumbled = xor i64 %folded.4, %tumbled.shifted
  %spread = mul i64 %tumbled, {_AVALANCHE}
  %spread.shifted = lshr i64 %spread, 32
  %checksum = xor i64 %spread, %spread.shifted
""")
    return "".join(lines)


def _function(name: str, *, hashed: bool) -> str:
    if hashed:
        one, scrambled = _add("one", "%sums", "%stripe", "%secret"), _scramble("scrambled", "%one")
    else:
        one, scrambled = _same("one", "%sums"), _same("scrambled", "%one")
    return f"""
define void @{name}(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows,
                    ptr %states) {{
entry:
  %num.rows = mul i64 %slots, %rows
  %nothing = icmp eq i64 %num.rows, 0
  br i1 %nothing, label %end, label %slot

slot:
  %i = phi i64 [0, %entry], [%i.next, %slot.next]
  %first = mul i64 %i, %rows
  %state = getelementptr [10 x i64], ptr %states, i64 %i
  %left.at = getelementptr i64, ptr %state, i64 8
  %total.at = getelementptr i64, ptr %state, i64 9
  %sums.slot = load {_SUMS}, ptr %state, align 8
  %left.slot = load i64, ptr %left.at
  %total = load i64, ptr %total.at
  br label %row

row:
  %j = phi i64 [0, %slot], [%j.next, %row.next]
  %sums.row = phi {_SUMS} [%sums.slot, %slot], [%sums, %row.next]
  %left.row = phi i64 [%left.slot, %slot], [%left, %row.next]
  %at = add i64 %first, %j
  %after = add i64 %at, 1
  %is.last = icmp eq i64 %after, %num.rows
  %at.next = select i1 %is.last, i64 %at, i64 %after
  %target.at = getelementptr i64, ptr %targets, i64 %at
  %source.at = getelementptr i64, ptr %sources, i64 %at
  %source.next.at = getelementptr i64, ptr %sources, i64 %at.next
  %length.at = getelementptr i64, ptr %lengths, i64 %j
  %target = load ptr, ptr %target.at
  %source = load ptr, ptr %source.at
  %source.next = load ptr, ptr %source.next.at
  %length = load i64, ptr %length.at
  %stripes = lshr i64 %length, 6
  %is.short = icmp ult i64 %stripes, {_AHEAD // STRIPE}
  %distance = select i1 %is.short, i64 %stripes, i64 {_AHEAD // STRIPE}
  br label %more

more:
  %c = phi i64 [0, %row], [%c.block, %block], [%c.one, %single.next]
  %sums = phi {_SUMS} [%sums.row, %row], [%sums.block, %block], [%sums.one, %single.next]
  %left = phi i64 [%left.row, %row], [%left.block, %block], [%left.one, %single.next]
  %here = sub i64 %stripes, %c
  %row.ends = icmp eq i64 %here, 0
  br i1 %row.ends, label %row.next, label %next

next:
  %source.here = getelementptr {_SUMS}, ptr %source, i64 %c
  %target.here = getelementptr {_SUMS}, ptr %target, i64 %c
  %done = sub i64 %total, %left
  %phase = and i64 %done, {_STRIPES - 1}
  %block.starts = icmp eq i64 %phase, 0
  %others.follow = icmp ugt i64 %left, {_STRIPES}
  %block.is.here = icmp uge i64 %here, {_STRIPES}
  %scrambles = and i1 %block.starts, %others.follow
  %is.block = and i1 %scrambles, %block.is.here
  br i1 %is.block, label %block, label %single

block:
  %c.ahead = add i64 %c, %distance
  %c.beyond = sub i64 %c.ahead, %stripes
  %is.beyond = icmp uge i64 %c.ahead, %stripes
  %source.ahead = select i1 %is.beyond, ptr %source.next, ptr %source
  %stripe.ahead = select i1 %is.beyond, i64 %c.beyond, i64 %c.ahead
  %ahead = getelementptr {_SUMS}, ptr %source.ahead, i64 %stripe.ahead
  {_block(hashed)}
  %c.block = add i64 %c, {_STRIPES}
  %left.block = sub i64 %left, {_STRIPES}
  br label %more

single:
  {_copy("stripe", "%source.here", "%target.here")}
  %is.end = icmp eq i64 %left, 1
  %usual = shl i64 %phase, 3
  %secret.from = select i1 %is.end, i64 {_LAST_STRIPE}, i64 %usual
  %secret.at = getelementptr i8, ptr @secret, i64 %secret.from
  %secret = load {_SUMS}, ptr %secret.at, align 1
  {one}
  %c.one = add i64 %c, 1
  %left.one = sub i64 %left, 1
  %block.ends = icmp eq i64 %phase, {_STRIPES - 1}
  %is.not.end = xor i1 %is.end, true
  %is.scrambled = and i1 %block.ends, %is.not.end
  br i1 %is.scrambled, label %scramble, label %single.next

scramble:
  {scrambled}
  br label %single.next

single.next:
  %sums.one = phi {_SUMS} [%one, %single], [%scrambled, %scramble]
  br label %more

row.next:
  %j.next = add i64 %j, 1
  %slot.ends = icmp eq i64 %j.next, %rows
  br i1 %slot.ends, label %slot.end, label %row

slot.end:
  store {_SUMS} %sums, ptr %state, align 8
  store i64 %left, ptr %left.at
  %is.whole = icmp eq i64 %left, 0
  %had.left = icmp ne i64 %left.slot, 0
  %is.new = and i1 %is.whole, %had.left
  br i1 %is.new, label %finish, label %slot.next

finish:
  %bytes = shl i64 %total, 6
  {_checksum()}
  store i64 %checksum, ptr %total.at
  br label %slot.next

slot.next:
  %i.next = add i64 %i, 1
  %all.done = icmp eq i64 %i.next, %slots
  br i1 %all.done, label %end, label %slot

end:
  fence seq_cst
  ret void
}}
"""


def code() -> str:
    """The module: `copy`, and `copy_hashed`, which makes checksums."""
    return f"""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

@secret = internal constant [{len(_SECRET)} x i8] [{", ".join(f"i8 {each}" for each in _SECRET)}]

{_function("copy", hashed=False)}
{_function("copy_hashed", hashed=True)}

!0 = !{{i32 1}}
"""


class CodeDeniedError(OSError):
    """The kernel does not let this process run code that it has written."""


@functools.cache
def code_is_denied() -> bool:
    """Whether the kernel does not let this process run code that it has written; says so once.

    Hardened kernels, SELinux and seccomp filters deny it. LLVM does not look at the answer, and the
    process would end with SIGSEGV at the first call. So this asks as LLVM does: for memory that was
    written to become executable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page[0] = 1
        # The address is that of a buffer, which must be gone before the page can be unmapped.
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        wanted = mmap.PROT_READ | mmap.PROT_EXEC
        denied = bool(libc.mprotect(address, mmap.PAGESIZE, wanted))
        code = ctypes.get_errno() or errno.EACCES
    if denied:
        logger.warning(
            "This process may not run code that it compiles (mprotect: %s), so numpy and Python "
            "copy KV blocks and look them up, more slowly",
            os.strerror(code),
        )
    return denied
