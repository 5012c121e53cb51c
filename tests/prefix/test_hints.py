# SPDX-License-Identifier: Apache-2.0
"""Hints are read whatever they are, and what they ask keeps within its bounds."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_connector.arena.slot_pool import SlotPool
from omni_connector.config import ALL_HINTS, HintName
from omni_connector.prefix.hints import (
    MAX_PIN_S,
    NO_HINTS,
    Candidate,
    FilledBlocks,
    HintPolicy,
    Hints,
    read_hints,
    tenant_of,
    wrong_hint,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.testing.clock import FakeClock


class Counts:
    """Counts, and nothing else."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1) -> None:
        self.of[name] += amount

    def fail(self, kind: str, number: int = 1) -> None:
        raise AssertionError(f"hints fail nothing: {kind}, {number}")

    def time(self, name: str, seconds: float) -> None:
        raise AssertionError(f"hints time nothing: {name}, {seconds}")


@pytest.mark.parametrize(
    ("asked", "hints", "bad"),
    [
        ({"cache": "high", "pin_s": 600, "prefetch": True}, Hints("high", 600.0, True), 0),
        ({"cache": "no", "pin_s": 0, "prefetch": False}, Hints("no"), 0),
        ({"cache": "no", "prefetch": True}, Hints("no"), 1),
        ({"pin_s": MAX_PIN_S}, Hints(pin_s=MAX_PIN_S), 0),
        ({"pin_s": 2 * MAX_PIN_S, "cache": "high"}, Hints("high"), 1),
        ({"pin_s": "5"}, NO_HINTS, 1),
        ({"pin_s": 10**400}, NO_HINTS, 1),
        ({"pin_s": float("inf")}, NO_HINTS, 1),
        ({"pin_s": True}, NO_HINTS, 1),
        ({"cache": None, "prefetch": "yes", "\ud800": 1}, NO_HINTS, 3),
        ({5: 6}, NO_HINTS, 1),
        ([], NO_HINTS, 1),
    ],
)
def test_of_hints_those_that_fit_are_followed(asked: object, hints: Hints, bad: int) -> None:
    assert read_hints({"omni": asked}) == (hints, bad)


@pytest.mark.parametrize(
    ("xargs", "params", "hints", "bad"),
    [
        (None, {}, NO_HINTS, 0),
        ({"session_id": 5, "kv_transfer_params": {}, 7: 8}, {}, NO_HINTS, 0),
        (
            {"omni_cache": "high", "omni_pin_s": 600, "omni_prefetch": 1},
            {},
            Hints("high", 600.0, True),
            0,
        ),
        ({"omni_pin_s": "600", "omni_prefetch": "0"}, {}, Hints(pin_s=600.0), 0),
        ({"omni_pin_s": [600], "omni_prefetch": 2, "omni_": 1}, {}, NO_HINTS, 3),
        ({"omni_pin_s": 5, "omni_cache": "high"}, {"pin_s": 6}, Hints("high", 6.0), 0),
        ({"omni_cache": "no"}, {"pin_s": 6}, Hints("no"), 1),
        ({"omni_thinking": "keep"}, {}, Hints(thinking="keep"), 0),
        ({"omni_thinking": "keep"}, {"thinking": "drop"}, Hints(thinking="drop"), 0),
        ({"omni_thinking": 1}, {"thinking": None}, NO_HINTS, 1),
        ({f"omni_{number}": number for number in range(1000)}, {"pin_s": 6}, Hints(pin_s=6.0), 1),
    ],
)
def test_hints_in_xargs_count_where_the_params_say_nothing(
    xargs: dict[object, object] | None, params: dict[str, object], hints: Hints, bad: int
) -> None:
    assert read_hints({"omni": params}, xargs) == (hints, bad)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=6,
)
NAMES = (
    st.sampled_from(["cache", "pin_s", "prefetch", "thinking"])
    | st.text(max_size=5)
    | st.integers()
)


ASKED = st.dictionaries(NAMES, ANYTHING, max_size=20)


@given(ASKED | ANYTHING, ASKED)
def test_whatever_is_asked_is_read(asked: object, xargs: dict[object, object]) -> None:
    hints, bad = read_hints({"omni": asked}, {f"omni_{name}": xargs[name] for name in xargs})
    assert 0 <= hints.pin_s <= MAX_PIN_S
    assert 0 <= bad <= 33


@given(ASKED | ANYTHING, ASKED)
def test_each_wrong_hint_is_told_of(asked: object, xargs: dict[object, object]) -> None:
    named = {f"omni_{name}": xargs[name] for name in xargs}
    _, bad = read_hints({"omni": asked}, named)
    told = wrong_hint({"omni": asked}, named)
    contradict = read_hints({"omni": asked}, named)[0] == Hints("no")
    assert (told is not None) == (bad > 0) or (contradict and told is None)


@pytest.mark.parametrize(
    ("params", "xargs", "told"),
    [
        ({"cach": "no"}, {}, "unknown hint 'cach'; did you mean 'cache'?"),
        ({}, {"omni_pinn_s": 5}, "unknown hint 'pinn_s'; did you mean 'pin_s'?"),
        ({"cache": "never"}, {}, "hint cache: Invalid enum value 'never'"),
        ([], {}, "omni must be an object of hints, not list"),
    ],
)
def test_a_wrong_hint_is_named(params: object, xargs: dict[str, object], told: str) -> None:
    assert (wrong_hint({"omni": params}, xargs) or "").startswith(told)


def test_tenants_differ_by_their_salt() -> None:
    salts = (None, "", "a", "b", "\ud800")
    assert len({tenant_of(salt) for salt in salts}) == len(salts)
    assert tenant_of("a") == tenant_of("a")


def test_salts_that_are_not_listed_are_one_tenant_with_those_who_have_none() -> None:
    listed = ("a", "b")
    assert len({tenant_of(salt, listed) for salt in (*listed, None)}) == 3
    assert {tenant_of(salt, listed) for salt in ("c", "", "\ud800", "*")} == {tenant_of(None)}
    assert tenant_of("a", listed) == tenant_of("a")
    assert {tenant_of(salt, ()) for salt in ("a", "b", None)} == {tenant_of(None)}


@pytest.mark.parametrize(
    ("asked", "names", "followed", "refused"),
    [
        (Hints("high", 5.0, True), ALL_HINTS, Hints("high", 5.0, True), 0),
        (Hints("high", 5.0, True), ("no", "prefetch"), Hints(prefetch=True), 2),
        (Hints("no"), ("no", "prefetch"), Hints("no"), 0),
        (Hints("no"), ("high",), NO_HINTS, 1),
        (Hints("high", 5.0, True), (), NO_HINTS, 3),
        (Hints("high", 5.0), ("pin_s",), Hints(pin_s=5.0), 1),
        (NO_HINTS, (), NO_HINTS, 0),
    ],
)
def test_of_hints_those_are_followed_that_the_operator_allows(
    asked: Hints, names: tuple[HintName, ...], followed: Hints, refused: int
) -> None:
    assert asked.allowed(names) == (followed, refused)


def grant(policy: HintPolicy, hints: Hints, tenant: int, keys: list[bytes]) -> None:
    """Follow the hints of one request."""
    blocks = [Candidate(0, key, 1, tenant=tenant, hints=hints) for key in keys]
    policy.grant(0, FilledBlocks.of(blocks))


class HintMachine(RuleBasedStateMachine):
    """Keeping, hand-offs, hints, time, resets, in any order: bounds hold, and nothing is lost."""

    SLOTS = 12

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.pool = SlotPool(self.SLOTS)
        self.policy = HintPolicy(self.pool, EngineContext(self.clock), 0.5, 0.5)
        self.saves: list[np.ndarray] = []
        self.handoffs: list[np.ndarray] = []
        self.until: dict[int, float] = {}  # when the pin of each pinned slot ends

    tenants = st.sampled_from([1, 2, 3])

    @staticmethod
    def keys(tenant: int, first: int, count: int) -> list[bytes]:
        return [b"%d/%d" % (tenant, i) for i in range(first, first + count)]

    @rule(tenant=tenants, first=st.integers(0, 9), count=st.integers(1, 9), most=st.integers(0, 9))
    def keep(self, tenant: int, first: int, count: int, most: int) -> None:
        keys = self.keys(tenant, first, count)
        lacking = count - len(self.pool.find(0, keys))
        chosen, slots, over_quota, dropped, beyond = self.pool.keep(0, keys, most, tenant)
        assert len(chosen) == len(slots) <= most
        assert len(chosen) == lacking - over_quota - dropped
        assert len(beyond) <= min(max(0, lacking - most), dropped, self.pool._num_available)
        assert len(slots) + len(beyond) <= 6  # its quota
        assert not self.pool.find(0, [keys[i] for i in beyond]).size
        if len(slots):
            self.saves.append(slots)

    @rule(tenant=tenants, first=st.integers(0, 9), count=st.integers(1, 9))
    def take(self, tenant: int, first: int, count: int) -> None:
        keys = self.keys(tenant, first, count)
        pinned = self.pool._order.pinned.copy()
        taken = self.pool.take([keys], [0])
        if taken is None:
            return
        slots = taken[0][0]
        lacks = self.pool.lacks(slots)
        assert not pinned[slots[lacks]].any(), "a pinned slot was given to another block"
        self.pool.fill(0, [keys[i] for i in np.flatnonzero(lacks)], slots[lacks])
        self.pool.filled(slots[lacks])
        self.handoffs.append(slots)

    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        if self.saves:
            slots = self.saves.pop(data.draw(st.integers(0, len(self.saves) - 1)))
            (self.pool.filled if well else self.pool.unfilled)(slots)
            self.pool.let_go(slots[::-1])
        if self.handoffs:
            slots = self.handoffs.pop(data.draw(st.integers(0, len(self.handoffs) - 1)))
            self.pool.let_go(slots[::-1])

    @rule(
        tenant=tenants,
        first=st.integers(0, 9),
        count=st.integers(1, 9),
        cache=st.sampled_from(["normal", "high"]),
        pin_s=st.sampled_from([0, 5, 50]),
    )
    def grant(self, tenant: int, first: int, count: int, cache: str, pin_s: float) -> None:
        before = self.pool._order.pinned.copy()
        keys = self.keys(tenant, first, count)
        grant(self.policy, Hints(cache, pin_s), tenant, keys)
        for slot in np.flatnonzero(self.pool._order.pinned & ~before).tolist():
            self.until[slot] = 0.0
        for slot in self.pool.find(0, keys).tolist() if pin_s else ():
            if self.pool._order.pinned[slot]:
                self.until[slot] = max(self.until[slot], self.clock() + pin_s)

    @rule(seconds=st.sampled_from([1, 10, 100]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        pinned = np.flatnonzero(self.pool._order.pinned).tolist()
        self.pool.end_pins(self.clock())
        stay = [slot for slot in pinned if self.until[slot] > self.clock()]
        assert np.flatnonzero(self.pool._order.pinned).tolist() == stay

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert not self.pool._order.pinned.any()

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        order = pool._order
        cached = order.here(np.arange(self.SLOTS))
        assert pool.num_cached == np.count_nonzero(cached)
        assert pool.num_pinned == np.count_nonzero(cached & order.pinned)
        assert pool.counts() == (pool._num_free, pool.num_cached, pool.num_pinned)
        assert self.SLOTS - sum(pool.counts()[:2]) == np.count_nonzero(pool._users)
        owners = Counter(tenant for tenant in pool._tenant.tolist() if tenant)
        assert owners == pool._kept_of
        free = pool._free[: pool._num_free]
        assert not pool._tenant[free].any()
        assert not order.pinned[free].any()
        assert not order._favoured[free].any()

    @invariant()
    def bounds_hold(self) -> None:
        order = self.pool._order
        for tenant in (1, 2, 3):
            every = np.arange(self.SLOTS)
            privileged = order._favoured | order.pinned
            assert self.pool.privileged(every).tolist() == privileged.tolist()
            assert self.pool.num_privileged == np.count_nonzero(privileged) <= 6
            of_tenant = np.count_nonzero(privileged & (self.pool._tenant == tenant))
            assert self.pool.privileged_of(tenant) == of_tenant <= 3
            assert self.pool._kept_of[tenant] <= 6

    def teardown(self) -> None:
        for slots in self.saves:
            self.pool.unfilled(slots)
        for slots in (*self.saves, *self.handoffs):
            self.pool.let_go(slots[::-1])
        self.pool.end_pins(float("inf"))
        free, cached, pinned = self.pool.counts()
        assert (free + cached, pinned) == (self.SLOTS, 0)
        self.pool.forget()
        assert not self.pool._kept_of
        assert self.pool._num_free == self.SLOTS


TestHintPolicy = HintMachine.TestCase
TestHintPolicy.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("pins", "stays"), [([50, 5], True), ([5, 50], True), ([5, 5], False), ([10], False)]
)
def test_of_two_pins_the_one_that_ends_later_counts(pins: list[float], stays: bool) -> None:
    clock, pool = FakeClock(), SlotPool(4)
    policy = HintPolicy(pool, EngineContext(clock), 0.5, 1.0)
    slots = pool.keep(0, [b"a"], 1, tenant=1).slots
    pool.filled(slots)
    pool.let_go(slots)
    for seconds in pins:
        grant(policy, Hints(pin_s=seconds), 1, [b"a"])
    clock.advance(10)
    pool.end_pins(clock())
    assert pool.pinned(slots).all() == stays


@pytest.mark.parametrize("quota", [0, 3])
def test_of_a_tenant_beyond_its_quota_what_was_used_longest_ago_goes(quota: int) -> None:
    pool = SlotPool(10)
    pool.quota = quota
    for number in range(5):
        _, slots, over_quota, *_ = pool.keep(0, [b"%d" % number], 1, tenant=1)
        assert over_quota == (not quota)
        pool.filled(slots)
        pool.let_go(slots)
    there = [len(pool.find(0, [b"%d" % number])) for number in range(5)]
    assert there == [0, 0, *[quota // 3] * 3]
    assert pool.keep(0, [b"other", b"one"], 2, tenant=2).over_quota == max(0, 2 - quota)


def test_a_tenant_that_holds_its_quota_keeps_no_more() -> None:
    pool = SlotPool(10)
    pool.quota = 2
    pool.keep(0, [b"a", b"b"], 2, tenant=1)
    kept = pool.keep(0, [b"c"], 1, tenant=1)
    assert (len(kept.chosen), kept.over_quota) == (0, 1)


def test_where_a_tenant_may_have_all_slots_nothing_is_over_its_quota() -> None:
    pool = SlotPool(4)
    HintPolicy(pool, EngineContext(FakeClock()), 0.5, 1.0)
    pool.keep(0, [b"a", b"b", b"c", b"d"], 4, tenant=1)  # being copied
    kept = pool.keep(0, [b"e"], 1, tenant=1)
    assert (len(kept.chosen), kept.over_quota, kept.dropped) == (0, 0, 1)


def test_what_is_not_kept_anyway_takes_no_slot_from_its_tenant() -> None:
    pool = SlotPool(10)
    pool.quota = 2
    slots = pool.keep(0, [b"a", b"b"], 2, tenant=1).slots
    pool.filled(slots)
    pool.let_go(slots)
    kept = pool.keep(0, [b"c", b"d"], 0, tenant=1)
    assert (len(kept.chosen), kept.over_quota, kept.dropped) == (0, 0, 2)
    assert len(pool.find(0, [b"a", b"b"])) == 2


def test_pinned_slots_of_a_hand_off_are_within_the_quota_of_their_tenant() -> None:
    pool = SlotPool(8)
    policy = HintPolicy(pool, EngineContext(FakeClock()), 1.0, 0.5)
    cached = pool.keep(0, [b"a", b"b"], 2, tenant=1).slots
    pool.filled(cached)
    pool.let_go(cached)
    pool.keep(0, [b"busy"], 1, tenant=1)
    keys = [b"c", b"d", b"e", b"f"]
    taken = pool.take([keys], [0])
    assert taken is not None
    pool.fill(0, keys, taken[0][0])
    grant(policy, Hints(pin_s=5), 1, keys)
    assert pool._kept_of[1] == 4
    assert pool.pinned(taken[0][0]).tolist() == [True, True, True, False]
    assert not len(pool.find(0, [b"a", b"b"]))


def full(pool: SlotPool, *prompts: list[bytes]) -> None:
    """Keep these prompts, one after the other."""
    for keys in prompts:
        slots = pool.keep(0, keys, len(keys)).slots
        pool.filled(slots)
        pool.let_go(slots[::-1])


@pytest.mark.parametrize("asked", [Hints("high"), Hints(pin_s=5), NO_HINTS])
def test_the_end_of_a_prompt_goes_first_whatever_is_asked_for_it(asked: Hints) -> None:
    clock, pool = FakeClock(), SlotPool(12)
    keys = [b"%d" % number for number in range(6)]
    full(pool, keys)
    grant(HintPolicy(pool, EngineContext(clock), 1.0, 1.0), asked, 1, keys)
    clock.advance(10)
    pool.end_pins(clock())
    others = iter(range(100))
    while len(there := pool.find(0, keys)) == 6:
        full(pool, [b"other %d" % next(others)])
    assert there.tolist() == pool.find(0, keys[: len(there)]).tolist()


def test_what_is_asked_to_stay_longer_takes_no_more_than_the_part_for_pins() -> None:
    """Clients choose their hints: those of one must leave the others' blocks alone."""
    clock, counts = FakeClock(), Counts()
    pool = SlotPool(64)
    policy = HintPolicy(pool, EngineContext(clock, stats=counts), 0.25, 1.0)
    honest = [[b"honest %d" % n] for n in range(16)]
    full(pool, *honest)
    for number in range(8):
        keys = [b"%d/%d" % (number, block) for block in range(8)]
        full(pool, keys)
        grant(policy, Hints("high"), 1, keys)
        for prompt in honest:  # they are used again all the while
            slots = pool.find(0, prompt)
            pool.touch(slots, pool.generation[slots])
    assert sum(len(pool.find(0, keys)) for keys in honest) == 16
    assert pool.num_privileged == 16
    assert counts.of == {"high_refused": 48}
    grant(policy, Hints(pin_s=5), 1, honest[0])
    assert counts.of["pins_refused"] == 1


def test_what_is_favoured_gives_its_part_back_when_it_is_evicted() -> None:
    counts = Counts()
    pool = SlotPool(8)
    policy = HintPolicy(pool, EngineContext(FakeClock(), stats=counts), 0.25, 1.0)
    full(pool, [b"a", b"b"])
    grant(policy, Hints("high"), 1, [b"a", b"b"])
    full(pool, *([b"%d" % number] for number in range(100)))
    assert not len(pool.find(0, [b"a", b"b"]))
    assert (pool.num_privileged, pool.privileged_of(1)) == (0, 0)
    grant(policy, Hints("high"), 2, [b"99", b"98"])
    assert (pool.num_privileged, counts.of) == (2, {})


def test_pins_of_many_times_are_looked_at_a_few_times_a_second() -> None:
    """Whatever times clients choose, pins end at few moments."""
    clock = FakeClock()
    pool = SlotPool(256)
    policy = HintPolicy(pool, EngineContext(clock), 1.0, 1.0)
    keys = [b"%d" % number for number in range(256)]
    full(pool, keys)
    for number, key in enumerate(keys):
        grant(policy, Hints(pin_s=1 + number / 256), 1, [key])
    ends = []
    for _ in range(2048):
        before = pool.num_pinned
        pool.end_pins(clock())
        if pool.num_pinned < before:
            ends.append(clock())
        clock.advance(1 / 512)
    assert pool.num_pinned == 0
    assert len(ends) <= 6
    assert all(later - earlier >= 0.24 for earlier, later in pairwise(ends))


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from([NO_HINTS, Hints("high"), Hints(pin_s=5), Hints("high", 9.0)]),
        st.lists(st.integers(0, 11), max_size=4, unique=True),
    ),
    max_size=4,
)


@given(REQUESTS, st.sampled_from([0.25, 0.5, 1.0]))
def test_hints_of_many_requests_are_followed_as_if_one_by_one(
    asked: list[tuple[int, Hints, list[int]]], pin_part: float
) -> None:
    def told(together: bool) -> object:
        pool, clock = SlotPool(10), FakeClock()
        policy = HintPolicy(pool, EngineContext(clock), pin_part, 1.0)
        for number in range(8):
            slots = pool.keep(0, [b"%d" % number], 1, tenant=1 + number % 3).slots
            pool.filled(slots)
            pool.let_go(slots)
        requests: list[list[Candidate]] = []
        seen: set[int] = set()  # no block is named twice
        for tenant, hints, keys in asked:
            new = [each for each in keys if each not in seen]
            seen.update(new)
            requests.append(
                [Candidate(0, b"%d" % key, 1, tenant=tenant, hints=hints) for key in new]
            )
        for blocks in [list(chain(*requests))] if together else requests:
            policy.grant(0, FilledBlocks.of(blocks))
        slots = np.arange(10)
        ends = pool._pinned_until * pool.pinned(slots)
        return pool.privileged(slots).tolist(), ends.tolist(), pool.num_privileged

    assert told(together=True) == told(together=False)
