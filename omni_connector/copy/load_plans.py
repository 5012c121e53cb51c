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
from omni_connector.kv.convert import SlotConverter
from omni_connector.kv.heads import HeadSlice, head_sources
from omni_connector.kv.shapes import GroupShape, converter, same_bytes
from omni_connector.kv.spans import NULL_BLOCK_ID
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.transports.base import Endpoint

# Most plans that are remembered, each for a peer's layout and a rank. It bounds memory.
_MAX_PLANS: Final = 64

Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoadSource:
    """A rank of the peer that is read.

    Attributes:
        rank: counted stage by stage.
        length: bytes of each of its slots.
        converter: makes our slots of its slots; None where they hold the bytes of our blocks.
        heads: those that are taken from it, for each layer that the converter copies.
    """

    rank: int
    length: int
    converter: SlotConverter | None = None
    heads: tuple[HeadSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How the slots of one group of a peer become ours.

    Attributes:
        block_size: tokens of one of the peer's blocks; of states, of one of ours.
        sources: the ranks of the peer that are read. If one is not converted, it is the only one.
    """

    block_size: int
    sources: tuple[LoadSource, ...]

    def arenas(self, spec: LoadSpec) -> list[tuple[Endpoint, ...]]:
        """The arenas of the ranks that are read."""
        return [spec.arenas[source.rank] for source in self.sources]


@dataclass(frozen=True, slots=True, eq=False)
class LoadStep:
    """Blocks of one group that are filled at once, and the slots that they are filled with.

    Attributes:
        group, plan: which group, and how its blocks are filled.
        block_size: tokens of one of our blocks.
        block_ids, indices: the blocks, and their logical indices `(n,)`.
        numbers: logical indices of the slots, in blocks of the peer `(m,)`.
        slots, generations: the peer's `(m,)`.
        keys: as in `LoadSpec`.
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

    def parts(self, sizes: Sequence[int]) -> Iterator["LoadStep"]:
        """The same load in steps of at most `sizes[group]` blocks."""
        ours, theirs, size = self.block_size, self.plan.block_size, sizes[self.group]
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
                slots=self.slots[first:end],
                generations=self.generations[first:end],
                keys=None if self.keys is None else self.keys[first:end],
            )


class LoadPlans:
    """How this rank fills its blocks, by what a peer keeps and by group.

    Args:
        layout: of this rank's slots.
        groups: what this engine keeps.
        rank, ranks: of this worker, counted stage by stage, and how many a stage has.
    """

    def __init__(
        self, layout: SlotLayout, groups: tuple[GroupShape, ...], rank: int, ranks: int
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._rank = rank
        self._ranks = ranks
        self._plans: BoundedMap[tuple[CompatibilityKey | None, int], LoadPlan]
        self._plans = BoundedMap(_MAX_PLANS)

    def steps(self, spec: LoadSpec) -> tuple[list[LoadStep], list[tuple[int, Blocks]]]:
        """The steps of a job, and group and blocks of what no slot holds a part of."""
        steps: list[LoadStep] = []
        zeros: list[tuple[int, Blocks]] = []
        spans = zip(self._groups, spec.blocks.groups(), spec.slots.groups(), strict=True)
        for g, (group, (index, blocks), (first, own)) in enumerate(spans):
            if not self._layout.group_bytes[g]:
                continue  # this pipeline stage has none of its layers
            plan = self._plan(spec.source, g)
            block_ids = spec.blocks.block_ids[blocks]
            indices = index + np.arange(len(block_ids))
            # A slot of the peer may hold several of our blocks, or a block of ours take several.
            per_slot = max(1, plan.block_size // group.block_size)
            per_block = max(1, group.block_size // plan.block_size)
            begins = indices // per_slot * per_block
            end = first + own.stop - own.start
            there = block_ids != NULL_BLOCK_ID
            filled = there & (begins + per_block > first) & (begins < end) & (end > first)
            if (unread := block_ids[there & ~filled]).size:
                zeros.append((g, unread))
            numbers = np.unique(begins[filled, None] + np.arange(per_block))
            numbers = numbers[(numbers >= first) & (numbers < end)]
            whole = LoadStep(
                g,
                plan,
                group.block_size,
                block_ids[filled],
                indices[filled],
                numbers,
                spec.slots.block_ids[own][numbers - first],
                spec.generations[own][numbers - first],
                None if spec.keys is None else spec.keys[own][numbers - first],
            )
            if whole.block_ids.size:
                steps.append(whole)
        return steps, zeros

    def arenas(self, spec: LoadSpec) -> list[tuple[Endpoint, ...]]:
        """The arenas that a job reads, each once."""
        sizes = zip(spec.slots.group_sizes, self._layout.group_bytes, strict=False)
        read = (group for group, (blocks, size) in enumerate(sizes) if blocks and size)
        plans = (self._plan(spec.source, group) for group in read)
        return list(dict.fromkeys(arena for plan in plans for arena in plan.arenas(spec)))

    def _plan(self, source: CompatibilityKey | None, group: int) -> LoadPlan:
        plan = self._plans.get((source, group))
        if plan is None:
            plan = self._plans[source, group] = self._make_plan(source, group)
        return plan

    def _make_plan(self, source: CompatibilityKey | None, group: int) -> LoadPlan:
        ours = self._groups[group]
        stage, rank = divmod(self._rank, self._ranks)
        whole = LoadSource(self._rank, self._layout.group_bytes[group])
        if source is None:
            return LoadPlan(ours.block_size, (whole,))
        alike = source.ranks == self._ranks
        sources: list[LoadSource] = []
        for source_stage, places in self._places(source, group, stage):
            theirs = source.stages[source_stage][group]
            if alike and places is None and same_bytes(theirs, ours):
                return LoadPlan(ours.block_size, (whole,))
            pairs = places or [(layer, layer) for layer in range(len(ours.pages))]
            converts = converter(theirs, ours, places=pairs, like_ranks=alike)
            by_rank: dict[int, list[HeadSlice]] = {}
            for number, (layer, own) in enumerate(pairs):
                for of_stage, heads in head_sources(
                    total=1 if ours.replicated else source.kv_heads or None,
                    source_heads=theirs.heads[layer],
                    source_ranks=source.ranks,
                    target_heads=ours.heads[own],
                    target_rank=rank,
                    target_ranks=self._ranks,
                ):
                    each = by_rank.setdefault(of_stage, [HeadSlice(0, 0, 0)] * len(pairs))
                    each[number] = heads
            sources += [
                LoadSource(
                    source_stage * source.ranks + of_stage,
                    converts.source_bytes,
                    converts,
                    tuple(heads),
                )
                for of_stage, heads in sorted(by_rank.items())
            ]
        # The slot of a state stands for the block of ours that it fills; see `HandoffReceiver`.
        counted = ours if ours.attention_type == "last" else source.groups[group]
        return LoadPlan(counted.block_size, tuple(sources))

    def _places(
        self, source: CompatibilityKey, group: int, stage: int
    ) -> list[tuple[int, list[tuple[int, int]] | None]]:
        """The peer's stages that have layers of ours, each with the places of these layers' pages
        in its slots and in ours; None where they are all in the same places."""
        # Where both have the same stages, stage s is read by stage s alone; see `difference`.
        ours = self._groups[group]
        same = stage < len(source.stages) and source.stages[stage][group].layers == ours.layers
        found = None if same else LayerPlaces.of(source)
        if found is None:
            return [(stage, None)]
        return [(of_stage, places) for of_stage, places in found.read_by(group, ours)]
