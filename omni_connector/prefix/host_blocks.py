# SPDX-License-Identifier: Apache-2.0
"""Blocks in the arenas of this host: finds them, loads them, and keeps new ones.

A look-up reads the own index and those of the neighbours, in the call that asks. Blocks are not
leased. A reader notices by generation and key that a block was evicted before it was read.
"""

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.block_index import (
    BlockIndex,
    BlockIndexView,
    Tags,
    find_each,
    find_prefix,
    tag_of,
    tags_of,
    tags_of_words,
)
from omni_connector.arena.format import header_keys
from omni_connector.arena.slot_index import Ints
from omni_connector.arena.slot_pool import NONE, Bools, KeptShards, SlotPool
from omni_connector.copy.prefix_jobs import HostLoadSpec, KeepSpec
from omni_connector.errors import ProtocolError
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.kv.stripes import SlotGroup, slot_group_ranges
from omni_connector.prefix.attaching import Arenas, SlotCopy
from omni_connector.prefix.hints import FilledBlocks
from omni_connector.prefix.neighbours import Neighbour, Neighbours
from omni_connector.runtime.context import EngineContext

NOBODY: Final = -1
"""Owner of a block that no engine has."""

_FIRST_LOOK: Final = 64
"""Leading blocks of a prompt that are looked up first. If all of them are found, eight times as
many are next."""

_TAGGED_BYTES: Final = 8
"""Bytes of the shortest hash that `tag_of` takes. vLLM's have 16 or 32."""

# Saves under way take at most 1/2 of the slots, so that hand-offs have room.
_BUSY_PART: Final = 2

MAX_IN_ORDER: Final = 4096
"""Blocks of a group whose order of eviction is set when a request ends, at most: the first of the
request. It bounds the time that this takes in a step."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundBlocks:
    """Where the blocks of one group of a prompt are, from the first on.

    Attributes:
        owners: for each block the position in `Found.engines` of the engine that has it, with all
            its shards, or `NOBODY`. int64 (blocks,); nothing is known of later blocks.
        slots, generations: of each block, by shard; see `kv.stripes`. Both int64 (shards, blocks).
    """

    owners: Ints
    slots: Ints
    generations: Ints

    @property
    def there(self) -> list[bool]:
        """Whether each block is in some arena."""
        there: list[bool] = (self.owners >= 0).tolist()
        return there

    def before(self, end: int) -> "FoundBlocks":
        """The same of the first blocks alone."""
        return FoundBlocks(self.owners[:end], self.slots[:, :end], self.generations[:, :end])


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the engines of this host have of a prompt.

    Attributes:
        engines: the engines whose indexes were searched; this engine is the first.
        groups: one entry for each group.
    """

    engines: Sequence[Neighbour]
    groups: Sequence[FoundBlocks]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any block but that no engine has it."""
        return not any(len(of.owners) for of in self.groups)

    def with_blocks(self, index: int, blocks: "Sequence[FoundBlocks]") -> "Found":
        """The same, with one block of each group in the place of that with this index."""
        groups = [
            FoundBlocks(
                _put(of.owners, index, NOBODY, each.owners),
                _put(of.slots, index, 0, each.slots),
                _put(of.generations, index, 0, each.generations),
            )
            for of, each in zip(self.groups, blocks, strict=True)
        ]
        return Found(self.engines, groups)

    def without(self, index: int) -> "Found":
        """The same, with nobody who has the block of any group with this index."""
        owners = np.array([NOBODY])
        zeros = [np.zeros((len(of.slots), 1), np.int64) for of in self.groups]
        return self.with_blocks(index, [FoundBlocks(owners, each, each) for each in zeros])


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Consecutive blocks of one group that a request has, to be filled.

    Later tokens may read only the last of them, as in a group with a window; the others are zeroed:

        logical index   4      5      6      7
        block_ids       21     22     23     24       first = 4
                        zeroed zeroed loaded loaded   read = range(6, 8), begin = 2

    Attributes:
        first: logical index of the first block.
        block_ids: `(n,)`; null blocks are not filled.
        read: logical indices of the blocks that later tokens read.
        hashes: of the blocks in `read`.
    """

    first: int
    block_ids: Ints
    read: range
    hashes: list[bytes]

    @property
    def begin(self) -> int:
        """Number of blocks before the first that is read."""
        return self.read.start - self.first

    @property
    def copied(self) -> NDArray[np.bool_]:
        """For each block in `read` whether it is to be filled."""
        copied: NDArray[np.bool_] = self.block_ids[self.begin :] != NULL_BLOCK_ID
        return copied

    def only(self, part: NDArray[np.bool_]) -> "Wanted":
        """A copy in which the blocks outside of `part` are null blocks, so that they are not
        filled."""
        return replace(self, block_ids=np.where(part, self.block_ids, NULL_BLOCK_ID))


class Hit(NamedTuple):
    """Slots that are read.

    Attributes:
        engine: whose they are.
        slots, generations: of each, the beginning of the prompt first. Both int64 `(n,)`.
    """

    engine: Neighbour
    slots: Ints
    generations: Ints


class HostBlocks:
    """The scheduler half's view of the arenas of this host.

    Args:
        pool: the slots of this engine's arenas, with a listing.
        index: this engine's own.
        arenas: this engine's own.
        neighbours: the other engines; closed with this.
        groups: the cache groups that this engine keeps.
        slot_groups: see `kv.stripes`; none where each group has one.
        key_prefix: prefix of the keys of this engine's blocks.
        load_timeout: seconds that a load may take.
        context: the clock of `SlotPool.end_pins`; statistics, which count blocks that are not kept
            or not pinned.

    Attributes:
        num_slots: of this engine's arenas.
        keeping: the jobs under way that save blocks, by number.
        divides: whether blocks of some groups are divided into shards.
    """

    def __init__(
        self,
        *,
        pool: SlotPool,
        index: BlockIndex,
        arenas: Arenas,
        neighbours: Neighbours,
        groups: tuple[GroupShape, ...],
        slot_groups: tuple[SlotGroup, ...] = (),
        key_prefix: bytes,
        load_timeout: float,
        context: EngineContext,
    ) -> None:
        self._pool = pool
        self._clock = context.clock
        self._stats = context.stats
        self._own = Neighbour(index, arenas, own=True)
        self._neighbours = neighbours
        # Where a group keeps all tokens, a prefix ends at the first block that is missing.
        self._whole = [shape.attention_type == "all" for shape in groups]
        # For each group the numbers of its slot groups, which keys and tags name. Where no block is
        # divided, each is the number of the group.
        self._slot_groups = slot_group_ranges(slot_groups or [*map(SlotGroup, range(len(groups)))])
        self._most_shards = max(map(len, self._slot_groups))
        self.divides = self._most_shards > 1
        empty = [np.zeros((len(numbers), 0), np.int64) for numbers in self._slot_groups]
        self._nothing = [FoundBlocks(NONE, each, each) for each in empty]
        self._key_prefix = key_prefix
        self._load_timeout = load_timeout
        self.num_slots = len(pool.generation)
        # At least one block: else blocks would wait for room that no copy makes.
        self._max_busy = max(self._most_shards, self.num_slots // _BUSY_PART)
        self._block_sizes = [shape.block_size for shape in groups]
        self.keeping: dict[int, KeepSpec] = {}
        # Finished requests: the last of the jobs that may still save their blocks, and the tags of
        # the blocks, the last tokens first.
        self._over: deque[tuple[int, Tags]] = deque()

    def find(
        self,
        hashes: Sequence[list[bytes]],
        keys: Callable[[list[bytes]], list[bytes]] = list,
        *,
        alone: bool = False,
    ) -> Found:
        """Look for the blocks of a prompt.

        Args:
            hashes: of its full blocks, from the first on, one list for each group.
            keys: returns the keys of blocks in arenas, given their hashes.
            alone: whether a prefix ends where the arenas have no more of a group that keeps all
                tokens. Then later blocks are looked up in no group.
        """
        engines = (self._own, *self._neighbours.present())
        indexes = [each.index for each in engines]
        found = list(self._nothing)
        end: float = math.inf  # tokens
        for g, of_group in enumerate(hashes):
            if self._whole[g] and of_group:
                found[g] = self._find_prefix(indexes, g, of_group, keys)
            if self._whole[g] and alone:
                end = min(end, len(found[g].owners) * self._block_sizes[g])
        for g, of_group in enumerate(hashes):
            blocks = int(min(len(of_group), end // self._block_sizes[g]))
            if not self._whole[g] and blocks:
                found[g] = _find_each(indexes, self._tags(g, keys(of_group[:blocks])))
        return Found(engines, found)

    def _tags(self, group: int, keys: Sequence[bytes]) -> Tags:
        """The tags of blocks of a group `(n,)`, or of their shards `(shards, n)`."""
        numbers = self._slot_groups[group]
        if len(numbers) == 1:
            return tags_of(self._key_prefix, numbers.start, keys)
        return np.array([tags_of(self._key_prefix, number, keys) for number in numbers])

    def _find_prefix(
        self,
        indexes: Sequence[BlockIndex | BlockIndexView],
        group: int,
        hashes: list[bytes],
        keys: Callable[[list[bytes]], list[bytes]],
    ) -> FoundBlocks:
        """The leading blocks, up to the first that nobody has. The first block is looked up alone,
        and then a few, as most prompts are not found at all, or only a short part of them is."""
        if len(self._slot_groups[group]) > 1:
            found = _find_each(indexes, self._tags(group, keys(hashes)))
            return found.before(int(np.argmin(np.append(found.owners, NOBODY))))
        number = self._slot_groups[group].start
        if len(hashes[0]) >= _TAGGED_BYTES:
            first = tag_of(self._key_prefix, number, keys(hashes[:1])[0])
            if not any(each.may_hold(first) for each in indexes):
                return self._nothing[group]
        parts = []
        begin, size = 0, _FIRST_LOOK
        while begin < len(hashes):
            tags = tags_of(self._key_prefix, number, keys(hashes[begin : begin + size]))
            parts.append(find_prefix(indexes, tags))
            if len(parts[-1][0]) < len(tags):
                break
            begin, size = begin + size, 8 * size
        if len(parts) == 1:
            owners, slots, generations = parts[0]
        else:
            owners, slots, generations = (np.concatenate(each) for each in zip(*parts, strict=True))
        return FoundBlocks(owners, slots[None], generations[None])

    def look(self, found: Found, group: int, words: Tags) -> FoundBlocks:
        """Look for blocks of one group, each by itself.

        Args:
            found: says which engines are searched, and how they are numbered. Those that have gone
                since have nothing.
            words: the first 8 bytes of their keys; see `tags_of_words`.
        """
        numbers = [n for n, each in enumerate(found.engines) if not each.index.closed]
        of_shards = [tags_of_words(self._key_prefix, n, words) for n in self._slot_groups[group]]
        tags = of_shards[0] if len(of_shards) == 1 else np.array(of_shards)
        there = _find_each([found.engines[n].index for n in numbers], tags)
        whose = np.array([*numbers, NOBODY], np.int64)  # of no engine: the last one, by its -1
        return replace(there, owners=whose[there.owners])

    def loads(
        self, request_id: str, found: Found, wanted: Sequence[Wanted]
    ) -> tuple[list[tuple[HostLoadSpec, Hit]], list[Wanted]]:
        """Make the jobs that load blocks from the arenas of this host, one for each engine. Any
        thread may call this.

        Returns:
            The jobs, each with what to pass to `hit` when it starts; and the blocks that no engine
            has: `wanted`, with null blocks for blocks that the jobs fill.
        """
        owners = [
            _padded(of.owners, each, NOBODY) for each, of in zip(wanted, found.groups, strict=True)
        ]
        loading = np.unique(np.concatenate([NONE, *owners]))
        loading = loading[loading >= 0].tolist()
        # The first job zeroes the blocks before the first that is read.
        filler = loading[0] if loading else NOBODY
        whose = [
            np.concatenate([np.full(each.begin, filler), of])
            for each, of in zip(wanted, owners, strict=True)
        ]
        specs = []
        for number in loading:
            parts = [each.only(of == number) for each, of in zip(wanted, whose, strict=True)]
            specs.append(self._load(request_id, found, number, parts))
        left = [each.only(of == NOBODY) for each, of in zip(wanted, whose, strict=True)]
        return specs, left

    def _load(
        self, request_id: str, found: Found, number: int, parts: Sequence[Wanted]
    ) -> tuple[HostLoadSpec, Hit]:
        spans: list[tuple[int, Ints]] = []
        of_generations: list[Ints] = []
        read: list[Bools] = []
        keys: list[bytes] = []
        for numbers, part, of in zip(self._slot_groups, parts, found.groups, strict=True):
            slots = np.where(part.copied, _padded(of.slots, part, 0), 0)
            of_generations.extend(_padded(of.generations, part, 0))
            for slot_group, of_shard in zip(numbers, slots, strict=True):
                spans.append((part.read.start, of_shard))
                read.append(part.copied)
                keys += header_keys(self._key_prefix, slot_group, part.hashes)
        engine = found.engines[number]
        of_slots = np.concatenate([of for _, of in spans])
        generations = np.concatenate(of_generations)
        used = np.concatenate(read)
        spec = HostLoadSpec(
            request_id=request_id,
            blocks=BlockSpans.of([(part.first, part.block_ids) for part in parts]),
            slots=BlockSpans.of(spans),
            shards=tuple(map(len, self._slot_groups)),
            generations=generations,
            keys=np.array(keys, dtype=object),
            arenas=engine.arenas,
            timeout=self._load_timeout,
            own=engine.own,
        )
        return spec, Hit(engine, of_slots[used], generations[used])

    def avoid(self, load: HostLoadSpec) -> None:
        """Leave the engine of this load out of look-ups for a while, as it does not answer."""
        self._neighbours.avoid(load.arenas)

    def hit(self, engine: Neighbour, slots: Ints, generations: Ints) -> None:
        """Count slots as used; see `Hit`."""
        # Backwards, so that the beginning of a prompt is evicted last.
        if engine.own:
            touch(self._pool, slots[::-1], generations[::-1])
        else:
            self._neighbours.hit(engine, slots[::-1], generations[::-1])

    def room(self, most: int) -> int:
        """Number of blocks that can be saved now, `most` at most."""
        return max(0, min(most, self._slots_left() // self._most_shards))

    def _slots_left(self) -> int:
        """Slots that further saves may take."""
        return self._max_busy - sum(len(spec.slots) for spec in self.keeping.values())

    def has_room(self, most: int) -> bool:
        """Whether one block of each group can be saved now.

        Args:
            most: blocks that may be saved now.
        """
        slots = sum(map(len, self._slot_groups))
        return most >= len(self._slot_groups) and self._slots_left() >= slots

    def keep(
        self,
        filled: Sequence[FilledBlocks],
        most: int,
        max_waiting: int,
        there: Callable[[int, FilledBlocks], Bools],
    ) -> tuple[KeepSpec | None, int, list[tuple[int, FilledBlocks]]]:
        """Take slots for blocks that no arena of this host has, and make the job that saves them.

        The caller starts the job and enters it into `keeping`; `kept` ends it.

        Args:
            filled: full blocks of each group.
            most: blocks that may be saved now.
            max_waiting: blocks that may wait for room.
            there: says which blocks of a group vLLM still has. It is asked about few of them.

        Returns:
            The job, None if no block is to be saved; the number of blocks that are dropped for lack
            of room; and the blocks that wait, by group. Their hints are followed when they are
            passed again.
        """
        groups: list[tuple[int, Ints]] = [(0, NONE)] * sum(map(len, self._slot_groups))
        slots: list[Ints] = []
        keys: list[bytes] = []
        waiting: list[tuple[int, FilledBlocks]] = []
        dropped = 0
        left = self._slots_left()
        # Before any block gets a slot, as a slot that is taken may have had one of these blocks.
        lacking = [self._lacking(g, each) if len(each) else None for g, each in enumerate(filled)]
        for g, candidates in enumerate(filled):
            if (lacks := lacking[g]) is None:
                continue
            new, tags = _chosen(*lacks, there(g, lacks[0]))
            dropped += len(lacks[0]) - len(new)
            numbers = self._slot_groups[g]
            given = self._take(g, new, tags, max(0, min(most, left // len(numbers))))
            waits = new.at(given.beyond[:max_waiting])
            if len(waits):
                waiting.append((g, waits))
                max_waiting -= len(waits)
            dropped += given.dropped - len(waits)
            most -= given.num_blocks
            self._pin(numbers, candidates, set(waits.keys))
            for number, (chosen, taken) in zip(numbers, given.shards, strict=True):
                left -= len(taken)
                blocks = new.at(chosen)
                groups[number] = 0, blocks.block_ids
                slots.append(taken)
                keys += header_keys(self._key_prefix, number, blocks.keys)
        slot_ids = np.concatenate([NONE, *slots])
        if not slot_ids.size:
            return None, dropped, waiting
        with self._pool.lock:
            generations = self._pool.generation[slot_ids]
        spans = BlockSpans.of(groups)
        spec = KeepSpec(blocks=spans, slots=slot_ids, generations=generations, keys=keys)
        return spec, dropped, waiting

    def _take(self, group: int, blocks: FilledBlocks, tags: Tags, most: int) -> KeptShards:
        """Take slots for blocks of a group, `most` blocks at most."""
        numbers = self._slot_groups[group]
        with self._pool.lock:
            if len(numbers) > 1:
                return self._pool.keep_shards(
                    numbers, blocks.keys, most, blocks.prompts, list(tags)
                )
            given = self._pool.keep(numbers.start, blocks.keys, most, blocks.prompts, tags)
        shards = [(given.chosen, given.slots)]
        return KeptShards(shards, len(given.slots), given.dropped, given.beyond)

    def _pin(self, groups: range, blocks: FilledBlocks, waits: set[bytes]) -> None:
        """Pin those of these blocks that hints ask for, in each of their slot groups, except those
        that wait. They are in the arena, or are being copied there."""
        if blocks.hints is None:
            return
        pins_s = blocks.pins_s
        asked = [i for i in np.flatnonzero(pins_s).tolist() if blocks.keys[i] not in waits]
        if not asked:
            return
        pins_s, of_sessions = pins_s[asked], blocks.of_sessions[asked]
        keys = [blocks.keys[i] for i in asked]
        for group in groups:
            with self._pool.lock:
                slots = self._pool.places(group, keys)
                there = slots >= 0
                until = self._clock() + pins_s[there]
                pinned = self._pool.pin(slots[there], until, of_sessions[there])
            if refused := len(keys) - pinned:
                self._stats.count("pins_refused", refused)

    def end_session_pins(self, keys: Sequence[list[bytes]]) -> int:
        """End the pins that blocks have for sessions, by their keys in each group; returns how many
        slots are not pinned any more."""
        return self._each_slot(
            keys, lambda slots: self._pool.end_session_pins(slots, self._clock())
        )

    def fix_session_pins(self, keys: Sequence[list[bytes]]) -> None:
        """The pins that blocks have for sessions, by their keys in each group, end with their time
        alone."""
        self._each_slot(keys, self._pool.fix_session_pins)

    def _each_slot(self, keys: Sequence[list[bytes]], change: Callable[[Ints], int]) -> int:
        """Sum of what `change` returns of the slots of these blocks, under the pool's lock."""
        changed = 0
        for number, of_group in self._numbered(keys):
            with self._pool.lock:
                changed += change(np.unique(self._pool.find(number, of_group)))
        return changed

    def let_go(self, keys: Sequence[list[bytes]]) -> int:
        """Free the slots of blocks that nobody holds or has pinned, by their keys in each group;
        returns how many."""
        return self._each_slot(
            keys, lambda slots: self._pool.drop(slots[~self._pool.pinned(slots)])
        )

    def _living(self) -> Sequence[Neighbour]:
        """This engine and its neighbours. Orphans do not count, as they go soon: what is read from
        them is kept here."""
        return [self._own, *(each for each in self._neighbours.present() if not each.orphan)]

    def lacks(self, tags: Tags, *, here: Bools | bool) -> Bools:
        """Which of the blocks of these tags no living engine has. The others count as used, so that
        they are not evicted to make room for the blocks that follow them.

        Args:
            tags: of blocks `(n,)`, or of all their shards `(shards, n)`.
            here: which blocks must be in the own arena: they are lacking if only a neighbour has
                them.
        """
        engines = self._living()
        found = _find_each([each.index for each in engines], tags)
        owners = found.owners
        if here is not False:  # the first engine is this one
            owners[here & (owners > 0)] = NOBODY
        lacks: Bools = owners == NOBODY
        if lacks.all():
            return lacks
        for number in np.unique(owners[~lacks]).tolist():
            theirs = owners == number
            slots = found.slots[:, theirs].ravel()
            self.hit(engines[number], slots, found.generations[:, theirs].ravel())
        return lacks

    def _lacking(self, group: int, filled: FilledBlocks) -> tuple[FilledBlocks, Tags]:
        """The blocks to save, and their tags: no engine has them (or hints ask for them in the own
        arena), and the order of eviction admits them."""
        here = False if filled.hints is None else filled.keeps_here
        tags = self._tags(group, filled.keys)
        new, tags = _chosen(filled, tags, self.lacks(tags, here=here))
        if not len(new):
            return new, tags
        admitted, tags = _chosen(new, tags, self._admits(group, new))
        if passed := len(new) - len(admitted):
            self._stats.count("blocks_passed_over", passed)
        return admitted, tags

    def _admits(self, group: int, new: FilledBlocks) -> Bools:
        """Which of these blocks the order of eviction admits, or hints ask for."""
        group = self._slot_groups[group].start
        if new.hints is None:
            with self._pool.lock:
                return self._pool.admits(group, new.keys, new.prompts)
        admitted = new.keeps_here
        others = new.at(np.flatnonzero(~admitted))
        with self._pool.lock:
            admitted[~admitted] = self._pool.admits(group, others.keys, others.prompts)
        return admitted

    def kept(self, job_id: int, failure: str | None) -> None:
        """A job of `keeping` has ended; `failure` is None if every rank has saved the blocks."""
        spec = self.keeping.pop(job_id)
        with self._pool.lock:
            if failure is None:
                self._pool.filled(spec.slots)
            else:
                self._pool.unfilled(spec.slots)
            self._pool.let_go(spec.slots[::-1])
        self._put_in_order()

    def finished(self, hashes: Sequence[list[bytes]]) -> None:
        """A request has ended: have its blocks evicted from the last to the first.

        Until now they are in the order of their jobs and groups. The order is set when the jobs
        have ended.

        Args:
            hashes: of its first blocks, `MAX_IN_ORDER` at most, one list for each group.
        """
        tags = [
            tags_of(self._key_prefix, number, of_group)
            for numbers, of_group in zip(self._slot_groups, hashes, strict=True)
            for number in numbers
        ]
        if len(tags) == 1:
            last_first = tags[0][::-1]
        else:
            of_groups = zip(self._slot_groups, self._block_sizes, strict=True)
            sizes = [size for numbers, size in of_groups for _ in numbers]
            pairs = zip(tags, sizes, strict=True)
            ends = np.concatenate([size * np.arange(1, len(each) + 1) for each, size in pairs])
            last_first = np.concatenate(tags)[np.argsort(-ends, kind="stable")]
        self._over.append((next(reversed(self.keeping), 0), last_first))
        if not self.keeping:
            self._put_in_order()

    def _put_in_order(self) -> None:
        oldest = next(iter(self.keeping), None)  # their numbers ascend
        over: list[Tags] = []
        while self._over and (oldest is None or self._over[0][0] < oldest):
            over.append(self._over.popleft()[1])
        if not over:
            return
        slots, generations = self._own.index.find(np.concatenate(over))
        places = np.flatnonzero(slots >= 0)
        if len(over) > 1:  # a slot of several requests: it has its place by the last of them
            _, last = np.unique(slots[places[::-1]], return_index=True)
            places = np.sort(places[::-1][last])
        with self._pool.lock:
            self._pool.requeue(slots[places], generations[places])

    def evicted(self, group: int, key: bytes) -> bool:
        """Whether this block was evicted lately from the own arena."""
        with self._pool.lock:
            return any(self._pool.evicted_lately(each, key) for each in self._slot_groups[group])

    def kept_until(self, group: int, keys: list[bytes]) -> tuple[int, float]:
        """How many blocks of a prompt the own arena has, and until when all of them are pinned, 0
        if they are not. Any thread may ask.

        Args:
            keys: of its full blocks in this group, from the first on. Where the group keeps all
                tokens, blocks after one that is missing do not count.
        """
        found = _find_each([self._own.index], self._tags(group, keys))
        if self._whole[group]:
            found = found.before(int(np.argmin(np.append(found.owners, NOBODY))))
        there = found.owners >= 0
        with self._pool.lock:
            until = self._pool.pins_until(found.slots[:, there].ravel())
        return int(np.count_nonzero(there)), until

    def pin(self, keys: Sequence[list[bytes]], until: float) -> tuple[int, int]:
        """Pin what the own arena has of a prompt, by the keys of its blocks in each group. Any
        thread may call this. Returns how many slots are pinned, and how many could not be."""
        pinned = there = 0
        for number, of_group in self._numbered(keys):
            with self._pool.lock:
                slots = self._pool.find(number, of_group)
                pinned += self._pool.pin(slots, until)
                there += len(slots)
        return pinned, there - pinned

    def drop(self, keys: Sequence[list[bytes]]) -> tuple[int, int]:
        """Let go of blocks in the own arena, by their keys in each group. Any thread may call this.
        Returns how many slots became free, and how many are held, so that they stay."""
        dropped = there = 0
        for number, of_group in self._numbered(keys):
            with self._pool.lock:
                slots = self._pool.find(number, of_group)
                dropped += self._pool.drop(slots)
                there += len(slots)
        return dropped, there - dropped

    def drop_all(self) -> tuple[int, int]:
        """The same of all blocks in the own arena; slots that are held are not counted."""
        with self._pool.lock:
            slots = self._pool.cached()
        dropped = 0
        for at in range(0, len(slots), MAX_IN_ORDER):  # the engine's thread takes the lock, too
            with self._pool.lock:
                dropped += self._pool.drop(slots[at : at + MAX_IN_ORDER])
        return dropped, 0

    def bring(self, group: int, keys: list[bytes], ended: Callable[[int, int], object]) -> None:
        """Copy blocks from the arenas of neighbours to the own one. Any thread may call this.

        Args:
            group, keys: of the blocks, `MOST_SLOTS` at most.
            ended: called once, perhaps on another thread, with the number of blocks that the own
                arena has then, and of the others that a neighbour had.

        Raises:
            ProtocolError: slots of this engine are spread over its ranks, for which this is not
                made.
        """
        number, prefix = self._slot_groups[group].start, self._key_prefix
        if any(rank[0].n_slots < self.num_slots for rank in self._own.arenas):
            raise ProtocolError("the slots of this engine are spread over its ranks")
        engines = self._neighbours.present()
        tags = tags_of(prefix, number, keys)
        found = _find_each([each.index for each in engines], tags)
        there = np.flatnonzero(found.owners >= 0)
        wanted = [keys[at] for at in there.tolist()]
        with self._pool.lock:
            if self._key_prefix != prefix:
                raise ProtocolError("the weights of this engine have changed meanwhile")
            given = self._pool.keep(number, wanted, len(wanted), None, tags[there])
            generations = self._pool.generation[given.slots]
        chosen = there[given.chosen]
        had = len(there) - len(given.chosen) - given.dropped
        copies = []
        for owner in np.unique(found.owners[chosen]).tolist():
            of = np.flatnonzero(found.owners[chosen] == owner)
            places = chosen[of]
            copy = SlotCopy(
                ticket=secrets.randbits(62),
                arenas=engines[owner].arenas,
                slots=found.slots[0, places],
                generations=found.generations[0, places],
                own_slots=given.slots[of],
                own_generations=generations[of],
                keys=header_keys(prefix, number, [keys[at] for at in places.tolist()]),
            )
            copies.append(copy)
        left, brought = len(copies), had

        def one_ended(copy: SlotCopy, copied: bool) -> None:
            nonlocal left, brought
            with self._pool.lock:
                (self._pool.filled if copied else self._pool.unfilled)(copy.own_slots)
                self._pool.let_go(copy.own_slots[::-1])
            left -= 1
            brought += len(copy.own_slots) if copied else 0
            if not left:
                ended(brought, len(there) - brought)

        if not copies:
            ended(brought, len(there) - brought)
        for copy in copies:
            self._neighbours.copy(copy, partial(one_ended, copy))

    def _numbered(self, keys: Sequence[list[bytes]]) -> Iterator[tuple[int, list[bytes]]]:
        """The slot groups of each group, with the keys."""
        for numbers, of_group in zip(self._slot_groups, keys, strict=True):
            for number in numbers:
                yield number, of_group

    def rename(self, key_prefix: bytes) -> None:
        """Give new blocks keys of this prefix. The blocks of now are not found any more."""
        self._key_prefix = key_prefix
        with self._pool.lock:
            self._pool.forget()  # without hand-offs nothing else calls it
            assert self._pool.listing is not None
            self._pool.listing.key_prefix = key_prefix

    def close(self) -> None:
        """Stop sharing, and close the index. Idempotent."""
        self._neighbours.close()
        self._own.index.close()


def _chosen(blocks: FilledBlocks, tags: Tags, chosen: Bools) -> tuple[FilledBlocks, Tags]:
    """Some of these blocks, and their tags. Most often they are all of them."""
    if chosen.all():
        return blocks, tags
    places = np.flatnonzero(chosen)
    return blocks.at(places), tags[..., places]


def _find_each(indexes: Sequence[BlockIndex | BlockIndexView], tags: Tags) -> FoundBlocks:
    """Look for blocks, each by itself.

    Args:
        indexes: of the engines that may have them.
        tags: of the blocks `(n,)`, or of all their shards `(shards, n)`. All shards of a block are
            found in one engine, or none is.
    """
    if tags.ndim == 1:
        owners, slots, generations = find_each(indexes, tags)
        return FoundBlocks(owners, slots[None], generations[None])
    whose, slots, generations = (
        np.array(each) for each in zip(*(find_each(indexes, of) for of in tags), strict=True)
    )
    owners = whose[0].copy()
    for place in np.flatnonzero((whose != owners).any(axis=0)).tolist():
        # The first engine that has one shard has not all.
        owners[place] = NOBODY
        for number, index in enumerate(indexes):
            found = [find_each([index], of[place : place + 1]) for of in tags]
            if all(owner[0] >= 0 for owner, _, _ in found):
                owners[place] = number
                slots[:, place] = [slot[0] for _, slot, _ in found]
                generations[:, place] = [generation[0] for _, _, generation in found]
                break
    return FoundBlocks(owners, slots, generations)


def _put(values: Ints, index: int, padding: int, value: Ints) -> Ints:
    """A copy of `values` `(..., n)` with `value` `(..., 1)` at an index, and padding before it
    where it is longer."""
    number = values.shape[-1]
    padded: Ints = np.full((*values.shape[:-1], max(number, index + 1)), padding, np.int64)
    padded[..., :number] = values
    padded[..., index] = value[..., 0]
    return padded


def _padded(found: Ints, wanted: Wanted, value: int) -> Ints:
    """`found` `(..., n)` for the blocks that are read; `value` for blocks of which nothing is
    known."""
    part = found[..., wanted.read.start : wanted.read.stop]
    lacking = len(wanted.read) - part.shape[-1]
    missing: Ints = np.full((*part.shape[:-1], lacking), value, np.int64)
    return np.concatenate([part, missing], axis=-1)


def touch(pool: SlotPool, slots: Ints, generations: Ints) -> None:
    """Count slots of a pool as used, if they have these generations. Any thread may call this."""
    with pool.lock:
        pool.touch(slots, generations)
