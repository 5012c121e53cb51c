# SPDX-License-Identifier: Apache-2.0
"""Blocks in the arenas of this host: which engine has them, what is loaded, and what is kept.

A look-up reads the own index and those of the neighbours, in the call that asks. Nothing is leased:
a block may go before it is read, which its generation and its key then tell the reader.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.block_index import BlockIndex, Tags, find_prefix, tags_of
from omni_connector.arena.format import header_keys
from omni_connector.arena.slot_index import Ints
from omni_connector.arena.slot_pool import NONE, Bools, SlotPool
from omni_connector.config import Admission
from omni_connector.copy.prefix_jobs import HostLoadSpec, KeepSpec
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.prefix.attaching import Arenas
from omni_connector.prefix.hints import Candidate, HintPolicy
from omni_connector.prefix.neighbours import Neighbour, Neighbours
from omni_connector.runtime.stats import Stats

NOBODY: Final = -1

# Saves under way may take at most one in so many slots, so that hand-offs have room.
_BUSY_PART: Final = 2

MAX_IN_ORDER: Final = 4096
"""So many blocks of a group, the first of a request, are put into their order when it is over."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundBlocks:
    """Where the blocks of one group of a prompt are, from the first on.

    Attributes:
        owners: position of the engine that has each block, in `Found.engines`; `NOBODY`.
        slots, generations: of each block. All int64 (blocks,); nothing is known of later blocks.
    """

    owners: Ints
    slots: Ints
    generations: Ints

    @property
    def there(self) -> list[bool]:
        """Whether each block is in some arena."""
        there: list[bool] = (self.owners >= 0).tolist()
        return there


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the engines of this host have of a prompt.

    Attributes:
        engines: those that were asked.
        groups: one entry for each group.
    """

    engines: Sequence[Neighbour]
    groups: Sequence[FoundBlocks]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Consecutive blocks of one group that a request has, to be filled.

    Attributes:
        first: logical index of the first of them.
        block_ids: `(n,)`.
        read: indices of those that later tokens read; those before are zeroed.
        hashes: of the blocks in `read`.
    """

    first: int
    block_ids: Ints
    read: range
    hashes: list[bytes]

    @property
    def begin(self) -> int:
        """How many come before those that are read."""
        return self.read.start - self.first

    @property
    def copied(self) -> NDArray[np.bool_]:
        """Which of those that are read are to be filled."""
        copied: NDArray[np.bool_] = self.block_ids[self.begin :] != NULL_BLOCK_ID
        return copied

    def only(self, part: NDArray[np.bool_]) -> "Wanted":
        """The same with null blocks for all but these, so that they are not copied."""
        return replace(self, block_ids=np.where(part, self.block_ids, NULL_BLOCK_ID))


class HostBlocks:
    """The scheduler half's view of the arenas of this host.

    Args:
        pool: the slots of this engine's arenas, with a listing.
        index: the own one.
        arenas: the own ones.
        neighbours: the other engines; closed with this.
        groups: what this engine keeps.
        key_prefix: what the keys of this engine's blocks have in common.
        load_timeout: seconds for the bytes.
        hint_policy: follows hints in the own arena.
        admission: which new blocks are kept.
        stats: counts blocks that are not kept.

    Attributes:
        keeping: the jobs under way that save blocks, by number.
    """

    def __init__(
        self,
        *,
        pool: SlotPool,
        index: BlockIndex,
        arenas: Arenas,
        neighbours: Neighbours,
        groups: tuple[GroupShape, ...],
        key_prefix: bytes,
        load_timeout: float,
        hint_policy: HintPolicy,
        admission: Admission,
        stats: Stats,
    ) -> None:
        self._pool = pool
        self._hint_policy = hint_policy
        self._admission: Final = admission
        self._stats = stats
        self._own = Neighbour(index, arenas, own=True)
        self._neighbours = neighbours
        # Where a group keeps all tokens, a prefix ends at the first block that is missing.
        self._whole = [shape.attention_type == "all" for shape in groups]
        self._key_prefix = key_prefix
        self._load_timeout = load_timeout
        self._max_busy = max(1, len(pool.generation) // _BUSY_PART)
        self._block_sizes = [shape.block_size for shape in groups]
        self.keeping: dict[int, KeepSpec] = {}
        # Of requests that are over: the jobs that may keep blocks of theirs, and the tags of all of
        # these, those of the last tokens first.
        self._over: list[tuple[set[int], Tags]] = []

    def find(self, hashes: Sequence[list[bytes]]) -> Found:
        """Look for the blocks of a prompt.

        Args:
            hashes: of its full blocks, from the first on, one list for each group.
        """
        engines = (self._own, *self._neighbours.present())
        groups = [
            self._find_group(engines, g, of_group, whole)
            for g, (of_group, whole) in enumerate(zip(hashes, self._whole, strict=True))
        ]
        return Found(engines, groups)

    def _find_group(
        self, engines: Sequence[Neighbour], group: int, hashes: list[bytes], whole: bool
    ) -> FoundBlocks:
        if not hashes:
            return FoundBlocks(NONE, NONE, NONE)
        tags = tags_of(self._key_prefix, group, hashes)
        if whole:
            return FoundBlocks(*find_prefix([each.index for each in engines], tags))
        owners, slots, generations = np.full((3, len(tags)), NOBODY, np.int64)
        for number, engine in enumerate(engines):
            lacking = np.flatnonzero(owners == NOBODY)
            if not lacking.size:
                break
            found, theirs = engine.index.find(tags[lacking])
            here = found >= 0
            owners[lacking[here]] = number
            slots[lacking], generations[lacking] = found, theirs
        return FoundBlocks(owners, slots, generations)

    def loads(
        self, request_id: str, found: Found, wanted: Sequence[Wanted]
    ) -> tuple[list[tuple[HostLoadSpec, bool]], list[Wanted]]:
        """The jobs that fill the blocks which engines of this host have, one for each engine.

        Returns:
            The jobs, each with whether this engine itself has the blocks; and what is left, with
            null blocks for those that the jobs fill.
        """
        owners = [
            _padded(of.owners, each, NOBODY) for each, of in zip(wanted, found.groups, strict=True)
        ]
        loading = np.unique(np.concatenate([NONE, *owners]))
        loading = loading[loading >= 0].tolist()
        # Whoever fills any block zeroes those that nobody reads.
        filler = loading[0] if loading else NOBODY
        whose = [
            np.concatenate([np.full(each.begin, filler), of])
            for each, of in zip(wanted, owners, strict=True)
        ]
        specs = []
        for number in loading:
            parts = [each.only(of == number) for each, of in zip(wanted, whose, strict=True)]
            spec = self._load(request_id, found, number, parts)
            specs.append((spec, found.engines[number].own))
        left = [each.only(of == NOBODY) for each, of in zip(wanted, whose, strict=True)]
        return specs, left

    def _load(
        self, request_id: str, found: Found, number: int, parts: Sequence[Wanted]
    ) -> HostLoadSpec:
        slots = [
            np.where(part.copied, _padded(of.slots, part, 0), 0)
            for part, of in zip(parts, found.groups, strict=True)
        ]
        generations = [
            _padded(of.generations, part, 0) for part, of in zip(parts, found.groups, strict=True)
        ]
        keys = [
            key
            for g, part in enumerate(parts)
            for key in header_keys(self._key_prefix, g, part.hashes)
        ]
        engine = found.engines[number]
        read = np.concatenate([part.copied for part in parts])
        used, since = np.concatenate(slots), np.concatenate(generations)
        self._hit(engine, used[read], since[read])
        return HostLoadSpec(
            request_id=request_id,
            blocks=BlockSpans.of([(part.first, part.block_ids) for part in parts]),
            slots=BlockSpans.of(
                [(part.read.start, of) for part, of in zip(parts, slots, strict=True)]
            ),
            generations=since,
            keys=np.array(keys, dtype=object),
            arenas=engine.arenas,
            timeout=self._load_timeout,
        )

    def avoid(self, load: HostLoadSpec) -> None:
        """The engine that a load was to read does not answer."""
        self._neighbours.avoid(load.arenas)

    def _hit(self, engine: Neighbour, slots: Ints, generations: Ints) -> None:
        # The beginning of a prompt goes last.
        slots, generations = slots[::-1], generations[::-1]
        if engine.own:
            touch(self._pool, slots, generations)
        else:
            self._neighbours.hit(engine, slots, generations)

    def room(self, most: int) -> int:
        """How many blocks can be saved now, of so many that may be."""
        busy = sum(len(spec.slots) for spec in self.keeping.values())
        return max(0, min(most, self._max_busy - busy))

    def keep(
        self, filled: Sequence[Candidate], most: int, later: int
    ) -> tuple[KeepSpec | None, int, list[Candidate]]:
        """The job that saves blocks which no arena of this host has. Who starts it enters it into
        `keeping`, and `kept` ends it.

        Args:
            filled: full blocks, each hash of a group once. Those that vLLM has lost are null.
            most: how many may be saved.
            later: how many more may wait for the end of copies, of those that are asked for.

        Returns:
            The job, None where none has to be saved; how many are not, for lack of room; and those
            that wait, whose hints have yet to be followed.
        """
        groups: list[tuple[int, list[int]]] = [(0, []) for _ in self._whole]
        slots: list[Ints] = []
        keys: list[bytes] = []
        dropped, waiting = 0, list[Candidate]()
        most = self.room(most)
        of_groups = [[c for c in filled if c.group == g] for g in range(len(self._whole))]
        lacking = [self._lacking(g, each) for g, each in enumerate(of_groups)]
        for g, candidates in enumerate(of_groups):
            kept: list[Candidate] = []
            there = [each for each in lacking[g] if each.block_id != NULL_BLOCK_ID]
            dropped += len(lacking[g]) - len(there)
            for theirs in self._by_quota(there):
                tenants = np.array([each.tenant for each in theirs], np.int64)
                prompts = np.array([each.prompt for each in theirs], np.int64)
                with self._pool.lock:
                    given = self._pool.keep(g, _hashes(theirs), most, tenants, prompts)
                if given.over_quota:
                    self._stats.count("blocks_over_quota", given.over_quota)
                asked = [c for i in given.beyond.tolist() if (c := theirs[i]).hints.keeps_here]
                asked = asked[: max(0, later - len(waiting))]
                waiting += asked
                dropped += given.dropped - len(asked)
                most -= len(given.slots)
                kept += [theirs[i] for i in given.chosen.tolist()]
                slots.append(given.slots)
            wait = set(waiting)
            now = [each for each in candidates if each not in wait]
            for (tenant, hints), run in groupby(now, key=attrgetter("tenant", "hints")):
                self._hint_policy.grant(hints, tenant, g, _hashes(run))
            groups[g] = 0, [each.block_id for each in kept]
            keys += header_keys(self._key_prefix, g, _hashes(kept))
        numbers = np.concatenate([NONE, *slots])
        if not numbers.size:
            return None, dropped, waiting
        with self._pool.lock:
            generations = self._pool.generation[numbers]
        blocks = BlockSpans.of(groups)
        spec = KeepSpec(blocks=blocks, slots=numbers, generations=generations, keys=keys)
        return spec, dropped, waiting

    def _by_quota(self, candidates: list[Candidate]) -> list[list[Candidate]]:
        """In parts that are kept as a whole: one for each tenant where tenants have quotas."""
        if self._pool.quota is None:
            return [candidates] if candidates else []
        return [list(run) for _, run in groupby(candidates, key=attrgetter("tenant"))]

    def lacks(self, group: int, hashes: list[bytes], *, here: Bools | bool) -> Bools:
        """Which of these blocks no engine's index has. Those that one has count as used, so that
        they do not go for what continues them.

        Args:
            here: which must be in the own index.
        """
        tags = tags_of(self._key_prefix, group, hashes)
        lacks = np.ones(len(tags), bool)
        asked: Ints = np.arange(len(tags))
        for engine in (self._own, *self._neighbours.present()):
            slots, generations = engine.index.find(tags[asked])
            found = slots >= 0
            if found.any():
                self._hit(engine, slots[found], generations[found])
            lacks[asked[found]] = False
            asked = np.flatnonzero(lacks & np.logical_not(here))
            if not asked.size:
                break
        return lacks

    def _lacking(self, group: int, filled: list[Candidate]) -> list[Candidate]:
        """Those of these blocks that no engine has and that are worth a slot, by tenant; some must
        be in the own arena."""
        if not filled:
            return []
        filled = sorted(filled, key=attrgetter("tenant"))
        here = np.array([each.hints.keeps_here for each in filled])
        lacks = self.lacks(group, _hashes(filled), here=here)
        lacks[lacks] = self._admits(group, [c for c, new in zip(filled, lacks, strict=True) if new])
        return [each for each, lacking in zip(filled, lacks.tolist(), strict=True) if lacking]

    def _admits(self, group: int, new: list[Candidate]) -> Bools:
        """Which of these blocks, which no engine has, are worth a slot, or are asked for."""
        admitted = np.array([each.hints.asks_arena for each in new], bool)
        others = [each for each in new if not each.hints.asks_arena]
        with self._pool.lock:
            prompts = np.array([each.prompt for each in others], np.int64)
            admitted[~admitted] = self._pool.admits(
                group, _hashes(others), self._admission, prompts
            )
        self._stats.count("blocks_passed_over", int(np.count_nonzero(~admitted)))
        return admitted

    def kept(self, job_id: int, failure: str | None) -> None:
        """A job has ended, in whatever way."""
        spec = self.keeping.pop(job_id)
        with self._pool.lock:
            if failure is None:
                self._pool.filled(spec.slots)
            else:
                self._pool.unfilled(spec.slots)
            self._pool.let_go(spec.slots[::-1])
        self._put_in_order()

    def finished(self, hashes: Sequence[list[bytes]]) -> None:
        """A request is over whose blocks were kept job by job and group by group. So they
        would be evicted, too; once the jobs have ended, the beginning goes last.

        Args:
            hashes: of its first blocks, `MAX_IN_ORDER` at most, one list for each group.
        """
        tags = [tags_of(self._key_prefix, g, of_group) for g, of_group in enumerate(hashes)]
        pairs = zip(tags, self._block_sizes, strict=True)
        ends = np.concatenate([size * np.arange(1, len(each) + 1) for each, size in pairs])
        last_first = np.argsort(-ends, kind="stable")
        self._over.append((set(self.keeping), np.concatenate(tags)[last_first]))
        self._put_in_order()

    def _put_in_order(self) -> None:
        waiting = []
        for jobs, tags in self._over:
            if jobs & self.keeping.keys():
                waiting.append((jobs, tags))
                continue
            slots, generations = self._own.index.find(tags)
            found = slots >= 0
            with self._pool.lock:
                self._pool.requeue(slots[found], generations[found])
        self._over = waiting

    def evicted(self, group: int, key: bytes) -> bool:
        """Whether this block was evicted lately from the own arena."""
        with self._pool.lock:
            return self._pool.evicted_lately(group, key)

    def rename(self, key_prefix: bytes) -> None:
        """From now on the engine's blocks have keys of this prefix; those of now are not found."""
        self._key_prefix = key_prefix
        with self._pool.lock:
            self._pool.forget()  # where nothing is handed off, nobody else does
            assert self._pool.listing is not None
            self._pool.listing.key_prefix = key_prefix

    def close(self) -> None:
        """Be no neighbour any more, and let go of the index. Idempotent."""
        self._neighbours.close()
        self._own.index.close()


def _hashes(candidates: Iterable[Candidate]) -> list[bytes]:
    return [each.block_hash for each in candidates]


def _padded(found: Ints, wanted: Wanted, value: int) -> Ints:
    """What was found of the blocks that are read; `value` where nothing is known."""
    part = found[wanted.read.start : wanted.read.stop]
    missing: Ints = np.full(len(wanted.read) - len(part), value, np.int64)
    return np.concatenate([part, missing])


def touch(pool: SlotPool, slots: Ints, generations: Ints) -> None:
    """Slots of a pool are read, in these generations. Any thread may call this."""
    with pool.lock:
        pool.touch(slots, generations)
