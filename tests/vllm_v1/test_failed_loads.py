# SPDX-License-Identifier: Apache-2.0
"""Loads that fail after their blocks were allocated: nothing of them is served."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import FinishReason

from omni_connector.copy.staged import StagedCopier
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.transports.shm import SharedMemoryTransport
from omni_connector.vllm_v1 import connector
from tests import inspection
from tests.kv.conftest import HostStream
from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, hand_off, leased, prompt, wait
from .held import no_such_page
from .test_preemption import preempt_now

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)

Spoil = Callable[[InProcessEngine, InProcessEngine], None]


def slot_bytes_change(prefill: InProcessEngine, decode: InProcessEngine) -> None:
    slot = prefill.handoffs[0].slots[0][2]
    prefill.arena().slots[slot][5] ^= 0x10


def last_slot_changes(prefill: InProcessEngine, decode: InProcessEngine) -> None:
    slot = prefill.handoffs[0].slots[0][-1]
    prefill.arena().slots[slot][0] ^= 0x01


def slot_is_reused(prefill: InProcessEngine, decode: InProcessEngine) -> None:
    handoff = prefill.handoffs[0]
    arena = prefill.arena()
    arena.begin_write(handoff.slots[0][1], handoff.generations[0][1] + 1)


def slot_is_reused_while_it_is_read(prefill: InProcessEngine, decode: InProcessEngine) -> None:
    decode.hold().before_load = lambda: slot_is_reused(prefill, decode)


def peer_is_gone(prefill: InProcessEngine, decode: InProcessEngine) -> None:
    prefill.shutdown()


def copier_fails(prefill: InProcessEngine, decode: InProcessEngine) -> None:
    decode.hold().before_load = no_such_page


FAILURES = {
    slot_bytes_change: "checksum_mismatch",
    last_slot_changes: "checksum_mismatch",
    slot_is_reused: "stale_slot",
    slot_is_reused_while_it_is_read: "stale_slot",
    peer_is_gone: "peer_unreachable",
    copier_fails: "load_failed",
}


@pytest.mark.parametrize("spoil", FAILURES, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.pairs
def test_the_policy_decides_and_nobody_else_is_touched(
    engine, tokens, log, spoil: Spoil, policy, overlap
):
    prefill = engine("kv_producer")
    decode = engine("kv_consumer", policy=policy, async_scheduling=overlap)
    request_id = leased(prefill, decode, PROMPT)
    spoil(prefill, decode)
    other = decode.submit(prompt(50, seed=1), max_tokens=4)
    decode.settle()
    answer = decode.answers[request_id]
    if policy == "fail":
        assert (answer.reason, answer.tokens) == (FinishReason.ERROR, [])
    else:
        assert answer.tokens == tokens(PROMPT, 6)
    assert decode.answers[other].tokens == tokens(prompt(50, seed=1), 4)
    assert decode.failures() == {FAILURES[spoil]: 1}
    assert decode.count("handoffs_received") == 0
    lines = [line for line in log if request_id in line]
    assert len(lines) == 1, log
    assert FAILURES[spoil] in lines[0]
    assert not decode.leftovers()
    # Nor is anything of it in the prefix cache.
    assert decode.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)


def test_a_hand_off_beside_a_failed_load_goes_on(engine, tokens):
    """It was preempted, and computes again what was copied before: that is no other KV."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    both = engine("kv_both", policy="recompute", prefix_caching=False, max_tokens_a_step=2 * BLOCK)
    handed_on = prompt(8 * BLOCK, seed=3)
    request_id = leased(prefill, both, PROMPT)
    held = both.hold(loads=True)
    copier_fails(prefill, both)
    held.before_load = both._held[-1].before_load
    both._copiers[0].inner = held
    both.run(held.waiting.is_set)
    handed = both.submit(handed_on, params=HANDOFF)
    request = both.scheduler.requests[handed]
    both.run(lambda: request.num_computed_tokens >= 6 * BLOCK)
    preempt_now(both, handed)
    both.run(lambda: request.num_computed_tokens == 2 * BLOCK)
    assert request.status.name == "RUNNING"
    held.open()
    wait(lambda: inspection.copies_ended(both.worker_half))
    both.settle()
    assert both.answers[request_id].tokens == tokens(PROMPT, 6)
    assert both.failures() == {"load_failed": 1}  # that of the load
    params = both.answers[handed].params
    assert decode.generate(handed_on, 6, params=params).tokens == tokens(handed_on, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode, both)


def test_a_load_that_fails_in_blocks_which_a_hand_off_has_lost_is_no_failure_of_it(engine, tokens):
    """It was preempted after its blocks were copied, and they were given to the load."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    both = engine(
        "kv_both",
        policy="recompute",
        prefix_caching=False,
        max_tokens_a_step=3 * BLOCK,
        long_prefill=2 * BLOCK,
    )
    handed_on = prompt(8 * BLOCK, seed=3)
    handed = both.submit(handed_on, params=HANDOFF)
    request = both.scheduler.requests[handed]
    both.instant_copies = True
    both.run(lambda: request.num_computed_tokens >= 6 * BLOCK and not both.half.copying())
    blocks_of = both.scheduler.kv_cache_manager.get_block_ids
    lost = set(blocks_of(handed)[0])
    preempt_now(both, handed)
    copier_fails(prefill, both)
    request_id = leased(prefill, both, PROMPT)
    both.run(lambda: bool(blocks_of(request_id)[0]))
    assert lost & set(blocks_of(request_id)[0])
    wait(lambda: inspection.copies_ended(both.worker_half))
    assert not both.done(handed)
    both.settle()
    assert both.answers[request_id].tokens == tokens(PROMPT, 6)
    assert both.failures() == {"load_failed": 1}  # that of the load
    params = both.answers[handed].params
    assert decode.generate(handed_on, 6, params=params).tokens == tokens(handed_on, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode, both)


def test_without_checksums_changed_bytes_would_be_served(engine, tokens):
    extra = {"integrity": "generation"}
    prefill, decode = engine("kv_producer", extra=extra), engine("kv_consumer", extra=extra)
    request_id = leased(prefill, decode, PROMPT)
    slot_bytes_change(prefill, decode)
    decode.settle()
    assert decode.answers[request_id].tokens != tokens(PROMPT, 6)


def test_a_failed_copy_to_slots_is_no_handoff(engine, tokens, log):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")

    held = prefill.hold()
    held.save = no_such_page
    answer = prefill.generate(PROMPT, params=HANDOFF)
    assert answer.tokens == tokens(PROMPT, 1)
    assert decode.generate(PROMPT, 6, params=answer.params).tokens == tokens(PROMPT, 6)
    assert prefill.failures()["save_failed"] == 1
    assert decode.count("handoffs_received") == 0
    assert_clean(prefill, decode)


def test_a_copy_that_fails_early_is_told_by_the_answer(engine, tokens):
    prefill, decode = engine("kv_producer", max_tokens_a_step=2 * BLOCK), engine("kv_consumer")

    prefill.instant_copies = True
    prefill.hold().save = no_such_page
    answer = prefill.generate(PROMPT, params=HANDOFF)
    assert answer.params["omni_no_handoff"] == "save_failed"
    assert decode.generate(PROMPT, 6, params=answer.params).tokens == tokens(PROMPT, 6)
    assert not decode.failures()
    assert_clean(prefill, decode)


def test_a_copy_that_fails_for_one_hand_off_is_told_by_all_that_share_its_slots(engine, tokens):
    """The slots of equal prompts are filled once, for the first of their requests."""
    options = {"max_tokens_a_step": 4 * BLOCK, "long_prefill": 2 * BLOCK, "prefix_caching": False}
    prefill = engine("kv_producer", **options)
    decode = engine("kv_consumer")

    prefill.instant_copies = True
    prefill.hold().save = no_such_page
    ids = [prefill.submit(PROMPT, params=HANDOFF) for _ in range(2)]
    prefill.run(lambda: prefill.done(*ids))
    answers = [prefill.answers[each].params for each in ids]
    assert [each["omni_no_handoff"] for each in answers] == ["save_failed", "not_computed"]
    assert prefill.failures()["not_computed"] == 1
    for each in answers:
        assert decode.generate(PROMPT, 6, params=each).tokens == tokens(PROMPT, 6)
    assert not decode.failures()
    assert_clean(prefill, decode)


class FailingDevice(HostStream):
    """A device that may fail. As with CUDA, each later call of its process tells so."""

    failed = False

    def launch(self, work: Callable[[], object], **options: Any) -> None:
        self._require()
        super().launch(work, **options)

    def finish(self, mark: object | None) -> None:
        self._require()
        super().finish(mark)

    def _require(self) -> None:
        if self.failed:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def devices(monkeypatch) -> list[FailingDevice]:
    """One of each engine."""
    made: list[FailingDevice] = []

    def make(caches: CanonicalKVCaches, layout: SlotLayout, helpers: Any) -> StagedCopier:
        made.append(FailingDevice())
        return StagedCopier(caches, layout, made[-1])

    ours = dataclasses.replace(connector.SURROUNDINGS, copier=make)
    monkeypatch.setattr(connector, "SURROUNDINGS", ours)
    return made


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_engine_whose_device_fails_tells_its_peers_before_it_ends(
    engine, tokens, devices, policy
):
    prefill = engine("kv_producer")
    decode = engine("kv_consumer", policy=policy)
    held = prefill.hold(saves=True)
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    answer = prefill.answers[request_id].params
    loading = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(lambda: bool(decode.loads_under_way))
    devices[0].failed = True
    held.open()  # and copies, which fail
    decode.settle()
    assert decode.failures() == {"stale_slot": 1}
    if policy == "fail":
        assert decode.answers[loading].reason is FinishReason.ERROR
    else:
        assert decode.answers[loading].tokens == tokens(PROMPT, 6)
    prefill.shutdown()  # as vLLM does when the engine's own call has failed
    # Who comes later gets no lease, and loads nothing.
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures().keys() == {"stale_slot", "peer_unreachable"}
    assert not decode.leftovers()


def test_an_engine_whose_device_fails_in_a_load_holds_nothing_of_its_peer(engine, tokens, devices):
    prefill = engine("kv_producer")
    decode = engine("kv_consumer", policy="recompute")
    leased(prefill, decode, PROMPT)
    devices[1].failed = True
    decode.run(lambda: bool(decode.failures()))
    assert decode.failures() == {"load_failed": 1}
    decode.shutdown()
    wait(lambda: not prefill.usage[0])  # the release of its lease is on its way
    assert_clean(prefill)
    other = engine("kv_consumer")
    assert hand_off(prefill, other, PROMPT) == tokens(PROMPT, 6)
    assert_clean(prefill, other)


def test_after_a_failed_load_the_peers_arena_is_attached_anew(engine, tokens, monkeypatch):
    attach, attached = SharedMemoryTransport.attach, []
    monkeypatch.setattr(
        SharedMemoryTransport,
        "attach",
        lambda self, endpoint, **how: attached.append(1) or attach(self, endpoint, **how),
    )
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    leased(prefill, decode, PROMPT)
    slot_bytes_change(prefill, decode)
    decode.settle()
    assert len(attached) == 1
    for seed in (2, 3):
        again = prompt(80, seed=seed)
        assert hand_off(prefill, decode, again) == tokens(again, 6)
    assert len(attached) == 2
    assert_clean(prefill, decode)
