# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's attention kernels put the bytes of a token in a page.

Most keep what the view of a page says: for each head one token after the other, keys and values of
a token together. Those on CPUs keep all keys of a head, transposed or in tiles, and then all its
values. Others gather the scales of a page behind its tokens, or shuffle tokens. Their blocks can be
copied whole, but nobody else can tell a token or a head from the next there.
"""

import re
from typing import Final

UNKNOWN: Final = "?"
"""Ends the name of a byte order that is not known: such pages are copied whole or not at all."""

CPU: Final = "CPU_ATTN"

# By vLLM's sources, the kernels that keep rows, by what they keep of a token: keys and values of
# each head, of one size or of two, or the latent of MLA. Not among them: sparse MLA and its
# indexers, whose scales may lie behind all tokens; TurboQuant with FlyDSL (`TURBOQUANT.soa`), whose
# scales do; ROCM_ATTN, which keeps pieces of 16 bytes of all tokens together.
_KEPT: Final = {
    "keys and values": (
        "FLASHINFER",
        "FLASH_ATTN",
        "FLEX_ATTENTION",
        "HPC_ATTN",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_ATTN",
        "TRITON_FLASHINFER",
        "TRITON_FLASH_ATTN",
    ),
    "keys and shorter values": ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"),
    "latent": (
        "AITER_TRITON_MLA",
        "AMX_MLA",
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "ROCM_AITER_MLA",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
    ),
    "TurboQuant": ("TURBOQUANT",),
}
_ROWS: Final = {kernel: kept for kept, kernels in _KEPT.items() for kernel in kernels}

# By vLLM's sources, too, the kinds of quantized KV that these kernels keep as rows. Scales of each
# token and head lie in its row. Not among them: NVFP4, whose scales lie behind all tokens.
_FP8: Final = frozenset({"fp8_e4m3", "fp8_e5m2"})
_SCALED: Final = frozenset({"fp8_per_token_head", "int4_per_token_head", "int8_per_token_head"})
_TURBOQUANT: Final = frozenset(
    {"turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4"}
)
_PAGE: Final = re.compile(r"(?:H(?P<heads>\d+)\.)?N(?P<tokens>\d+)\.C(?P<content>\d+)")


def kernel_order(view: str, kernel: str, *, item: int, own_heads: bool, quantized: str = "") -> str:
    """The byte order of a page as a kernel fills it; see `SlotConverter`.

    Args:
        view: what the view of the page says.
        kernel: the kernel's name; on CPUs with the instruction set, as in `CPU_ATTN.amx`.
        item: bytes of a number.
        own_heads: whether the heads of the view are KV heads; some kernels have others there, such
            as one for all keys and one for all values.
        quantized: the kind of quantized KV, as vLLM names it; "" for numbers as they are.
    """
    family, _, isa = kernel.partition(".")
    if family == CPU:
        known = not quantized or quantized in _FP8
        return _cpu_order(view, isa, item) if known else view + UNKNOWN
    return view if own_heads and quantized in _kinds_in_rows(kernel) else view + UNKNOWN


def _kinds_in_rows(kernel: str) -> frozenset[str]:
    """The kinds of KV that a kernel keeps as rows; "" for numbers as they are."""
    kept = _ROWS.get(kernel)
    if kept is None:
        return frozenset()
    if kept == "TurboQuant":
        return _TURBOQUANT
    return _FP8 | {""} | (_SCALED if kernel == "TRITON_ATTN" else frozenset())


def kept_by(kernel: str) -> str | None:
    """What a kernel keeps of a token, in whatever order; None where that is not known.

    Kernels that keep the same read each other's pages, if the orders of these are known, and the
    numbers are of the same type.

    Args:
        kernel: as for `kernel_order`.
    """
    family = kernel.partition(".")[0]
    return "keys and values" if family == CPU else _ROWS.get(kernel)


def _cpu_order(view: str, isa: str, item: int) -> str:
    """How vLLM's `cpu_attn_reshape_and_cache` fills a page, found out by writing with it."""
    page = _PAGE.fullmatch(view)
    if page is None or isa not in ("vec", "vec16", "amx"):
        return view + UNKNOWN
    heads, tokens, content = int(page["heads"] or 1), int(page["tokens"]), int(page["content"])
    dim = content // (2 * item)
    if isa != "amx":
        return f"H{heads}.(C{dim}.N{tokens}.C{item}|N{tokens}.C{dim * item})"
    if item > 2 or tokens % 16 or dim % 16:  # tiles have rows of 16 pairs
        return view + UNKNOWN
    return (
        f"H{heads}.(N{tokens // 16}.C{dim // 2}.N16.C{2 * item}"
        f"|C{dim // 16}.N{tokens // 2}.C16.N2.C{item})"
    )
