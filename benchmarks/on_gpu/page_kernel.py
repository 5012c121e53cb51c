# SPDX-License-Identifier: Apache-2.0
"""One kernel that copies scattered pages between tables of addresses, on either side of the bus."""

from typing import Final

import torch
import triton
import triton.language as tl

_WORDS: Final = 1024
"""Words of 8 bytes that a program copies at once."""


@triton.jit  # type: ignore[untyped-decorator]
def copy_pages_kernel(targets, sources, pages, words, at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program copies every so many-th page, `at_once` words at a time."""
    for page in range(tl.program_id(0), pages, tl.num_programs(0)):
        source = tl.load(sources + page).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + page).to(tl.pointer_type(tl.int64))
        for first in range(0, words, at_once):
            places = first + tl.arange(0, at_once)
            inside = places < words
            tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


def copy_pages(targets: torch.Tensor, sources: torch.Tensor, nbytes: int, programs: int) -> None:
    """Copy pages of so many bytes, a multiple of 8, by address; see `Accelerator.copy_pages`."""
    grid = (min(programs, len(targets)),)
    copy_pages_kernel[grid](
        targets, sources, len(targets), nbytes // 8, at_once=_WORDS, num_warps=8
    )
