# SPDX-License-Identifier: Apache-2.0
"""The state of one prompt in the shared prefix cache: its hashes, and the blocks found."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from omni_connector.copy.held_blocks import EngineRequest
from omni_connector.kv.block_names import block_names, names_with_adapter
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.tails import Tail
from omni_connector.prefix.hints import Hints
from omni_connector.prefix.host_blocks import Found
from omni_connector.prefix.lookups import Held, Lookup, reach
from omni_connector.prefix.thinking import Thoughts


@dataclass(frozen=True)
class SharedGroups:
    """The cache groups whose blocks an engine keeps and finds.

    Attributes:
        shapes: of each.
        ids: index of each among vLLM's groups.
        hash_block_size: tokens that one of vLLM's block hashes covers; divides every group's block
            size.
        tokens_ahead: tokens after a block that its KV depends on; see `block_names`.
    """

    shapes: tuple[GroupShape, ...]
    ids: tuple[int, ...]
    hash_block_size: int
    tokens_ahead: int = 0

    @property
    def block_sizes(self) -> tuple[tuple[int, int], ...]:
        """For each group the tokens and the hashes of a block; no hashes where no block of the
        group is ever found."""
        return tuple(
            (shape.block_size, shape.block_size // self.hash_block_size if shape.is_cached else 0)
            for shape in self.shapes
        )

    @property
    def unit(self) -> int:
        """Tokens; prefixes end at multiples of it, as a block ends there in every group."""
        return math.lcm(*(shape.block_size for shape in self.shapes))


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt of a request that shares its prefix."""

    request: EngineRequest
    loads: bool  # whether its blocks may be loaded; else vLLM computes all of it
    hashed_tokens: int | None  # tokens for which its hashes are right; None: all
    adapter: str  # digest of the LoRA adapter's content; "" without one
    block_sizes: tuple[tuple[int, int], ...]  # of each group: tokens, and hashes, of a block
    sent: list[int]  # for each group, the leading blocks already considered for arena and store
    hints: Hints
    tokens_ahead: int = 0  # tokens after a block that its KV depends on
    thoughts: Thoughts | None = None  # from which on its answer is not kept; None: keep all of it
    cut: bool = False  # its answer counts among those that are kept up to a thought only
    # Parts of it, each by its first token and end, that are no tokens: of images, or embeddings.
    opaque: tuple[tuple[int, int], ...] = ()
    tail: Tail | None = None  # with which the tokens end that are offered; None: with full blocks
    fills_at: int = 0  # number of computed tokens at which its next block fills
    # Blocks of states that vLLM may free before they are kept: by group and index, as of the last
    # step that may have filled them.
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    keeps: int = 0  # jobs that save its blocks to the arena; an estimate
    number: int = 0  # a small one, for `Candidate.prompt`
    scheduled: bool = False  # vLLM has computed tokens of it since it allocated blocks
    end_kept: bool = False  # a tail ends with it, or shortly before its end
    doubtful_until: int = 0  # the step from which on its blocks are kept; see `saves._LOADED`
    hashes: list[list[bytes]] = field(default_factory=list)  # vLLM's, of each group
    names: list[list[bytes]] = field(default_factory=list)  # of the same blocks; see `block_names`
    found: Found | None = None
    lookup: Lookup | None = None
    waits: bool = False  # for the store's answer, as the arenas lack some of it
    looked_at: float = 0.0  # when the arenas were searched; seconds of the clock
    local: int | None = None  # tokens in vLLM's own cache; None until vLLM asks
    had: int | None = None  # `local` and the tokens that we load; None once it was scheduled
    offered: int = 0  # tokens after `local` that can be loaded
    missed: bool = False  # the store was asked, and nothing can be loaded
    late: bool = False  # the store has not answered in time
    reached: int | None = None  # tokens cached or loaded when it was first admitted
    sources: dict[str, int] = field(default_factory=dict)  # tokens that are loaded, by counter
    admitted: bool = False  # vLLM has scheduled it since the look-up
    jobs: set[int] = field(default_factory=set)  # its loads under way
    from_tail: int = 0  # tokens of a tail among those that its loads bring
    failure: str | None = None  # of the first of its loads that failed
    void: bool = False  # its loads under way are of KV of other weights
    session_state: int | None = None  # its number, if it names a session; see `sessions`

    def full_hashes(self, group: int, first: int, end: int | None) -> list[bytes]:
        """Hashes of the full blocks of a group from `first` to `end`, or to the last known.

        A block of a group has several of vLLM's hashes if it is larger than the hashed block. The
        last one names it, as each hash includes those before. With 2 hashes a block:

            hashes   h0 h1 | h2 h3 | h4
            block      0   |   1   | not full
            result      h1 |    h3

        Blocks whose name is not known yet, for lack of the tokens after them, are left out.
        """
        block_size, step = self.block_sizes[group]
        if not step:
            return []
        if self.hashed_tokens is not None or self.tokens_ahead:
            known = self.request.num_tokens if self.hashed_tokens is None else self.hashed_tokens
            known = max(0, known - self.tokens_ahead) // block_size
            end = known if end is None else min(end, known)
        stop = None if end is None else end * step
        return list(self.request.block_hashes[first * step + step - 1 : stop : step])

    def names_of(self, group: int, first: int, hashes: list[bytes]) -> list[bytes]:
        """The names of blocks of a group, from the block `first` on, by their hashes."""
        if not self.tokens_ahead:
            return hashes
        return block_names(
            hashes,
            self.request.all_token_ids,
            first=first,
            block_size=self.block_sizes[group][0],
            tokens_ahead=self.tokens_ahead,
        )

    def keys(self, names: list[bytes]) -> list[bytes]:
        """The keys of blocks of these names in arenas."""
        return names_with_adapter(names, self.adapter)

    def kept_tokens(self, computed: int) -> int:
        """Tokens whose blocks are kept, of those that are computed: up to the first thought."""
        if self.thoughts is None:
            return computed
        request = self.request
        begin = self.thoughts.find(request.all_token_ids, request.num_prompt_tokens, computed)
        return computed if begin is None else min(begin, computed)

    def last_reachable(self, num_tokens: int, unit: int) -> int:
        """The end of the longest prefix of so many tokens that can be loaded: vLLM computes the
        last token in any case, for its logits, and a block needs the tokens after it for its name.
        """
        return max(0, num_tokens - max(1, self.tokens_ahead)) // unit * unit

    def held(self) -> list[Held]:
        """The blocks that an arena of this host or the store holds, one entry a group."""
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
        """The prefix of its blocks' keys in a store: the engine's, and the adapter's digest."""
        return f"{engines}/{self.adapter}" if self.adapter else engines

    def reach(self, groups: Sequence[GroupShape], unit: int, start: int, end: int) -> int:
        """See `reach`."""
        return reach(list(zip(groups, self.held(), strict=True)), unit, start, end)
