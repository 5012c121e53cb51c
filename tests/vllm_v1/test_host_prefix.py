# SPDX-License-Identifier: Apache-2.0
"""Engines of one host find each other's prefixes: every answer is that of an engine alone."""

import contextlib
import dataclasses
import gc
import os
import threading
import weakref

import pytest

from omni_connector.arena import eviction
from omni_connector.errors import PeerUnreachableError
from omni_connector.prefix import neighbours as module
from omni_connector.prefix.neighbours import HostNeighbours
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.transports import peer_arenas
from omni_connector.transports.shm import SharedMemoryTransport
from omni_connector.vllm_v1 import scheduler as scheduler_module
from tests import inspection
from tests.simulation import check
from tests.toy import BLOCK
from tests.toy import FAMILIES as GROUPS

from .harness import DEADLINE, HANDOFF, assert_clean, prompt, slots, sockets, wait
from .stores import MASTER, PREFIX, QUESTION, landed

pytestmark = pytest.mark.vllm

FAMILIES = [
    "full",
    "window",
    "window and full",
    "latent",
    "state and full",
    "all three",
    "ring and full",
    "all and a ring",
]
SHARE = {"share": True}
GONE = PeerUnreachableError("it is not attached")


@pytest.fixture
def sharer(engine):
    """Makes engines that share their prefixes; each has met the engines before it."""
    made = []

    def make(role="kv_both", extra=None, **options):
        made.append(engine(role, extra={**SHARE, **(extra or {})}, **options))
        for each in made:
            wait(lambda each=each: len(neighbours(each).present()) == len(made) - 1)
            each._before = check.sizes(each)
        return made[-1]

    return make


def neighbours(engine):
    found = inspection.neighbours(engine.half)
    found.look()
    return found


def publish(engine, tokens=PREFIX, **options):
    """Have an engine compute a prompt; its answer, once all blocks are in the arena."""
    answer = engine.generate(tokens, **options)
    assert_clean(engine)
    return answer


def kept(engine):
    """How many blocks the index of an engine lists."""
    return inspection.indexed(engine.half)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_a_prefix_is_found_in_the_arena_of_another_engine(sharer, engine, family, ranks, overlap):
    options = {"family": family, "ranks": ranks, "async_scheduling": overlap}
    first, second = sharer(**options), sharer(**options)
    first.generate(PREFIX)
    expected = engine(family=family, ranks=ranks).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_bytes_that_nobody_checks_are_noticed_by_these_tests(
    sharer, engine, monkeypatch, family
):
    inspection.compare_nothing(monkeypatch.setattr)
    first, second = sharer(family=family), sharer(family=family)
    publish(first)
    first.arena().slots[:] ^= 0x10
    answer = second.generate(QUESTION, 6)
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert answer.tokens != engine(family=family).generate(QUESTION, 6).tokens


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.values
def test_wrong_bytes_are_computed_here(sharer, engine, family, policy):
    options = {"family": family, "policy": policy}
    first, second = sharer(**options), sharer(**options)
    publish(first)
    first.arena().slots[2:] ^= 0x10
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert second.generate(QUESTION, 6).tokens == expected
    assert set(second.failures()) == {"checksum_mismatch"}
    assert_clean(first, second)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_an_engine_of_any_role_shares(sharer, tokens, role):
    first, second = sharer(role), sharer(role)
    publish(first)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_from_host") == 6 * BLOCK


@pytest.mark.parametrize(
    ("length", "shared"),
    [(7, 0), (BLOCK, 0), (BLOCK + 1, 1), (3 * BLOCK + 7, 3), (6 * BLOCK - 1, 5), (6 * BLOCK, 5)],
)
def test_of_a_prompt_that_is_there_the_last_token_is_computed(sharer, tokens, length, shared):
    first, second = sharer(), sharer()
    publish(first)
    assert second.generate(PREFIX[:length], 4).tokens == tokens(PREFIX[:length], 4)
    assert second.count("tokens_from_host") == shared * BLOCK


def test_new_blocks_are_kept_only_where_some_are_used_again(sharer, tokens):
    first, second = sharer(extra=slots(16)), sharer()
    for seed in range(1, 12):  # the first 32 blocks are kept in any case
        publish(first, prompt(4 * BLOCK, seed=seed))
    assert first.count("blocks_passed_over") == 3 * 4
    assert second.generate([*prompt(4 * BLOCK, seed=10), 5], 4).tokens == tokens(
        [*prompt(4 * BLOCK, seed=10), 5], 4
    )
    assert not second.count("tokens_from_host")
    publish(first, prompt(4 * BLOCK, seed=11))
    assert second.generate([*prompt(4 * BLOCK, seed=11), 5], 4).tokens == tokens(
        [*prompt(4 * BLOCK, seed=11), 5], 4
    )
    assert second.count("tokens_from_host") == 4 * BLOCK
    assert_clean(first, second)


@pytest.mark.parametrize("hint", [{"pin_s": 5}, {"prefetch": True}])
def test_new_blocks_that_are_asked_for_are_kept(sharer, hint):
    alone = sharer(extra=slots(16))
    for seed in range(1, 12):  # the first 32 blocks are kept in any case
        publish(alone, prompt(4 * BLOCK, seed=seed))
    passed_over, saved = alone.count("blocks_passed_over"), alone.count("blocks_saved")
    assert (passed_over, saved) == (3 * 4, 8 * 4)
    publish(alone, prompt(4 * BLOCK, seed=12), params={"omni": hint})
    assert alone.count("blocks_passed_over") == passed_over
    assert alone.count("blocks_saved") == saved + 4


def test_an_engine_gets_back_what_its_own_cache_has_evicted(sharer, tokens):
    alone = sharer(usable_blocks=10)
    publish(alone)
    for seed in range(3):
        publish(alone, prompt(8 * BLOCK, seed=seed))
    assert alone.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert alone.count("tokens_kept") >= 2 * BLOCK
    assert_clean(alone)


def make_room(engine, but):
    """Have other blocks take all slots that are free or cached but so many, and fail."""
    pool = inspection.pool(engine.half)
    with pool.lock:
        number = sum(pool.counts()[:2]) - but
        slots = pool.keep(0, [b"%032d" % each for each in range(number)], number).slots
        pool.unfilled(slots)
        pool.let_go(slots)


def test_of_a_prompt_that_is_still_answered_the_end_is_evicted_first(sharer):
    alone = sharer(usable_blocks=256, instant_copies=True)
    request_id = alone.submit(prompt(8 * BLOCK), max_tokens=200)
    alone.run(lambda: alone.usage[1] >= 8)
    assert not alone.done(request_id)
    make_room(alone, but=5)
    hashes = alone.scheduler.requests[request_id].block_hashes[:8]
    there = [inspection.in_arena(alone.half, 0, each) for each in hashes]
    assert there == [True] * 5 + [False] * 3
    alone.abort(request_id)


@pytest.mark.parametrize("family", ["full", "latent", "window and full", "state and full"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.values
def test_of_prompts_that_are_evicted_the_ends_go_first_in_however_many_steps(sharer, family, steps):
    blocks, prompts = 8, 4
    sizes = {"long_prefill": blocks // steps * BLOCK, "max_tokens_a_step": 1024}
    first = sharer(usable_blocks=256, family=family, instant_copies=True, **sizes)
    asked = [prompt(blocks * BLOCK, seed=seed) for seed in range(prompts)]
    requests = [first.submit(each) for each in asked]
    first.run(lambda: first.done(*requests))
    assert_clean(first)
    cached = first.usage[1]
    make_room(first, but=cached - cached // prompts)  # as many go as one of them has
    second = sharer(usable_blocks=256, family=family)
    for each in asked:
        publish(second, [*each, 7])
    assert second.count("tokens_from_host") >= (prompts - 1) * blocks * BLOCK


def test_blocks_come_from_several_arenas_and_the_tail_from_the_store(sharer, shelf, tokens):
    first, second = sharer(), sharer()
    publish(first, PREFIX[: 2 * BLOCK])
    publish(second, PREFIX[: 4 * BLOCK])
    assert second.count("tokens_from_host") == 2 * BLOCK
    third = sharer(extra=MASTER)
    publish(third)
    landed(third)
    inspection.pool(third.half).forget()
    fourth = sharer(extra=MASTER)
    assert fourth.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert fourth.count("tokens_from_host") == 4 * BLOCK
    assert fourth.count("tokens_shared") == 2 * BLOCK


def test_what_an_arena_of_the_host_has_is_not_kept_again(sharer):
    first, second = sharer(), sharer()
    publish(first)
    publish(second)
    publish(second, QUESTION)
    publish(first)
    assert (kept(first), kept(second)) == (6, 0)


def test_answers_are_shared_like_prompts(sharer, tokens):
    first, second = sharer(), sharer()
    reply = publish(first, QUESTION, max_tokens=3 * BLOCK).tokens
    again = QUESTION + reply + prompt(9, seed=2)
    assert second.generate(again, 6).tokens == tokens(again, 6)
    shared = (len(QUESTION) + len(reply) - 1) // BLOCK * BLOCK
    assert second.count("tokens_from_host") == shared


def test_another_salt_finds_nothing(sharer):
    first, second = sharer(), sharer()
    publish(first, PREFIX, salt="a")
    second.generate(QUESTION, 6, salt="b")
    second.generate(QUESTION, 6)
    assert second.count("tokens_from_host") == 0
    second.generate(PREFIX, 6, salt="a")
    assert second.count("tokens_from_host") == 5 * BLOCK


def test_hits_of_neighbours_are_told(sharer):
    first, second = sharer(extra=slots(8)), sharer()
    publish(first, PREFIX[: 4 * BLOCK])
    publish(first, prompt(4 * BLOCK, seed=1))
    publish(second, [*PREFIX[: 4 * BLOCK], 7])  # the older blocks are the last used ones now
    neighbours(second)
    wait(lambda: inspection.used_again(first.half))
    publish(first, prompt(4 * BLOCK, seed=2))
    third = sharer()
    publish(third, [*PREFIX[: 4 * BLOCK], 8])
    assert third.count("tokens_from_host") == 4 * BLOCK


def test_what_an_engine_had_is_found_after_its_end_by_others_and_its_successor(
    sharer, engine, tokens
):
    first, second = sharer(), sharer()
    publish(first)
    first.shutdown()
    wait(lambda: [each.orphan for each in neighbours(second).present()] == [True])
    successor = engine("kv_both", extra=SHARE)
    wait(lambda: any(each.orphan for each in neighbours(successor).present()))
    for each in (second, successor):
        assert each.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
        assert each.count("tokens_from_host") > 0
        assert not each.failures()
    # Orphans go, so what was read of one is kept.
    wait(lambda: kept(second) > 0)
    second.shutdown()
    assert successor.generate(QUESTION[:-1], 6).tokens == tokens(QUESTION[:-1], 6)
    assert not successor.failures()


@pytest.fixture
def short_of_memory(sharer, monkeypatch):
    """Engines keep no orphans: the host has no memory for them."""
    monkeypatch.setattr(peer_arenas, "NOTICE_S", 0.0)
    monkeypatch.setattr(module, "available_bytes", lambda: 0)


def test_an_engine_that_has_died_is_no_neighbour_any_more(sharer, tokens, short_of_memory):
    first, second = sharer(), sharer()
    publish(first)
    first.shutdown()
    wait(lambda: not neighbours(second).present())
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_from_host") == 0
    assert not second.failures()


def test_an_engine_that_closes_while_a_request_waits_lets_go_of_the_indexes_of_others(sharer):
    first, second = sharer(), sharer(usable_blocks=10)
    publish(first)
    [neighbour] = neighbours(second).present()
    index = weakref.ref(neighbour.index)
    del neighbour
    running = second.submit(prompt(5 * BLOCK, seed=9), max_tokens=3 * BLOCK)
    second.run(lambda: second.answers[running].tokens)
    waiting = second.submit(QUESTION)  # there is no room for it beside the other one
    second.run(lambda: inspection.offers_shared(second.half, waiting))
    second.shutdown()
    gc.collect()
    assert index() is None


def test_an_engine_whose_arena_is_gone_costs_computing(sharer, tokens, short_of_memory):
    first, second = sharer(), sharer()
    publish(first)
    present = neighbours(second).present()
    first.shutdown()
    inspection.know_neighbours(second.half, present)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert set(second.failures()) == {"peer_unreachable"}
    assert_clean(second)


@pytest.mark.parametrize("wrong", ["slot", "bytes"])
def test_an_arena_stays_attached_where_only_a_slot_was_another_or_wrong(sharer, tokens, wrong):
    first, second = sharer(extra=slots(12)), sharer()
    publish(first)
    attached = []
    attach = SharedMemoryTransport.attach
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SharedMemoryTransport,
            "attach",
            lambda self, endpoint, **how: attached.append(1) or attach(self, endpoint, **how),
        )
        patch.setattr(eviction, "LEAST", 1 << 20)  # no new block is passed over
        held = second.hold(loads=True)
        request_id = second.submit(QUESTION, max_tokens=6)
        second.step()
        if wrong == "bytes":
            first.arena().slots[:] ^= 0x10
        else:
            # Enough to evict even blocks that a neighbour has told it reads.
            for seed in range(8):
                publish(first, prompt(4 * BLOCK, seed=seed))
        held.open()
        second.run(lambda: second.done(request_id))
        assert second.answers[request_id].tokens == tokens(QUESTION, 6)
        assert sum(second.failures().values()) == 1
        other = prompt(4 * BLOCK, seed=9)
        publish(first, other)
        publish(second, [*other, 7])
        assert second.count("tokens_from_host") == 4 * BLOCK
    assert not attached, "it was attached when the engines met"


def test_an_engine_whose_arena_is_not_attached_delays_no_request(
    sharer, engine, tokens, monkeypatch
):
    """It is stopped, for one: its blocks are computed, until it goes on."""
    first = sharer()
    publish(first)
    address = first.worker_half.handshake.endpoints[0].address
    attach, goes_on = SharedMemoryTransport.attach, threading.Event()

    def slow(self, endpoint, *, timeout):
        if endpoint.address == address:
            goes_on.wait(10 * DEADLINE)
        return attach(self, endpoint, timeout=timeout)

    monkeypatch.setattr(SharedMemoryTransport, "attach", slow)
    second = engine("kv_both", extra=SHARE)
    wait(lambda: not neighbours(second).present() and neighbours(second)._met)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_from_host") == 0
    assert not second.failures()
    assert kept(second) == 6, "what nobody else can read is kept here, too"
    goes_on.set()
    wait(lambda: neighbours(second).present())
    other = prompt(4 * BLOCK, seed=9)
    publish(first, other)
    assert second.generate([*other, 7], 6).tokens == tokens([*other, 7], 6)
    assert second.count("tokens_from_host") == 4 * BLOCK


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_neighbour_counts_once_every_rank_has_attached_it(engine, monkeypatch, ranks):
    first = engine("kv_both", extra=SHARE, ranks=ranks)
    last = first.workers[-1].get_handshake_metadata().endpoints[0].address
    attach, goes_on = SharedMemoryTransport.attach, threading.Event()

    def slow(self, endpoint, *, timeout):
        if endpoint.address == last:
            goes_on.wait(10 * DEADLINE)
        return attach(self, endpoint, timeout=timeout)

    monkeypatch.setattr(SharedMemoryTransport, "attach", slow)
    second = engine("kv_both", extra=SHARE, ranks=ranks)
    wait(lambda: neighbours(second)._met)
    for worker in second.workers[:-1]:
        wait(lambda half=worker._worker: ready(half, first) == 1)
    for _ in range(3):
        assert not neighbours(second).present()
    goes_on.set()
    wait(lambda: len(neighbours(second).present()) == 1)


def ready(half, owner):
    """How many arenas of an engine a rank has attached."""
    endpoints = [each.get_handshake_metadata().endpoints[0] for each in owner.workers]
    return inspection.attached(half, endpoints)


def test_an_engine_that_a_load_could_not_read_is_left_out_for_30_seconds(sharer, monkeypatch):
    first, second = sharer(), sharer()
    publish(first)
    found = neighbours(second)
    now = [found._clock()]
    monkeypatch.setattr(found, "_clock", lambda: now[0])
    began = now[0]
    for half in map(inspection.worker_half, second.workers):  # it is attached no more, for once
        monkeypatch.setattr(
            inspection.peer_arenas(half), "take_attached", lambda _: (_ for _ in ()).throw(GONE)
        )
    second.generate(QUESTION)
    second.settle()
    assert second.failures() == {"peer_unreachable": 1}
    assert kept(second) == 6, "what only an avoided engine has is kept here, too"
    monkeypatch.undo()
    monkeypatch.setattr(found, "_clock", lambda: now[0])
    now[0] = began + 29.99
    assert not neighbours(second).present()
    now[0] = began + 30.0
    assert neighbours(second).present()
    other = prompt(4 * BLOCK, seed=1)
    publish(first, other)
    publish(second, [*other, 7])
    assert second.count("tokens_from_host") == 4 * BLOCK
    found.avoid(found.present()[0].arenas)
    assert not neighbours(second).present()
    for name in list(found._met):  # its connection has ended, and it is met again
        found._met.pop(name).close()
    found.look()  # it is met, and its arenas are asked for
    wait(lambda: neighbours(second).present())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_own_arena_is_read_though_nobody_can_attach_it(sharer, tokens, runtime, ranks):
    """The runtime folder was removed, for one."""
    alone = sharer(ranks=ranks, usable_blocks=16)
    publish(alone)
    for path in sockets(runtime):
        os.unlink(path)
    for seed in range(10, 14):  # vLLM's own cache evicts some of it
        publish(alone, prompt(4 * BLOCK, seed=seed))
    assert publish(alone, QUESTION, max_tokens=6).tokens == tokens(QUESTION, 6)
    assert alone.count("tokens_kept") >= BLOCK
    assert not alone.failures()


def test_what_is_kept_already_takes_no_room_from_what_is_new(sharer):
    alone = sharer(usable_blocks=48)
    first = prompt(12 * BLOCK)
    publish(alone, first)
    publish(alone, first + prompt(5 * BLOCK, seed=1))
    assert kept(alone) == 17
    assert alone.count("blocks_dropped") == 0


def test_an_engine_of_another_model_is_told_of_once(sharer, monkeypatch):
    told = []
    monkeypatch.setattr(module.logger, "log", lambda level, *text: told.append(text))
    found = neighbours(sharer())
    ours = found._local_engine
    traits = {**ours.traits, "dtype": "float8"}
    other = dataclasses.replace(ours, engine_id="another", readers=b"x" * 16, traits=traits)
    with contextlib.closing(HostNeighbours(other, PROCESS_CONTEXT)):
        for _ in range(3):
            found._not_before.clear()
            found.look()
        assert not found.present()
        (why,) = [each[2] for each in told if each[1] == "engine another"]
        assert str(why).startswith("it has another dtype: 'float8', here ")
    found.look()
    assert found._not_before == found._why_not == {}  # it has ended


def hints(**asked):
    return {"omni": asked}


def pinned(engine):
    """How many cached blocks of an engine are pinned."""
    return engine.directory.pool.num_pinned


def crowd(engine, rounds=3, **options):
    """Have an engine keep several other prompts, of four blocks each."""
    for seed in range(10, 10 + rounds):
        publish(engine, prompt(4 * BLOCK, seed=seed), **options)


def test_what_is_to_be_kept_out_is_neither_kept_nor_stored_but_loads(sharer, shelf, tokens):
    first, second = sharer(extra=MASTER), sharer()
    publish(first, params=hints(cache="no"))
    assert (kept(first), first.count("blocks_stored")) == (0, 0)
    publish(second)
    answer = publish(first, QUESTION, max_tokens=6, params=hints(cache="no"))
    assert answer.tokens == tokens(QUESTION, 6)
    third = sharer()
    third.generate(QUESTION)
    assert third.count("tokens_from_host") == 6 * BLOCK
    assert kept(first) == 0


@pytest.mark.parametrize("already_kept", [False, True])
def test_what_is_pinned_stays_until_its_time(sharer, already_kept):
    alone = sharer(extra=slots(16))
    if already_kept:
        publish(alone, PREFIX[: 4 * BLOCK])
    publish(alone, PREFIX[: 4 * BLOCK], params=hints(pin_s=600))
    crowd(alone, 8)
    assert (pinned(alone), alone.usage) == (4, (0, 16, 0))
    other = sharer()
    other.generate([*PREFIX[: 4 * BLOCK], 5])
    assert other.count("tokens_from_host") == 4 * BLOCK
    neighbours(other)
    wait(lambda: inspection.used_again(alone.half))  # told later, it would outdo the second crowd
    alone.directory.pool.end_pins(float("inf"))
    crowd(alone, 24)
    late = sharer()
    late.generate([*PREFIX[: 4 * BLOCK], 5])
    assert late.count("tokens_from_host") == 0


LONG = prompt(20 * BLOCK)


@pytest.fixture
def small(sharer):
    """Makes engines of 41 KV blocks; copies may hold ten of them. Their own cache has `LONG`, and
    their arena has nothing."""

    def make(tokens=LONG, **options):
        extra = options.pop("extra", slots(128))
        made = sharer(extra=extra, usable_blocks=40, **options)
        publish(made, tokens, params=hints(cache="no"))
        assert kept(made) == 0
        return made

    return make


def compute(engine, tokens, **options):
    """Have an engine answer a prompt. Copies may be under way after that."""
    request_id = engine.submit(tokens, **options)
    engine.run(lambda: engine.done(request_id))


def ask(engine, params, tokens=LONG, **options):
    """Have an engine compute a prompt that it has, while no copy ends; returns the copier."""
    held = engine.hold(saves=True)
    request_id = engine.submit(tokens, params=params, **options)
    engine.run(lambda: engine.done(request_id))
    return held


def waiting(engine):
    """How many blocks of an engine wait to be copied."""
    return inspection.prefix_saves(engine.half).num_waiting


def under_way(engine):
    """How many blocks of an engine copies hold."""
    return inspection.prefix_saves(engine.half).num_held


def brought(sharer, tokens=LONG, **options):
    """How many blocks of a prompt another engine of the host loads."""
    other = sharer(**options)
    other.generate([*tokens, 5])
    assert not other.failures()
    return other.count("tokens_from_host") // BLOCK


# With a ring, vLLM does not have the last blocks, behind which no prefix can end.
without_rings = pytest.mark.parametrize("family", [each for each in FAMILIES if "ring" not in each])


@without_rings
@pytest.mark.parametrize("hint", [{"pin_s": 600}, {"prefetch": True}], ids=["pin", "prefetch"])
@pytest.mark.values
def test_what_vllm_has_is_kept_wholly_though_few_copies_may_be_under_way(sharer, family, hint):
    extra = slots(800)
    groups = len(GROUPS[family])
    alone = sharer(family=family, extra=extra, usable_blocks=22 * groups)
    publish(alone, LONG, params=hints(cache="no"))
    assert kept(alone) == 0
    held = ask(alone, hints(**hint))
    assert 0 < under_way(alone) <= (22 * groups + 1) // 4
    held.open()
    assert_clean(alone)
    assert (alone.count("blocks_dropped"), alone.count("pins_refused")) == (0, 0)
    assert pinned(alone) == (kept(alone) if "pin_s" in hint else 0)
    assert brought(sharer, family=family) == 20


def test_what_vllm_evicts_before_its_turn_is_counted(small, sharer):
    alone = small()
    held = ask(alone, hints(pin_s=600))
    for seed in (1, 2):
        compute(alone, prompt(20 * BLOCK, seed=seed), params=hints(cache="no"))
    held.open()
    assert_clean(alone)
    assert (kept(alone), pinned(alone)) == (10, 10)
    assert (alone.count("blocks_dropped"), alone.count("pins_refused")) == (10, 10)
    assert brought(sharer) == 10


@without_rings
def test_a_prompt_of_more_blocks_than_copies_may_hold_is_kept_wholly(sharer, family):
    groups = len(GROUPS[family])
    alone = sharer(family=family, extra=slots(200), usable_blocks=28 * groups)
    held = alone.hold(saves=True)
    compute(alone, [*LONG, 5])
    assert 0 < under_way(alone) <= (28 * groups + 1) // 4
    held.open()
    assert_clean(alone)
    # The end of the prompt does not wait, as the next step overwrites its state.
    has_tail = family in ("state and full", "all three")
    assert alone.count("blocks_dropped") == (groups if has_tail else 0)
    assert brought(sharer, family=family) == 20


def test_new_blocks_that_vllm_evicts_before_their_turn_are_dropped(sharer):
    alone = sharer(extra=slots(200), usable_blocks=40)
    held = alone.hold(saves=True)
    for seed in range(3):
        compute(alone, prompt(20 * BLOCK, seed=seed))
    assert under_way(alone) == 10
    held.open()
    assert_clean(alone)
    assert kept(alone) + alone.count("blocks_dropped") == 60
    assert kept(alone) >= 30  # ten that copies held, and most of what vLLM still has


def test_no_more_blocks_wait_than_the_arena_has_slots(sharer):
    alone = sharer(extra=slots(1))
    publish(alone, LONG)
    assert (kept(alone), alone.count("blocks_dropped")) == (1, 19)


def test_a_prompt_is_kept_when_it_is_computed_and_its_answer_when_it_ends(sharer):
    alone = sharer(extra=slots(64), instant_copies=True)
    asked = alone.submit(LONG, max_tokens=3 * BLOCK)
    alone.run(lambda: kept(alone) == 20)
    alone.run(lambda: len(alone.answers[asked].tokens) > 2 * BLOCK)
    assert kept(alone) == 20
    alone.run(lambda: alone.done(asked))
    alone.settle()
    assert kept(alone) == 22  # nothing has computed its last token


def test_the_log_says_what_a_reset_leaves_and_how_to_empty_it(sharer, engine, monkeypatch, tokens):
    said = []
    monkeypatch.setattr(scheduler_module.logger, "info", lambda text, *_: said.append(text))
    alone = sharer()
    publish(alone)
    assert alone.scheduler.reset_prefix_cache()
    assert [("stay" in each, "reset_external=true" in each) for each in said] == [(True, True)]
    assert kept(alone)
    assert alone.scheduler.reset_prefix_cache(reset_connector=True)
    assert "are forgotten" in said[-1]
    assert not kept(alone)
    said.clear()
    assert engine("kv_both").scheduler.reset_prefix_cache()
    assert not said, "it keeps nothing"


def test_what_waits_is_not_read_from_blocks_that_another_connector_loads(small):
    alone = small()
    held = ask(alone, hints(pin_s=600))
    # As if vLLM had given them to a prompt that begins alike.
    inspection.doubt(alone.half, 5 * BLOCK)
    held.open()
    assert_clean(alone)
    assert (kept(alone), alone.count("blocks_dropped")) == (15, 5)


def test_the_end_of_what_was_kept_in_parts_goes_first(small, sharer):
    alone = small(extra=slots(24))
    publish(alone, LONG, params=hints(prefetch=True))
    assert kept(alone) == 20
    crowd(alone, 2)
    assert brought(sharer) == 16


def test_of_what_has_no_room_in_the_arena_the_beginning_is_kept(small, sharer):
    alone = small(extra=slots(12))
    publish(alone, LONG, params=hints(prefetch=True))
    assert kept(alone) == 12
    assert brought(sharer) == 12


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefetch_brings_blocks_into_the_own_arena(sharer, engine, family, short_of_memory):
    # The third engine is to find the second one's arena, not what the first one left.
    first, second = sharer(family=family), sharer(family=family)
    publish(first)
    assert len(publish(second, QUESTION, max_tokens=20, params=hints(prefetch=True)).tokens) == 1
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert kept(second) > 0
    assert not second.count("bad_hints")
    first.shutdown()
    third = engine(family=family, role="kv_both", extra=SHARE)
    wait(lambda: len(neighbours(third).present()) == 1)
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert third.generate(QUESTION, 6).tokens == expected
    assert third.count("tokens_from_host") == 6 * BLOCK


@pytest.mark.parametrize(
    ("asked", "bad"),
    [
        ({"omni": None}, 0),
        ({"omni": {"cache": "never", "pin_s": -1, "prefetch": 1, "lasting": True}}, 4),
        ({"omni": {str(number): number for number in range(1000)}}, 1),
    ],
)
def test_bad_hints_are_counted_and_change_nothing(sharer, tokens, asked, bad):
    alone = sharer()
    answer = publish(alone, PREFIX, max_tokens=6, params=asked)
    assert (answer.tokens, answer.params) == (tokens(PREFIX, 6), None)
    assert (alone.count("bad_hints"), alone.failures()) == (bad, {})


def test_a_hint_that_is_misspelt_is_named_once_in_a_while(sharer, log):
    alone = sharer()
    for request in range(3):
        publish(alone, prompt(3 * BLOCK, seed=request), params={"omni": {"prefech": True}})
    [told] = [each for each in log if "bad_hints" in each]
    assert "unknown hint 'prefech'; did you mean 'prefetch'?" in told


def test_hints_of_an_engine_that_shares_nothing_are_counted(engine, tokens):
    alone = engine("kv_both")
    for asked in ({"pin_s": 5}, {"prefetch": True}, {"pin_s": 5}, {"cache": "no"}):
        alone.generate(PREFIX, params=hints(**asked))
    assert alone.count("bad_hints") == 3
    assert alone.generate(PREFIX, 6, params=hints(pin_s=5)).tokens == tokens(PREFIX, 6)
    assert_clean(alone)


def test_hints_stand_beside_a_hand_off(sharer, tokens):
    prefill, decode = sharer("kv_producer"), sharer("kv_consumer")
    asked = {**HANDOFF, **hints(pin_s=600)}
    answer = prefill.generate(PREFIX, params=asked)
    assert answer.params is not None
    assert asked["omni"] == {"pin_s": 600}  # a caller's dict is not changed
    got = publish(decode, PREFIX, max_tokens=6, params={**answer.params, **hints(prefetch=True)})
    assert got.tokens == tokens(PREFIX, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)
    assert pinned(prefill) == 6


@pytest.mark.parametrize(
    ("xargs", "params", "bad"),
    [
        ({"omni_pin_s": 600, "session_id": "a"}, None, 0),
        ({"omni_pin_s": 600}, {"omni": {"cache": "normal"}}, 0),
        ({"omni_pin_s": 600, "omni_pinned": 1}, None, 1),
    ],
)
def test_hints_arrive_in_vllm_xargs_too(sharer, tokens, xargs, params, bad):
    alone = sharer()
    answer = publish(alone, max_tokens=6, xargs=xargs, params=params)
    assert answer.tokens == tokens(PREFIX, 6)
    assert (pinned(alone), alone.count("bad_hints")) == (6, bad)


def test_hints_that_the_operator_does_not_allow_are_counted_and_change_nothing(sharer, tokens):
    alone = sharer(extra={**slots(16), "hints": ["no", "prefetch"]})
    answer = publish(alone, max_tokens=6, params=hints(pin_s=600))
    assert answer.tokens == tokens(PREFIX, 6)
    assert (kept(alone), pinned(alone), alone.count("hints_refused")) == (6, 0, 1)
    assert len(publish(alone, max_tokens=20, params=hints(prefetch=True)).tokens) == 1
    deaf = sharer(extra={**slots(16), "hints": []})
    assert len(publish(deaf, max_tokens=5, params=hints(prefetch=True)).tokens) == 5
    publish(deaf, prompt(4 * BLOCK, seed=9), params=hints(cache="no"))
    assert (kept(deaf), deaf.count("hints_refused"), deaf.count("bad_hints")) == (4, 2, 0)


def test_hints_in_vllm_xargs_change_no_hand_off(sharer, tokens):
    """A router replaces what the client puts into kv_transfer_params, and passes the rest on."""
    prefill, decode = sharer("kv_producer"), sharer("kv_consumer")
    xargs = {"omni_pin_s": 600, "omni_prefetch": 1}
    handed_off = prefill.generate(PREFIX, params=HANDOFF, xargs=xargs).params
    got = publish(decode, max_tokens=6, params=handed_off, xargs=xargs)
    assert got.tokens == tokens(PREFIX, 6)
    assert decode.count("handoffs_received") == 1
    assert pinned(decode) > 0
    assert not prefill.count("bad_hints") + decode.count("bad_hints")
