# SPDX-License-Identifier: Apache-2.0
"""The arenas of peers: attached without being in anybody's way, and let go of in time."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from omni_connector.copy.jobs import LoadSpec
from omni_connector.errors import PeerUnreachableError, SlotPendingError
from omni_connector.kv.spans import BlockSpans
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import WOKEN
from omni_connector.testing import FakeClock
from omni_connector.transports import Endpoint
from omni_connector.transports import peer_arenas as arenas_module
from omni_connector.transports.peer_arenas import PeerArenas
from omni_connector.transports.reading import (
    MAX_THREADS,
    THREADS_A_PEER,
    FetchAhead,
    PeerThreads,
)
from omni_connector.transports.shm import SharedMemoryTransport
from tests import inspection

from .harness import DEADLINE, HANDOFF, hand_off, prompt, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(90)


def mappings() -> int:
    """Mappings of arenas in this process, also their owners' own."""
    return Path("/proc/self/maps").read_text().count("omni-connector-arena")


def test_a_silent_peer_is_in_nobodys_way(engine, tokens, monkeypatch):
    prefill, silent = engine("kv_producer"), engine("kv_producer")
    decode = engine("kv_consumer")
    address = silent.worker_half.handshake.endpoints[0].address
    attach, ends = SharedMemoryTransport.attach, threading.Event()

    def slow(self, endpoint, *, timeout):
        if endpoint.address == address:
            ends.wait(DEADLINE)
            raise PeerUnreachableError("no answer")
        return attach(self, endpoint, timeout=timeout)

    monkeypatch.setattr(SharedMemoryTransport, "attach", slow)
    mute = prompt(60, seed=1)
    stuck = [
        decode.submit(mute, max_tokens=6, params=silent.generate(mute, params=HANDOFF).params)
        for _ in range(2)
    ]
    decode.step()
    assert hand_off_beside(prefill, decode) == tokens(PROMPT, 6)
    assert not decode.done(stuck[0])
    ends.set()
    decode.settle()
    assert [decode.answers[each].tokens for each in stuck] == [tokens(mute, 6)] * 2
    assert decode.failures() == {"peer_unreachable": 2}
    assert not decode.leftovers()


def hand_off_beside(prefill, decode) -> list[int]:
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    request_id = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(lambda: decode.done(request_id))
    return decode.answers[request_id].tokens


def test_the_arena_of_an_owner_that_has_gone_is_let_go_of(engine, tokens):
    """Nothing is asked of the decode engine meanwhile."""
    decode = engine("kv_consumer")
    before = mappings()
    for _ in range(2):
        prefill = engine("kv_producer", engine_id="p")
        assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
        assert mappings() == before + 2
        prefill.shutdown()
        wait(lambda: mappings() == before)
    assert not inspection.arenas_attached(decode.worker_half)


def test_an_owner_that_has_gone_is_kept_while_a_load_reads_it(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    held = decode.hold(loads=True)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    request_id = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(held.waiting.is_set)
    prefill.shutdown()
    time.sleep(2.5 * arenas_module.WATCH_S)
    assert inspection.arenas_attached(decode.worker_half)
    held.open()
    decode.run(lambda: decode.done(request_id))
    assert decode.answers[request_id].tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    wait(lambda: not inspection.arenas_attached(decode.worker_half))


def test_a_rank_without_an_endpoint_is_a_failed_load(engine, tokens, log):
    """No such thing is decoded; the thread does not end of it either."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    loader = inspection.loader(decode.worker_half)
    for arenas in ((), ((),)):
        spec = LoadSpec(
            request_id="r",
            blocks=BlockSpans.of([(0, [3])]),
            slots=BlockSpans.of([(0, [0])]),
            generations=np.array([1]),
            arenas=arenas,
            timeout=10.0,
        )
        with pytest.raises(StopIteration) as ended:
            next(loader.work(-1, spec, None)(lambda: False))
        outcome = ended.value.value
        assert outcome.failure in ("load_failed", "peer_refused")
        assert outcome.bad_block_ids == {3}
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)


class Arena:
    """An arena of a peer that closes when it is told."""

    def __init__(self) -> None:
        self.alive = True
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Transports:
    """Gives each address an arena, or an error."""

    def __init__(self, supports_mapping: bool = True) -> None:
        self.supports_mapping = supports_mapping
        self.made: list[Arena] = []
        self.error: Exception | None = None
        self.handed_on: list[Arena] = []

    def choose(self, endpoints):
        return self, endpoints[0]

    def attach(self, endpoint, *, timeout):
        if self.error is not None:
            raise self.error
        self.made.append(Arena())
        return self.made[-1]

    def hand_on(self, arena):
        self.handed_on.append(arena)
        return endpoint("here")

    def withdraw(self, endpoints):
        assert endpoints == endpoint("here")
        self.handed_on.pop()


class Here:
    """Makes a call at once, or when it is told."""

    def __init__(self) -> None:
        self.later: list | None = None

    def notify(self):
        """Nobody waits."""

    def submit(self, peer, call):
        if self.later is None:
            call()
        else:
            self.later.append(call)


def endpoint(address: str = "a", epoch: bytes = b"e") -> tuple[Endpoint, ...]:
    return (Endpoint(transport="t", address=address, epoch=epoch * 16, n_slots=1, slot_bytes=4096),)


class Kept:
    """`PeerArenas` in which nothing happens by itself."""

    def __init__(self, supports_mapping: bool = True) -> None:
        self.clock = FakeClock()
        self.transports = Transports(supports_mapping)
        self.threads = Here()
        context = EngineContext(self.clock)
        self.arenas = PeerArenas(self.transports, self.threads, context, 1e9)


@pytest.fixture
def keep():
    made: list[Kept] = []

    def make(supports_mapping: bool = True) -> Kept:
        made.append(Kept(supports_mapping))
        return made[-1]

    yield make
    for each in made:
        each.arenas.close()


def test_loads_share_an_arena_and_the_last_one_lets_go(keep):
    kept = keep()
    one, two = kept.arenas.open(), kept.arenas.open()
    arena = one.get(endpoint())
    assert two.get(endpoint()) is arena
    arena.alive = False
    one.close(failed=False)
    assert kept.arenas.let_go()
    assert not arena.closed
    two.close(failed=False)
    assert kept.arenas.let_go()
    kept.clock.advance(arenas_module.NOTICE_S)
    assert not kept.arenas.let_go()
    assert arena.closed == 1


def test_a_failed_load_does_not_close_what_another_reads(keep):
    kept = keep()
    loads = [kept.arenas.open() for _ in range(3)]
    (arena,) = {load.get(endpoint()) for load in loads}
    loads[0].close(failed=True)
    later = kept.arenas.open()
    assert later.get(endpoint()) is not arena
    loads[1].close(failed=False)
    assert not arena.closed  # the last load reads it
    loads[2].close(failed=False)
    assert arena.closed == 1
    later.close(failed=False)


def test_another_epoch_at_the_address_is_another_arena(keep):
    kept = keep()
    old, new = kept.arenas.open(), kept.arenas.open()
    first = old.get(endpoint())
    old.close(failed=False)
    assert new.get(endpoint(epoch=b"f")) is not first
    first.alive = False  # its owner was restarted
    kept.arenas.let_go()
    kept.clock.advance(arenas_module.NOTICE_S)
    kept.arenas.let_go()
    assert first.closed == 1


def test_an_arena_that_a_device_cannot_be_told_of_is_let_go_of(keep):
    kept = keep()
    kept.arenas._pins = object()

    def refuse(arena, pins):
        raise RuntimeError("this device has failed")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Arena, "pin_with", refuse, raising=False)
        load = kept.arenas.open()
        with pytest.raises(RuntimeError, match="this device has failed"):
            load.get(endpoint())
        load.close(failed=True)
    assert [arena.closed for arena in kept.transports.made] == [1]


@pytest.mark.parametrize("mapped", [True, False])
def test_an_idle_arena_is_kept_where_its_owners_end_will_tell(keep, mapped):
    kept = keep(supports_mapping=mapped)
    load = kept.arenas.open()
    arena = load.get(endpoint())
    load.close(failed=False)
    kept.clock.advance(arenas_module.IDLE_S)
    assert kept.arenas.let_go() is mapped
    assert bool(arena.closed) is not mapped


def test_an_orphan_is_read_and_handed_on_as_long_as_it_is_kept(keep):
    kept = keep()
    assert kept.arenas.attach_ahead(endpoint())
    (arena,) = kept.transports.made
    arena.alive = False
    kept.arenas.let_go()
    for _ in range(5):
        assert kept.arenas.keep(endpoint(), 60.0) == endpoint("here")
        kept.clock.advance(arenas_module.IDLE_S - 1)
        load = kept.arenas.open(waits=False)
        assert load.get(endpoint()) is arena
        load.close(failed=False)
        assert kept.arenas.let_go()
    assert kept.transports.handed_on == [arena]
    assert kept.arenas.keep(endpoint(), 0.5)
    kept.clock.advance(0.5)
    assert not kept.arenas.let_go()
    assert arena.closed == 1
    assert not kept.transports.handed_on
    assert kept.arenas.keep(endpoint(), 60.0) is None


def test_an_orphan_is_let_go_if_nobody_asks_for_it(keep):
    kept = keep()
    kept.arenas.attach_ahead(endpoint())
    (arena,) = kept.transports.made
    arena.alive = False
    assert kept.arenas.let_go()
    kept.clock.advance(arenas_module.NOTICE_S)
    assert not kept.arenas.let_go()
    assert arena.closed == 1


def test_an_arena_that_is_fetched_has_no_orphan(keep):
    kept = keep(supports_mapping=False)
    kept.arenas.attach_ahead(endpoint())
    assert kept.arenas.keep(endpoint(), 60.0) is None


def test_an_attempt_that_failed_is_made_again(keep):
    kept = keep()
    kept.transports.error = PeerUnreachableError("silent")
    kept.threads.later = []
    gone = kept.arenas.open()
    assert gone.get(endpoint()) is None
    gone.close(failed=False)  # cancelled before it was known
    kept.threads.later.pop()()
    kept.transports.error = None
    again = kept.arenas.open()
    assert again.get(endpoint()) is None
    kept.threads.later.pop()()
    assert again.get(endpoint()) is kept.transports.made[0]


def test_an_arena_that_comes_when_nobody_wants_it_is_closed(keep):
    kept = keep()
    kept.threads.later = []
    load = kept.arenas.open()
    assert load.get(endpoint()) is None
    load.close(failed=False)
    kept.arenas.close()
    kept.threads.later.pop()()
    assert kept.transports.made[0].closed == 1


def test_who_waits_is_notified_when_a_fetch_or_an_attempt_to_attach_has_ended(keep):
    told, ends, kept = threading.Semaphore(0), threading.Event(), keep()
    threads = PeerThreads(notify=told.release)
    slots: list = [object()]

    def fetch(step):
        ends.wait(DEADLINE)
        return slots

    ahead = FetchAhead(threads, "p", fetch, kept.clock)
    try:
        assert ahead.take(["a", "b"]) == WOKEN
        assert not told.acquire(blocking=False)
        ends.set()
        assert told.acquire(timeout=DEADLINE)
        assert ahead.take(["a", "b"]) is slots
        for _ in range(2):  # the other fetch, and the thread's call
            assert told.acquire(timeout=DEADLINE)
        kept.arenas._threads = threads
        load = kept.arenas.open()
        first = load.get(endpoint())
        assert told.acquire(timeout=DEADLINE)
        assert load.get(endpoint()) is kept.transports.made[0]
        assert first in (None, kept.transports.made[0])
        load.close(failed=False)
    finally:
        ends.set()
        threads.close()


def test_a_slot_that_is_not_published_is_fetched_again_after_a_pause(keep):
    clock, found = keep().clock, [SlotPendingError("a slot"), ["slots"]]

    def fetch(step):
        if isinstance(found[0], Exception):
            raise found.pop(0)
        return found[0]

    ahead = FetchAhead(Here(), "p", fetch, clock)
    pause = ahead.take(["a"])
    assert 0 < pause < 0.1
    assert 0 < ahead.take(["a"]) < 0.1
    clock.advance(2 * pause)
    assert ahead.take(["a"]) == ["slots"]


def test_a_peer_holds_up_its_own_calls_only():
    threads, ends = PeerThreads(), threading.Event()
    busy = threading.Semaphore(0)

    def hold() -> None:
        busy.release()
        ends.wait(3 * DEADLINE)  # longer than anybody waits for an answer

    silent = MAX_THREADS // THREADS_A_PEER - 1
    for peer in range(silent):
        for _ in range(2 * THREADS_A_PEER):
            threads.submit(f"silent {peer}", hold)
    for _ in range(silent * THREADS_A_PEER):
        assert busy.acquire(timeout=DEADLINE)
    assert not busy.acquire(blocking=False)
    answers: list[Future[int]] = [Future() for _ in range(20)]
    for number, answer in enumerate(answers):
        threads.submit("well", lambda n=number, a=answer: a.set_result(n))
    try:
        assert [answer.result(DEADLINE) for answer in answers] == list(range(20))
    finally:
        ends.set()
    for _ in range(silent * THREADS_A_PEER):  # those that had to wait
        assert busy.acquire(timeout=DEADLINE)
    threads.close()
    assert not any(thread.is_alive() for thread in threads._threads)


class Hand:
    """A thread whose turns the test makes."""

    def __init__(self, turn):
        self.turn = turn
        self.woken = 0

    def wake(self):
        self.woken += 1

    def join(self, timeout):
        pass


def test_a_call_wakes_one_thread_of_many():
    hands, made = [], []

    def start(name, turn):
        hands.append(Hand(turn))
        return hands[-1]

    threads = PeerThreads(start)
    for peer in range(16):
        threads.submit(f"peer {peer}", lambda n=peer: made.append(n))
    for hand in hands:
        while hand.turn() != WOKEN:
            pass
    assert len(hands) == 16
    assert sorted(made) == list(range(16))
    before = [hand.woken for hand in hands]
    for call in range(16, 20):  # as many as there are calls are woken, each once
        threads.submit("peer 3", lambda n=call: made.append(n))
    woken = [hand for hand, had in zip(hands, before, strict=True) if hand.woken > had]
    assert [sum(hand.woken for hand in hands) - sum(before), len(woken)] == [4, 4]
    for hand in woken:
        while hand.turn() != WOKEN:
            pass
    assert sorted(made) == list(range(20))
    assert len(hands) == 16
