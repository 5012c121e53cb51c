# SPDX-License-Identifier: Apache-2.0
"""Which slots of a peer's ranks fill which of our blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.copy.jobs import LoadSpec
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.compatibility import CompatibilityKey, LayerPlaces
from omni_connector.kv.convert import PageRun, SlotConverter
from omni_connector.kv.heads import HeadSlice, head_sources
from omni_connector.kv.shapes import (
    GroupShape,
    converter,
    same_bytes,
    state_slices,
    total_heads,
)
from omni_connector.kv.spans import NULL_BLOCK_ID
from omni_connector.kv.states import StateSlices
from omni_connector.kv.stripes import by_stripe, is_divided, owning_arenas
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.transports.base import Endpoint

# Most plans that are remembered, each for a peer's layout and a rank. It bounds memory.
_MAX_PLANS: Final = 64

Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoadSource:
    """A rank of the peer whose bytes are read.

    Attributes:
        arenas: over which its slots are spread, as numbers of ranks, counted stage by stage; see
            `kv.stripes`. That of the rank itself where each rank has all slots.
        length: bytes of each of its slots.
        converter: makes our slots of its slots, or states of its states; None where they hold the
            bytes of our blocks.
        heads: those that are taken from it, for each layer that the converter copies.
        runs: where the pages lie that are taken from it, if they are whole; else none.
        shard: which shard of the peer's blocks it has, if they are divided; else 0.
    """

    arenas: tuple[int, ...]
    length: int
    converter: SlotConverter | StateSlices | None = None
    heads: tuple[HeadSlice, ...] = ()
    runs: tuple[PageRun, ...] = ()
    shard: int = 0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How the slots of one group of a peer become ours.

    Attributes:
        block_size: tokens of one of the peer's blocks; of states, of one of ours.
        sources: the ranks of the peer that are read. If one is not converted, it is the only one.
            None where the peer has no layer of the group: then it has no slots of it, either.
        divided: whether the peer's blocks are divided into shards.
    """

    block_size: int
    sources: tuple[LoadSource, ...]
    divided: bool = False

    @property
    def stripes(self) -> int:
        """Most arenas in which slots of a source lie."""
        if self.divided:
            return 1
        return max(len(source.arenas) for source in self.sources)

    @property
    def copies_pages(self) -> bool:
        """Whether each block is filled with whole pages, of one slot of each source."""
        return all(source.runs for source in self.sources)

    @property
    def page_bytes(self) -> int:
        """Bytes of these pages."""
        return sum(run.nbytes for source in self.sources for run in source.runs)


@dataclass(frozen=True, slots=True, eq=False)
class SlotPart:
    """The slots of a step that are read of one source and lie in one arena.

    Attributes:
        source: the source.
        arena: number of the rank that has the arena.
        at: positions of the slots among those of the step `(n,)`.
        rows: of the slots in the arena `(n,)`.
        slots, generations: of them `(n,)`.
        keys: as in `LoadSpec`, of them.
    """

    source: LoadSource
    arena: int
    at: Blocks
    rows: Blocks
    slots: Blocks
    generations: Blocks
    keys: NDArray[np.object_] | None


@dataclass(frozen=True, slots=True, eq=False)
class LoadStep:
    """Blocks of one group that are filled at once, and the slots that they are filled with.

    Attributes:
        group, plan: which group, and how its blocks are filled.
        block_size: tokens of one of our blocks.
        block_ids, indices: the blocks, and their logical indices `(n,)`.
        numbers: logical indices of the slots, in blocks of the peer `(m,)`.
        slots, generations: the peer's `(s, m)`, by shard.
        keys: as in `LoadSpec` `(s, m)`.
    """

    group: int
    plan: LoadPlan
    block_size: int
    block_ids: Blocks
    indices: Blocks
    numbers: Blocks
    slots: Blocks
    generations: Blocks
    keys: NDArray[np.object_] | None

    def by_arena(self) -> list[SlotPart]:
        """What is read of each source, arena by arena."""
        return [
            SlotPart(
                source,
                source.arenas[owner],
                at,
                rows,
                self.slots[source.shard, at],
                self.generations[source.shard, at],
                None if self.keys is None else self.keys[source.shard, at],
            )
            for source in self.plan.sources
            for owner, at, rows in by_stripe(self.slots[source.shard], len(source.arenas))
        ]

    def parts(self, sizes: Sequence[int]) -> Iterator["LoadStep"]:
        """The same load in steps of at most `sizes[group]` blocks."""
        ours = self.block_size
        theirs = self.plan.block_size
        size = sizes[self.group]
        for at in range(0, len(self.block_ids), size):
            indices = self.indices[at : at + size]
            tokens = int(indices[0]) * ours, int(indices[-1] + 1) * ours
            first, end = np.searchsorted(
                self.numbers, (tokens[0] // theirs, -(-tokens[1] // theirs))
            ).tolist()
            yield replace(
                self,
                block_ids=self.block_ids[at : at + size],
                indices=indices,
                numbers=self.numbers[first:end],
                slots=self.slots[:, first:end],
                generations=self.generations[:, first:end],
                keys=None if self.keys is None else self.keys[:, first:end],
            )


class LoadPlans:
    """How this rank fills its blocks, by what a peer keeps and by group.

    Args:
        layout: of this rank's slots.
        groups: what this engine keeps.
        rank, ranks: of this worker, counted stage by stage, and how many a stage has.
        stripes: ranks over which the slots of this pipeline stage are spread.
        shards: into how many a block is divided, in the groups of which blocks are.
    """

    def __init__(
        self,
        layout: SlotLayout,
        groups: tuple[GroupShape, ...],
        rank: int,
        ranks: int,
        stripes: int = 1,
        shards: int = 1,
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._rank = rank
        self._ranks = ranks
        self._stripes = stripes
        self._shards = shards
        self._plans: BoundedMap[tuple[CompatibilityKey | None, int], LoadPlan]
        self._plans = BoundedMap(_MAX_PLANS)

    def steps(self, spec: LoadSpec) -> tuple[list[LoadStep], list[tuple[int, Blocks]]]:
        """The steps of a job, and group and blocks of what no slot holds a part of."""
        steps: list[LoadStep] = []
        zeros: list[tuple[int, Blocks]] = []
        spans = zip(self._groups, spec.blocks.groups(), spec.slots_by_group(), strict=True)
        for g, (group, (index, blocks), shards) in enumerate(spans):
            if not self._layout.group_bytes[g]:
                continue  # this pipeline stage has none of its layers
            plan = self._plan(spec.source, g)
            block_ids = spec.blocks.block_ids[blocks]
            indices = index + np.arange(len(block_ids))
            # A slot of the peer may hold several of our blocks, or a block of ours take several.
            per_slot = max(1, plan.block_size // group.block_size)
            per_block = max(1, group.block_size // plan.block_size)
            begins = indices // per_slot * per_block
            first, own = shards[0]
            end = first + own.stop - own.start
            there = block_ids != NULL_BLOCK_ID
            filled = there & (begins + per_block > first) & (begins < end) & (end > first)
            if (unread := block_ids[there & ~filled]).size:
                zeros.append((g, unread))
            numbers = np.unique(begins[filled, None] + np.arange(per_block))
            numbers = numbers[(numbers >= first) & (numbers < end)]
            places = np.array([[of.start] for _, of in shards]) + numbers - first
            whole = LoadStep(
                g,
                plan,
                group.block_size,
                block_ids[filled],
                indices[filled],
                numbers,
                spec.slots.block_ids[places],
                spec.generations[places],
                None if spec.keys is None else spec.keys[places],
            )
            if whole.block_ids.size:
                steps.append(whole)
        return steps, zeros

    def arenas(self, spec: LoadSpec) -> list[tuple[Endpoint, ...]]:
        """The arenas that a job reads, each once."""
        spans = (shards[0][1] for shards in spec.slots_by_group())
        sizes = zip(spans, self._layout.group_bytes, strict=False)
        read = (g for g, (own, size) in enumerate(sizes) if own.stop > own.start and size)
        sources = (source for group in read for source in self._plan(spec.source, group).sources)
        return list(dict.fromkeys(spec.arenas[n] for source in sources for n in source.arenas))

    def _plan(self, source: CompatibilityKey | None, group: int) -> LoadPlan:
        plan = self._plans.get((source, group))
        if plan is None:
            plan = self._plans[source, group] = self._make_plan(source, group)
        return plan

    def _make_plan(self, source: CompatibilityKey | None, group: int) -> LoadPlan:
        ours = self._groups[group]
        stage, rank = divmod(self._rank, self._ranks)
        length = self._layout.group_bytes[group]
        if source is None:
            arenas = owning_arenas(stage, rank, self._ranks, self._stripes)
            divided = is_divided(ours.num_copies(self._ranks), self._shards)
            shard = rank % self._shards if divided else 0
            return LoadPlan(ours.block_size, (LoadSource(arenas, length, shard=shard),), divided)
        alike = source.ranks == self._ranks
        sources: list[LoadSource] = []
        # The slot of a state stands for the block of ours that it fills; see `HandoffReceiver`.
        block_size = ours.block_size
        divided = False
        for source_stage, source_group, places in self._places(source, group, stage):
            theirs = source.stages[source_stage][source_group]
            if ours.attention_type != "last":
                block_size = theirs.block_size
            divided = is_divided(theirs.num_copies(source.ranks), source.num_shards)
            shards = source.num_shards if divided else 1
            if (alike or ours.replicated) and places is None and same_bytes(theirs, ours):
                # Of what all ranks hold, ours take turns at the peer's; see `head_sources`.
                turn = rank % source.ranks
                arenas = source.arenas_of(source_stage, turn)
                only = LoadSource(arenas, length, shard=turn % shards)
                return LoadPlan(ours.block_size, (only,), divided)
            if ours.attention_type == "last" and not (alike or ours.replicated):
                sources += [
                    LoadSource(
                        source.arenas_of(source_stage, of_stage),
                        states.source_bytes,
                        states,
                        shard=of_stage % shards,
                    )
                    for of_stage, states in state_slices(
                        theirs, source.ranks, ours, rank, self._ranks, places
                    ).items()
                ]
                continue
            pairs = places or [(layer, layer) for layer in range(len(ours.pages))]
            sources += self._by_heads(source, source_stage, source_group, ours, pairs, shards)
        return LoadPlan(block_size, tuple(sources), divided)

    def _by_heads(
        self,
        source: CompatibilityKey,
        source_stage: int,
        source_group: int,
        ours: GroupShape,
        pairs: list[tuple[int, int]],
        shards: int,
    ) -> list[LoadSource]:
        """The ranks of one of the peer's stages that have heads of this rank.

        Args:
            source, source_stage, source_group: the peer, its stage, and its group there.
            ours: the group that is filled.
            pairs: the places of each layer's page in slots of the peer and in ours.
            shards: of a block of the peer.
        """
        theirs = source.stages[source_stage][source_group]
        rank = self._rank % self._ranks
        alike = source.ranks == self._ranks
        converts = converter(theirs, ours, places=pairs, like_ranks=alike)
        by_rank: dict[int, list[HeadSlice]] = {}
        for number, (layer, own) in enumerate(pairs):
            for of_stage, heads in head_sources(
                total=total_heads(
                    theirs, layer, source.ranks, ours, own, self._ranks, source.kv_heads
                ),
                source_heads=theirs.heads[layer],
                source_ranks=source.ranks,
                target_heads=ours.heads[own],
                target_rank=rank,
                target_ranks=self._ranks,
            ):
                each = by_rank.setdefault(of_stage, [HeadSlice(0, 0, 0)] * len(pairs))
                each[number] = heads
        return [
            LoadSource(
                source.arenas_of(source_stage, of_stage),
                converts.source_bytes,
                converts,
                tuple(heads),
                converts.page_runs,
                of_stage % shards,
            )
            for of_stage, heads in sorted(by_rank.items())
        ]

    def _places(
        self, source: CompatibilityKey, group: int, stage: int
    ) -> list[tuple[int, int, list[tuple[int, int]] | None]]:
        """The peer's stages that have layers of ours, each with the number of their group there,
        and the places of these layers' pages in its slots and in ours; None where they are all in
        the same places. Pages of layers that the peer has not, a drafter's, are left zero."""
        # Where both have the same layers, stage s is read by stage s alone; see `difference`.
        ours = self._groups[group]
        there = source.stages[stage] if stage < len(source.stages) else ()
        same = group < len(there) and there[group].layers == ours.layers
        found = None if same else LayerPlaces.of(source)
        if found is None:
            return [(stage, group, None)]
        return [(each.stage, each.group, each.places) for each in found.read_by(ours)]
