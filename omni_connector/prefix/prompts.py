# SPDX-License-Identifier: Apache-2.0
"""What the shared prefix cache knows of one prompt: what is held of it, and where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest

from omni_connector.copy.ledger import EngineRequest
from omni_connector.kv.shapes import GroupShape
from omni_connector.prefix.hints import Hints
from omni_connector.prefix.host_blocks import Found
from omni_connector.prefix.lookups import Held, Lookup


@dataclass(frozen=True)
class SharedGroups:
    """The cache groups whose blocks an engine keeps and finds.

    Attributes:
        shapes: of each.
        ids: index of each among vLLM's groups.
        hash_block_size: tokens of one of a request's hashes; divides every group's block size.
    """

    shapes: tuple[GroupShape, ...]
    ids: tuple[int, ...]
    hash_block_size: int

    @property
    def block_sizes(self) -> list[tuple[int, int]]:
        """Tokens, and hashes, of a block of each."""
        sizes = [shape.block_size for shape in self.shapes]
        return [(size, size // self.hash_block_size) for size in sizes]

    @property
    def unit(self) -> int:
        """Prefixes end at multiples of so many tokens."""
        return math.lcm(*(shape.block_size for shape in self.shapes))


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt of a request that shares its prefix."""

    request: EngineRequest
    loads: bool
    hashed_tokens: int | None  # where its hashes end to be those of its tokens; None: nowhere
    adapter: str  # digest of the LoRA adapter's content; "" without one
    block_sizes: list[tuple[int, int]]  # of each group: tokens, and hashes, of a block
    sent: list[int]  # for each group, the blocks already considered for arena and store
    tenant: int
    hints: Hints
    fills_at: int = 0  # no block fills before so many tokens are computed
    keeps: int = 0  # jobs that keep its blocks in the arena, as far as is known
    due: int = 0  # the step in which `PrefixSaves` looks whether one has filled
    hashes: list[list[bytes]] = field(default_factory=list)
    found: Found | None = None
    lookup: Lookup | None = None
    waits: bool = False  # for the store's answer, as the arenas have not all of it
    looked_at: float = 0.0  # when `found` was looked for
    local: int | None = None  # tokens that vLLM has itself; None until it asks
    had: int | None = None  # with those that we load for it; None once it was scheduled
    offered: int = 0  # tokens beyond them that can be loaded
    missed: bool = False
    late: bool = False  # the store has not answered in time
    reached: int | None = None  # tokens that vLLM or a load had when it was admitted first
    sources: dict[str, int] = field(default_factory=dict)  # tokens that are loaded, by counter
    admitted: bool = False  # vLLM has scheduled it since the lookup
    jobs: set[int] = field(default_factory=set)
    failure: str | None = None  # the first of its jobs'
    void: bool = False  # what is being loaded for it belongs to other weights

    def full_hashes(self, group: int, first: int, end: int | None) -> list[bytes]:
        """Hashes of these full blocks of a group, as far as they are known."""
        block_size, step = self.block_sizes[group]
        if self.hashed_tokens is not None:
            known = self.hashed_tokens // block_size
            end = known if end is None else min(end, known)
        stop = None if end is None else end * step
        return [
            bytes(each) for each in self.request.block_hashes[first * step + step - 1 : stop : step]
        ]

    def keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """What names these blocks in arenas: vLLM's hashes name an adapter, not its content."""
        if not self.adapter:
            return list(hashes)
        whose = self.adapter.encode()[: blake2b.MAX_KEY_SIZE]
        return [blake2b(each, digest_size=len(each), key=whose).digest() for each in hashes]

    def held(self) -> list[Held]:
        """What is held of it, in arenas of this host or in the store, one entry a group."""
        stored = self.lookup.held if self.lookup is not None else None
        if self.found is None:
            return stored or [Held.of([]) for _ in self.hashes]
        kept = [of.there for of in self.found.groups]
        if stored is None:
            return [Held.of(blocks) for blocks in kept]
        return [
            Held.of([any(pair) for pair in zip_longest(here, there.blocks, fillvalue=False)])
            for here, there in zip(kept, stored, strict=True)
        ]

    def key_prefix(self, engines: str) -> str:
        """What its blocks' keys in a store begin with, where those of the engine begin so."""
        return f"{engines}/{self.adapter}" if self.adapter else engines

    def reach(self, groups: Sequence[GroupShape], unit: int, start: int, end: int) -> int:
        """See `reach`."""
        return reach(list(zip(groups, self.held(), strict=True)), unit, start, end)


def reach(groups: Sequence[tuple[GroupShape, Held]], unit: int, start: int, end: int) -> int:
    """The token at which the longest prefix ends that can be completed from `start` on.

    Args:
        groups: each with what is held of it.
        unit: prefixes end at multiples of so many tokens.
        end: the token that it ends at or before.
    """
    for shape, held in groups:
        if shape.attention_type == "all":
            end = min(end, held.reach(start // shape.block_size) * shape.block_size)
    for tokens in range(end // unit * unit, start, -unit):
        if all(held.has(shape.needed(tokens, start)) for shape, held in groups):
            return tokens
    return start
