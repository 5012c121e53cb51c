# SPDX-License-Identifier: Apache-2.0
"""What must hold of hints after each step of an engine.

The model follows requests from outside: by the hashes that vLLM computes of their tokens, and by
how many of these have been computed. It compares that with the headers of the slots that the
engine's index lists, and with which slots the engine says to be pinned.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from omni_connector.arena import slot_pool
from omni_connector.handoff.prompt import Prompt
from tests import inspection
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.hints import NO_WISH, Wish
from tests.simulation.surroundings.world import Violation

# Bytes in the header of a slot: first of the group's name, then of the block's hash.
_GROUP_BYTES: Final = 8
_HASH_BYTES: Final = 24


@dataclass
class Wishes:
    """What the requests of all engines have asked.

    Args:
        looked_at: whether there are any; nothing is looked at where there are none.

    Attributes:
        given: the wish of each request that has one, by id.
        handed: requests that are handed off, and whose blocks are kept whatever they say.
        wanted: hashes of blocks that some request lets the engines keep.
    """

    looked_at: bool
    given: dict[str, Wish] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)
    wanted: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class _Pin:
    """A block that an engine has pinned.

    Attributes:
        tag: of the block, in the engine's index.
        until: when the pin ends.
        of_sessions: by session, when the pin ends that it has asked for last, and the number of the
            request that did.
        listed: whether the index has listed the block since.
    """

    tag: int
    until: float = 0.0
    of_sessions: dict[str, tuple[float, int]] = field(default_factory=dict)
    listed: bool = False

    @property
    def end(self) -> float:
        """When nobody wants the block to be pinned any more."""
        return max(self.until, *(until for until, _ in self.of_sessions.values()), 0.0)


def nothing_useless_is_stored(half: Any, stored: Iterable[str]) -> None:
    """Check that the store holds no block that nobody but its engine can find.

    Args:
        half: the scheduler half of an engine.
        stored: keys of the shared store.

    Raises:
        Violation: it holds one.
    """
    own = inspection.prefix_of_nobody_else(half)
    if own is not None and any(own in key for key in stored):
        raise Violation("store_flushed", "a block is stored that no other engine can find")


class Promises:
    """Looks at how one engine follows hints.

    Args:
        engine: it.
        wishes: of the requests of all engines.
        copies_fail: whether a copy may fail or be cancelled, with which the pins of its blocks
            end.
    """

    def __init__(self, engine: SimulatedEngine, wishes: Wishes, *, copies_fail: bool) -> None:
        self._engine = engine
        self._wishes = wishes
        self._copies_fail = copies_fail
        self._beginnings: tuple[bytes, ...] = ()
        self._filled: Counter[tuple[str, int]] = Counter()  # blocks of each request and group
        self._looked_at: Counter[tuple[str, int]] = Counter()  # of these, by the engine
        self._running: dict[str, Any] = {}  # requests as of the step before, by id
        self._went_on: set[str] = set()  # requests that a reset has come in between
        self._asked: set[int] = set()  # tags of blocks to be pinned, of these weights
        self._pinned: set[int] = set()  # tags of pinned blocks
        self._pins_before: set[int] = set()  # slots that were pinned after the step before
        self._pins: dict[bytes, _Pin] = {}  # by what is in the header of the slot
        self._seen: Mapping[int, bytes] = {}
        self._resets: object = None
        # Blocks that wait until earlier copies have ended: whose they are, of which group, since
        # when, and whether blocks were dropped meanwhile. One of these may wait for another request
        # alone, and be pinned for this one at once.
        self._late: list[tuple[str, Wish, int, list[bytes], float, bool]] = []
        # Requests of sessions by their place among all, and of each session that of the newest that
        # has ended.
        self._counted = itertools.count()
        self._numbers: dict[str, int] = {}
        self._newest: dict[str, int] = {}

    def look(self, half: Any, names: Mapping[int, bytes], stored: Iterable[str]) -> None:
        """Look at a scheduler half that has just built a step.

        Args:
            names: the keys in the headers of the slots that its index lists, by slot.
            stored: keys of the shared store.

        Raises:
            Violation: a hint was not followed.
        """
        added, self._engine.added = self._engine.added, {}
        if not (self._wishes.looked_at and inspection.shares_prefixes(half)):
            return
        hosts = inspection.shares(half)
        if hosts:
            self._notice_reset(half)
            slots = inspection.pinned(half)
            self._pinned = set(inspection.tags(half)[slots].tolist())
        now = self._engine.world.now
        late, self._late = self._late, []
        for request_id, wish, g, keys, since, dropped in late:
            self._asks(half, request_id, wish, g, keys, since, dropped=dropped)
        requests = self._engine.scheduler.requests
        self._running = added | self._running  # some have come and gone since
        ended = [each for name, each in self._running.items() if name not in requests]
        for request_id in [*added, *requests]:
            if request_id not in self._numbers:
                self._numbers[request_id] = next(self._counted)
        self._running = dict(requests)
        for request in ended:
            self._ends(half, request, hosts)
        for request_id in self._engine.latest:
            request = self._engine.scheduler.requests.get(request_id)
            if request is None:
                continue
            wish = self._wish(request)
            for _, keys in self._newly_filled(half, request):
                self._remember(request, wish, keys)
            for end in inspection.prompt_ends(half, request):
                self._remember(request, wish, inspection.tail(half, request, end))
            if hosts and (wish.prefetch or wish.pin_s):
                for g, keys in self._newly_looked_at(half, request, wish):
                    self._asks(half, request_id, wish, g, keys, now)
        self._nothing_unwanted(names, stored)
        if hosts:
            self._pins_stay(set(names.values()), now)
            self._bounds_hold(half)
            self._copies_hold_few(half)
            self._pins_before = set(inspection.pinned(half).tolist())

    def _notice_reset(self, half: Any) -> None:
        if not inspection.weights_known(half):
            # Nothing is kept meanwhile, and of requests that could not wait nothing at all.
            self._went_on |= set(self._engine.latest)
        beginnings, resets = inspection.key_beginnings(half), inspection.resets(half)
        if beginnings != self._beginnings or resets != self._resets:
            if beginnings != self._beginnings:
                self._asked.clear()  # else what is pinned may be still
            self._beginnings, self._resets = beginnings, resets
            self._went_on |= self._engine.scheduler.requests.keys()
            self._filled.clear()  # they may be filled anew, for other weights
            self._looked_at.clear()
            self._late.clear()
            self._pins.clear()
            self._pinned.clear()

    def _ends(self, half: Any, request: Any, hosts: bool) -> None:
        """A request has ended, with which the engine may keep what has filled since the step before
        its last one."""
        wish = self._wish(request)
        number = self._numbers.pop(request.request_id, None)
        if wish.session and number is not None:
            self._newest[wish.session] = max(number, self._newest.get(wish.session, 0))
            for pin in self._pins.values():
                _, asked_by = pin.of_sessions.get(wish.session, (0.0, 0))
                if asked_by < self._newest[wish.session] + wish.over:
                    pin.of_sessions.pop(wish.session, None)
        for _, keys in self._newly_filled(half, request):
            self._remember(request, wish, keys)
        self._remember(request, wish, inspection.tail(half, request, request.num_computed_tokens))
        if hosts and wish.pin_s:
            for g, keys in _up_to(_filled(half, request), self._looked_at, half, request):
                self._asked.update(inspection.tags_of_blocks(half, g, keys).ravel().tolist())

    def _wish(self, request: Any) -> Wish:
        wish = self._wishes.given.get(request.request_id, NO_WISH)
        if not wish.session:
            return wish
        return replace(wish, session=f"{request.cache_salt}/{wish.session}")

    def _newly_filled(self, half: Any, request: Any) -> Iterable[tuple[int, list[bytes]]]:
        return _up_to(_filled(half, request), self._filled, half, request)

    def _newly_looked_at(
        self, half: Any, request: Any, wish: Wish
    ) -> Iterable[tuple[int, list[bytes]]]:
        """The blocks that the engine has looked at in this step, of those that the request has.

        A request that begins with a prefix has no blocks before its window, and most blocks of
        recurrent states hold none. Another request may have them, and asks for itself alone.
        """
        looked_at = inspection.looked_at(half, request.request_id)
        tables = self._engine.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        for g, keys in _up_to(looked_at, self._looked_at, half, request):
            if inspection.keeps_all(half, g):
                yield g, keys
                continue
            end = self._looked_at[request.request_id, g]
            table = tables[inspection.group_id(half, g)][end - len(keys) : end]
            pairs = list(zip(keys, table, strict=False))  # fewer of one that was preempted since
            if self._engine.shape.drafts and wish.pin_s:
                # A state may be kept whose block vLLM has freed since.
                freed = [key for key, block in pairs if block.is_null]
                self._asked.update(inspection.tags_of_blocks(half, g, freed).ravel().tolist())
            yield g, [key for key, block in pairs if block.block_hash is not None]

    def _remember(self, request: Any, wish: Wish, keys: list[bytes]) -> None:
        if wish.keeps or request.request_id in self._wishes.handed:
            self._wishes.wanted.update(key[:_HASH_BYTES] for key in keys)

    def _asks(
        self,
        half: Any,
        request_id: str,
        wish: Wish,
        group: int,
        keys: list[bytes],
        since: float,
        *,
        dropped: bool | None = None,
    ) -> None:
        """A request wants these blocks, which the step fills, to be kept here, or pinned: now, or
        when it is their turn. If vLLM has lost one by then, it is dropped. Another request may have
        filled it anew in the same step, and does not ask for a pin.

        Args:
            since: when it has asked for them.
            dropped: of blocks that have waited, whether any were dropped meanwhile.
        """
        if wish.pin_s:
            self._asked.update(inspection.tags_of_blocks(half, group, keys).ravel().tolist())
        if request_id in self._went_on:  # which of its blocks are kept is not known here
            return
        waiting = inspection.waiting(half)
        excused = bool(dropped) or inspection.counted(half, "blocks_dropped") > 0
        if late := [key for key in keys if (group, key) in waiting]:
            # What a hand-off copies is not copied again, and goes if that ends before the copy.
            copied = any(inspection.in_arena(half, group, key) for key in late)
            self._late.append((request_id, wish, group, late, since, excused or copied))
            keys = [key for key in keys if (group, key) not in waiting]
        tags = inspection.tags_of_blocks(half, group, keys)[0].tolist()
        whole = inspection.keeps_all(half, group)
        here = [inspection.in_arena(half, group, key) for key in keys]
        if whole and not all(here) and not dropped and self._evicts_nothing(half):
            raise Violation(
                "hint_ignored",
                f"{self._engine.name} does not keep blocks of {request_id}",
            )
        if not wish.pin_s:
            return
        refused = 0
        for key, tag, kept in zip(keys, tags, here, strict=True):
            if tag not in self._pinned:
                refused += whole and kept and not (excused and dropped is not None)
            elif not dropped:  # else it may be pinned for another request alone
                beginning = self._beginnings[inspection.first_number(half, group)]
                name = beginning + key[:_HASH_BYTES]
                pin = self._pins.setdefault(name, _Pin(tag))
                if not wish.session:
                    pin.until = max(pin.until, since + wish.pin_s)
                elif request_id in self._numbers:  # else a newer one may have ended meanwhile
                    pin.of_sessions[wish.session] = since + wish.pin_s, self._numbers[request_id]
        # The control thread may have ended pins since these were refused.
        pinned = self._pins_before | set(inspection.pinned(half).tolist())
        if refused and len(pinned) < inspection.num_slots(half) // slot_pool.PIN_PART:
            raise Violation(
                "hint_ignored",
                f"{self._engine.name} does not pin {refused} blocks of {request_id}, "
                "although they are in its arena, and there is room",
            )

    def _evicts_nothing(self, half: Any) -> bool:
        """Whether all blocks that a step has filled have had room, and took it from no other."""
        return inspection.free_slots(half) > 0 and not inspection.counted(half, "blocks_dropped")

    def _nothing_unwanted(self, names: Mapping[int, bytes], stored: Iterable[str]) -> None:
        for slot, name in names.items():
            if self._seen.get(slot) != name and name[_GROUP_BYTES:] not in self._wishes.wanted:
                raise Violation(
                    "hint_ignored",
                    f"{self._engine.name} lists a block that no request lets it keep",
                )
        self._seen = names
        for key in stored:
            if bytes.fromhex(key.rsplit("/", 1)[1])[:_HASH_BYTES] not in self._wishes.wanted:
                raise Violation("hint_ignored", "a block is stored that no request lets be stored")

    def _pins_stay(self, listed: set[bytes], now: float) -> None:
        name = self._engine.name
        if not self._pinned <= self._asked:
            raise Violation("hint_ignored", f"{name} pins what no request wants to be pinned")
        for key, pin in list(self._pins.items()):
            if pin.end <= now:
                del self._pins[key]
            elif key in listed:
                pin.listed = True
            elif pin.listed:
                raise Violation("pin_broken", f"{name} has evicted a block before its pin ended")
            elif pin.tag not in self._pinned:
                if not self._copies_fail:
                    raise Violation("pin_broken", f"{name} pins a block no more, which is copied")
                del self._pins[key]

    def _bounds_hold(self, half: Any) -> None:
        if (pinned := len(inspection.pinned(half))) > inspection.num_slots(
            half
        ) // slot_pool.PIN_PART:
            raise Violation("beyond_bounds", f"{self._engine.name} has {pinned} pinned slots")

    def _copies_hold_few(self, half: Any) -> None:
        most = self._engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks // 4
        if (held := inspection.being_kept(half)[1]) > max(1, most):
            raise Violation("beyond_bounds", f"copies of {self._engine.name} hold {held} blocks")


def _filled(half: Any, request: Any) -> list[int]:
    """How many blocks of a request are full, by group."""
    return [request.num_computed_tokens // size for size, _ in inspection.block_sizes(half)]


def _up_to(
    ends: Sequence[int], passed: Counter[tuple[str, int]], half: Any, request: Any
) -> Iterable[tuple[int, list[bytes]]]:
    """The group and keys of a request's blocks before these ends that have not passed yet."""
    for g, (end, (_, step)) in enumerate(zip(ends, inspection.block_sizes(half), strict=True)):
        if not step:  # no block of this group is kept
            continue
        first = passed[request.request_id, g]
        last = min(end, len(request.block_hashes) // step)
        if last > first:
            passed[request.request_id, g] = last
            hashes = request.block_hashes[(first + 1) * step - 1 : last * step : step]
            yield g, [bytes(each) for each in hashes]


def arena_is_free(half: Any) -> bool:
    """Whether all slots of an engine at rest can be taken for one hand-off, and nothing is pinned,
    or counted as pinned, then. Takes the place of what is cached."""
    directory = inspection.directory(half)
    if directory is None:
        return True
    if inspection.num_pins(half) or len(inspection.pinned(half)):
        return False
    prompt = Prompt(token_ids=(0,), num_tokens=1)
    # Blocks of a group whose slots may lie anywhere.
    groups = inspection.compatibility(half).slot_groups
    number = next(n for n, each in enumerate(groups) if each.stripe is None)
    keys: list[list[None]] = [[] for _ in groups]
    keys[number] = [None] * directory.num_slots
    handoff = directory.open(prompt, keys)
    if handoff is None or len(np.unique(handoff.held)) < directory.num_slots:
        return False
    directory.close(handoff.token)
    return True
