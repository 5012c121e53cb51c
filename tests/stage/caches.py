# SPDX-License-Identifier: Apache-2.0
"""Paged caches in every layout, filled from known keys and values."""

from dataclasses import dataclass

import torch

from omni_connector.stage.extract import KVLayout


@dataclass(frozen=True)
class Sequence:
    """The keys and values of a request, (tokens, heads, dim), and the blocks they are put in."""

    key: torch.Tensor
    value: torch.Tensor
    block_ids: list[int]
    block_size: int
    num_blocks: int

    @property
    def tokens(self) -> int:
        return self.key.shape[0]


def sequence(
    tokens: int = 10,
    heads: int = 2,
    dim: int = 4,
    *,
    block_size: int = 4,
    num_blocks: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Sequence:
    """A request in blocks drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(tokens, heads, dim, generator=generator).to(dtype) for _ in range(2))
    needed = -(-tokens // block_size)
    blocks = torch.randperm(num_blocks, generator=generator)[:needed].tolist()
    return Sequence(key, value, blocks, block_size, num_blocks)


def paged(part: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """Tokens in blocks (num_blocks, block_size, heads, dim), noise where there are none."""
    pages = torch.randn(seq.num_blocks, seq.block_size, *part.shape[1:]).to(part.dtype)
    for i, block in enumerate(seq.block_ids):
        piece = part[i * seq.block_size : (i + 1) * seq.block_size]
        pages[block, : piece.shape[0]] = piece
    return pages


def cache_of(
    seq: Sequence, layout: KVLayout | str
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The layer's cache in a layout, or as a "pair"; of LATENT, the keys' alone."""
    key, value = paged(seq.key, seq), paged(seq.value, seq)
    if layout == "pair":
        return key, value
    if layout == KVLayout.KV_FIRST:
        return torch.stack((key, value))
    if layout == KVLayout.BLOCKS_FIRST:
        return torch.stack((key, value), dim=1)
    if layout == KVLayout.PACKED:
        return torch.cat((key, value), dim=-1).transpose(1, 2).contiguous()
    if layout == KVLayout.LATENT:
        return key.flatten(2)
    raise ValueError(layout)
