# SPDX-License-Identifier: Apache-2.0
"""What a job raises is its own failure, and a thread that has died fails its jobs at once."""

import numpy as np
import pytest

from omni_connector.copy.jobs import LoadSpec, SaveSpec
from omni_connector.copy.threads import CopyThread
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.vllm_v1.metadata import WorkerReport
from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, count_computed, hand_off, prompt, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


class Gone(BaseException):
    """What no `except Exception` catches."""


def fail(*args, **kwargs):
    raise Gone


@pytest.mark.parametrize("family", ["full", "all three"])
@pytest.mark.parametrize("kind", ["job_failed", "copy_thread_died"])
def test_a_load_fails_and_the_prompt_is_computed(engine, family, kind):
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    alone = engine(family=family)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    if kind == "job_failed":
        held = decode.hold()
        held.before_load = fail
    else:
        inspection.end_thread(inspection.loads(decode.worker_half))
    assert decode.generate(PROMPT, 6, params=answer).tokens == alone.generate(PROMPT, 6).tokens
    assert decode.failures() == {kind: 1}
    assert_clean(prefill, decode)
    if kind == "job_failed":
        held.before_load = lambda: None
        again = prompt(80, seed=2)
        assert hand_off(prefill, decode, again) == alone.generate(again, 6).tokens
        assert decode.count("handoffs_received") == 1


@pytest.mark.parametrize("kind", ["job_failed", "copy_thread_died"])
def test_a_save_fails_and_nothing_is_handed_off(engine, tokens, kind):
    prefill, decode = engine("kv_producer", max_tokens_a_step=2 * BLOCK), engine("kv_consumer")
    if kind == "job_failed":
        prefill.instant_copies = True
        held = prefill.hold()
        save, held.save = held.save, fail
    else:
        inspection.end_thread(inspection.saves(prefill.worker_half))
    answer = prefill.generate(PROMPT, params=HANDOFF)
    assert answer.params["omni_no_handoff"] == kind
    assert decode.generate(PROMPT, 6, params=answer.params).tokens == tokens(PROMPT, 6)
    assert_clean(prefill, decode)
    if kind == "job_failed":
        held.save = save
        assert hand_off(prefill, decode, prompt(80, seed=2)) == tokens(prompt(80, seed=2), 6)
        assert decode.count("handoffs_received") == 1


class Stuck:
    """Stands in for a thread that makes no turn any more, and does not end either."""

    def __init__(self, turn):
        self.turn = turn

    def wake(self):
        pass

    def join(self, timeout):
        pass

    def is_alive(self):
        return True


def test_jobs_that_are_left_end_when_their_thread_is_closed():
    ended = []

    def work(cancelled):
        try:
            yield True
            yield True
        finally:
            ended.append(cancelled())

    stuck: list[Stuck] = []

    def start(name, turn, **_):
        stuck.append(Stuck(turn))
        return stuck[0]

    thread = CopyThread("omni-test", None, start)
    thread.submit(1, work)
    thread.submit(2, work)
    stuck[0].turn()
    assert not ended
    thread.close()
    assert ended == [True]  # that of the other has not begun
    assert stuck[0].turn() is None


def test_a_save_that_outlives_the_arena_raises_nothing(engine, monkeypatch):
    """Nobody could catch it: it would be raised where a generator is thrown away."""
    prefill = engine("kv_producer")
    worker = prefill.worker_half
    saves = []
    monkeypatch.setattr(
        inspection.saves(worker), "submit", lambda number, work, *_, **__: saves.append(work)
    )
    prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: bool(saves))
    steps = saves[0](lambda: False)
    assert next(steps)
    prefill.shutdown()
    assert inspection.arena(worker).closed
    steps.close()


def test_a_job_of_which_the_worker_has_no_part_is_not_started_and_has_failed(engine):
    """A half without an arena saves nothing, and after its end it starts nothing."""
    decode = engine("kv_consumer")
    worker = decode.worker_half
    blocks, numbers = BlockSpans.of([(0, [3])]), np.array([0])
    save = SaveSpec(blocks=blocks, slots=numbers, generations=numbers, keys=[b""])
    load = LoadSpec(
        request_id="r", blocks=blocks, slots=blocks, generations=numbers, arenas=(), timeout=1.0
    )
    assert not worker.transfer_async(7, save)
    worker._start({7: save})
    assert worker.take_report() == WorkerReport({7: 1}, {7: "job_failed"})
    decode.shutdown()
    assert not worker.transfer_async(8, load)
    worker._start({8: load})
    assert worker.take_report() == WorkerReport({8: 1}, {8: "job_failed"})
    assert worker.take_finished_loads()[0] == {"r"}
    assert worker.take_bad_block_ids() == {3}


def test_no_block_is_good_of_a_load_that_cannot_tell_which_are(engine):
    """vLLM would compute with what was in the others before."""
    decode = engine("kv_consumer")
    worker = decode.worker_half
    load = LoadSpec(
        request_id="r",
        blocks=BlockSpans.of([(0, [NULL_BLOCK_ID, 5, 3])]),
        slots=BlockSpans.of([(0, [0, 1, 2])]),
        generations=np.ones(3, np.int64),
        arenas=(),
        timeout=1.0,
    )
    inspection.end_thread(inspection.loads(worker))
    worker._start({7: load})
    worker.collect()
    assert worker.take_report() == WorkerReport({7: 1}, {7: "copy_thread_died"})
    assert worker.take_bad_block_ids() == {3, 5}


@pytest.mark.parametrize("block_ids", [[3, 3], [3, 10**6]])
def test_a_job_whose_ids_do_not_fit_copies_nothing_and_has_failed(engine, block_ids):
    decode = engine("kv_consumer")
    worker = decode.worker_half
    blocks = BlockSpans.of([(0, block_ids)])
    load = LoadSpec(
        request_id="r", blocks=blocks, slots=blocks, generations=[1, 1], arenas=(), timeout=1.0
    )
    held = decode.hold()
    worker._start({7: load})
    assert worker.take_report() == WorkerReport({7: 1}, {7: "job_failed"})
    assert worker.take_bad_block_ids() == set(block_ids)
    assert not held.waiting.is_set()
    assert not worker._under_way


@pytest.mark.parametrize("how", ["changed", "reused"])
@pytest.mark.parametrize("first_bad", range(6))
@pytest.mark.values
def test_blocks_before_the_first_bad_one_are_kept(engine, tokens, monkeypatch, first_bad, how):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    handoff = prefill.handoffs[0]
    arena, slot = prefill.arena(), int(handoff.slots[0][first_bad])
    if how == "changed":
        arena.slots[slot][9] ^= 1
    else:
        arena.begin_write(slot, int(handoff.generations[0][first_bad]) + 1)
    bad = set()
    worker = decode.workers[0]
    take = worker.get_block_ids_with_load_errors
    monkeypatch.setattr(
        worker, "get_block_ids_with_load_errors", lambda: bad.update(x := take()) or x
    )
    computed = count_computed(decode)
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert len(bad) == 6 - first_bad
    assert computed[0] == len(PROMPT) - first_bad * BLOCK
    assert_clean(prefill, decode)


@pytest.mark.parametrize("first_bad", [1, 3, 5])
def test_so_are_those_that_are_made_of_smaller_ones(engine, first_bad):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", block_size=2 * BLOCK)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    handoff = prefill.handoffs[0]
    prefill.arena().slots[int(handoff.slots[0][first_bad])][9] ^= 1
    computed = count_computed(decode)
    right = engine(block_size=2 * BLOCK).generate(PROMPT, 6).tokens
    assert decode.generate(PROMPT, 6, params=answer).tokens == right
    assert computed[0] == len(PROMPT) - first_bad // 2 * 2 * BLOCK
    assert_clean(prefill, decode)


@pytest.mark.parametrize("asked", [True, False])
def test_a_job_that_its_thread_has_left_lets_go_of_what_it_holds(asked):
    """When the engine looks for what has ended, and at the latest when it closes."""
    thread, held = CopyThread("omni-test"), set()

    def endless(cancelled):
        held.add("an arena")
        try:
            while True:
                yield False
        finally:
            held.clear()

    thread.submit(1, endless)
    wait(lambda: held)
    inspection.end_thread(thread)
    assert held
    if asked:
        assert [(each.job_id, each.failure) for each in thread.take_ended()] == [
            (1, "copy_thread_died")
        ]
        assert not held
    thread.close()
    assert not held
