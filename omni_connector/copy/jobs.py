# SPDX-License-Identifier: Apache-2.0
"""Copy jobs of hand-offs: what workers are told, and how they save blocks to slots.

`loading` has the loads.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.layered import Forward, LayeredSave, LayerRanges
from omni_connector.copy.threads import NO_JOB_ID, Outcome, Work
from omni_connector.errors import DeviceMemoryError
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans, TransferSpec, check_ids
from omni_connector.kv.stripes import SlotGroup, of_stripe
from omni_connector.net.runtime import kernel_name
from omni_connector.runtime.stats import failure_kind
from omni_connector.transports import Arena
from omni_connector.transports.base import Endpoint

logger = logging.getLogger("vllm.omni_connector.worker")

BATCH_BYTES: Final = 8 << 20
"""Bytes of blocks that a core copies, and a job saves or reads, in one go."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SaveSpec(TransferSpec):
    """Copy blocks to this engine's own slots.

    Attributes:
        blocks: as in `TransferSpec`, but by slot group; see `kv.stripes`.
        slots, generations: int64 `(n,)`, of each of the n `block_ids`; unused for a null block.
        keys: of each of them.
    """

    span: ClassVar[str] = "save"
    timed_as: ClassVar[str] = "save"
    counted_as: ClassVar[str] = "saved"

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    keys: list[bytes]

    def of_rank(self, rank: int, stripes: int, slot_groups: Sequence[SlotGroup]) -> Self:
        """The part of this job that a rank copies, with rows of its arena for slots; see
        `kv.stripes`.

        Args:
            rank: counted in its pipeline stage or stage by stage.
            stripes: ranks over which slots are spread.
            slot_groups: of the job's blocks. The result has blocks by cache group.
        """
        own, rows = of_stripe(self.slots, rank, stripes)
        block_ids = np.where(own, self.blocks.block_ids, NULL_BLOCK_ID)
        if all(each.stripe is None for each in slot_groups):
            return replace(self, blocks=replace(self.blocks, block_ids=block_ids), slots=rows)
        of_groups = zip(slot_groups, self.blocks.groups(), strict=True)
        spans = [span for each, span in of_groups if each.stripe in (None, rank % stripes)]
        places = np.concatenate([np.arange(at.start, at.stop) for _, at in spans])
        return replace(
            self,
            blocks=BlockSpans.of([(index, block_ids[at]) for index, at in spans]),
            slots=rows[places],
            generations=self.generations[places],
            keys=[self.keys[place] for place in places.tolist()],
        )

    def check(self, num_blocks: int, num_slots: int) -> None:
        TransferSpec.check(self, num_blocks, num_slots)
        copied = self.blocks.block_ids != NULL_BLOCK_ID
        check_ids(self.slots[copied], num_slots, "slot", written=True)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment that one process sets, and others keep.

    Attributes:
        at: in seconds of the clock of who set it.
        left: seconds until then, when it was set.
        kernel: whose clock that is.
    """

    at: float
    left: float
    kernel: str

    @classmethod
    def of(cls, at: float, clock: Callable[[], float]) -> Self:
        """The deadline at a moment of a clock of this process."""
        return cls(at, at - clock(), kernel_name())

    def on(self, clock: Callable[[], float]) -> float:
        """The same in seconds of a clock here. On another host nobody knows how long it took to
        arrive, so there the time that was left counts from now on."""
        return self.at if self.kernel == kernel_name() else clock() + self.left


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadSpec(TransferSpec):
    """Fill blocks with a peer's slots. Blocks that no slot holds a part of are zeroed.

    Attributes:
        slots: the peer's slots in the place of blocks: consecutive in each group, counted in blocks
            of the peer. A group whose blocks are divided there has the slots of each shard.
        generations: int64 `(m,)`, of each of the m slots.
        arenas: the peer's arenas, one a rank and stage by stage, each in all ways that it can be
            read.
        timeout: seconds from its first piece until the job is given up. Time in which it could go
            on, but other jobs did, does not count.
        lease: until when the peer holds the slots for it; None where nothing is leased.
        keys: what the headers of these slots must say (m,), objects; None where a lease says that
            they hold what is wanted.
        source: what the peer keeps; None where all its slots hold the bytes of our blocks, and
            are spread over its ranks as ours are.
        shards: for each group, into how many shards the peer's blocks are divided; empty where none
            are.
        own: whether the arenas are this engine's own. Then the load waits until they are attached,
            as the ranks of one engine live and end together.
    """

    fills_blocks: ClassVar[bool] = True
    span: ClassVar[str] = "load"
    timed_as: ClassVar[str] = "load"
    counted_as: ClassVar[str] = "loaded"

    slots: BlockSpans
    generations: NDArray[np.int64]
    arenas: tuple[tuple[Endpoint, ...], ...]
    timeout: float
    lease: Deadline | None = None
    keys: NDArray[np.object_] | None = None
    source: CompatibilityKey | None = None
    shards: tuple[int, ...] = ()
    own: bool = False

    def slots_by_group(self) -> list[list[tuple[int, slice]]]:
        """For each group and shard what `BlockSpans.groups` yields of `slots`."""
        spans = self.slots.groups()
        numbers = self.shards or (1,) * len(self.slots.group_sizes)
        return [list(islice(spans, number)) for number in numbers]


class Saver:
    """Makes the work of save jobs.

    Args:
        arena: whose slots are written.
        copier, layer_ranges: of this rank's KV caches; the copier knows the layer_ranges.
        checksum: whether slots carry checksums.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        copier: BlockCopier,
        layer_ranges: LayerRanges,
        checksum: bool,
    ) -> None:
        self._arena = arena
        self._layout = layer_ranges.layout
        self._batches = batch_blocks(self._layout, copier.speed)
        self._copies = partial(LayeredSave, copier, layer_ranges, checksum)

    def work(self, job_id: int, spec: SaveSpec, fence: object) -> Work:
        """The body of a save; see `Work`. Slots that it did not commit are void when it ends.
        `fence` is a fence of the copier, or the forward pass that the save follows."""
        forward = Forward.of(fence)

        def work(cancelled: Callable[[], bool]) -> Generator[bool | float, None, Outcome]:
            copied = spec.blocks.block_ids != NULL_BLOCK_ID
            slots = spec.slots[copied]
            generations = spec.generations[copied]
            outcome = Outcome(job_id)
            complete = False
            try:
                copies = self._copies(forward, spec.blocks, self._arena.slots, spec.slots)
                if not forward.ended:
                    self._arena.begin_write(slots, generations)
                    yield True
                    outcome.early = yield from copies.follow(cancelled)
                for group, places in spec.blocks.batches(self._batches):
                    saves = self._save(spec, group, places, copies, cancelled)
                    if cancelled() or not (yield from saves):
                        outcome.failure = "cancelled"
                        break
                    outcome.blocks += len(places)
                    outcome.size += len(places) * self._layout.group_bytes[group]
                else:
                    complete = True
            except DeviceMemoryError as error:  # of all jobs, and logged at the start
                outcome.failure = failure_kind(error, "save_failed")
            except Exception as error:  # whatever it is, the engine goes on without the hand-off
                logger.exception("Saving KV blocks failed (job %d)", job_id)
                outcome.failure = failure_kind(error, "save_failed")
            finally:
                if not complete and not self._arena.closed:
                    # Readers that wait for these slots learn that they will not come with this
                    # generation. A reader of a closed arena sees that its owner has gone.
                    self._arena.begin_write(slots, generations + 1)
            return outcome

        return work

    def void_work(self, slots: NDArray[np.int64], generations: NDArray[np.int64]) -> Work:
        """Tells readers of these slots, by their generations, that the bytes have changed."""

        def work(cancelled: Callable[[], bool]) -> Generator[bool, None, Outcome]:
            self._arena.begin_write(slots, generations)
            yield True
            return Outcome(NO_JOB_ID)

        return work

    def _save(
        self,
        spec: SaveSpec,
        group: int,
        places: NDArray[np.int64],
        copies: LayeredSave,
        cancelled: Callable[[], bool],
    ) -> Generator[bool, None, bool]:
        slots = spec.slots[places]
        generations = spec.generations[places]
        size = self._layout.group_bytes[group]

        def landed(some: slice, checksums: NDArray[np.uint64]) -> None:
            keys = [spec.keys[place] for place in places[some].tolist()]
            self._arena.publish(slots[some], generations[some], keys, size, checksums)

        self._arena.begin_write(slots, generations)  # again, where it followed the forward pass
        yield True
        if not copies.finish(group, places, cancelled, landed):
            return False
        yield True
        return True


def batch_blocks(layout: SlotLayout, speed: int = 1) -> list[int]:
    """For each group the blocks that are copied in one go, before other jobs have their turn;
    `speed` is the copier's."""
    return [max(1, speed * BATCH_BYTES // max(1, size)) for size in layout.group_bytes]
