# SPDX-License-Identifier: Apache-2.0
"""What the workers are told to copy, to slots and from those of a peer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.transports.base import Endpoint


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Blocks of one group and the slots they are copied to or from, pairwise."""

    group: int
    block_ids: list[int]
    slots: list[int]
    generations: list[int]
    keys: list[bytes]

    def part(self, which: slice) -> "CopyRun":
        """Some of the blocks, and their slots."""
        return CopyRun(
            self.group,
            self.block_ids[which],
            self.slots[which],
            self.generations[which],
            self.keys[which],
        )


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy blocks to this engine's own slots."""

    job_id: int
    runs: list[CopyRun]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Blocks of one group, and the slots of a peer that keeps the same bytes in another shape.

    Attributes:
        group: position of the group among the transferred ones.
        block_ids: blocks to be filled.
        indices: logical index of each of them, in blocks of this engine.
        first: logical index of the first slot, in blocks of the peer.
        slots, generations: the peer's slots from there, one a block of the peer.
    """

    group: int
    block_ids: list[int]
    indices: list[int]
    first: int
    slots: list[int]
    generations: list[int]


@dataclass(slots=True)
class LoadJob:
    """Fill blocks with a peer's slots.

    Attributes:
        request_id: the request that waits for it.
        arenas: the peer's arenas, one a rank, each in all ways that it can be read.
        timeout: seconds from its arrival until the job is given up.
        job_id: names the job in the worker's report.
        runs: blocks to be copied from slots of the same shape.
        conversions: blocks to be filled from slots of another one.
        zeros: group and blocks that vLLM has allocated and no token reads.
        source: what the peer keeps; None without conversions.
    """

    request_id: str
    arenas: tuple[tuple[Endpoint, ...], ...]
    timeout: float
    job_id: int = 0
    runs: list[CopyRun] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    zeros: list[tuple[int, list[int]]] = field(default_factory=list)
    source: CompatibilityKey | None = None

    def block_ids(self) -> Iterator[int]:
        """Every block that the job writes to."""
        for run in self.runs:
            yield from run.block_ids
        for conversion in self.conversions:
            yield from conversion.block_ids
        for _, block_ids in self.zeros:
            yield from block_ids


class HandoffWork(Protocol):
    """Work for the workers, as the halves of a hand-off add to it.

    Attributes:
        saves: started when the step's forward pass has written its KV.
        loads: started at once.
        void: slots, and a generation for each, so that who reads them learns that they are void.
    """

    saves: list[SaveJob]
    loads: list[LoadJob]
    void: tuple[list[int], list[int]]
