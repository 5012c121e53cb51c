# SPDX-License-Identifier: Apache-2.0
"""Whatever makes blocks void while an engine computes, nobody has a wrong byte of it: not by a
hand-off, nor from its arena, nor from the store; not of a prompt, nor of an answer and its end.

Failed loads of another connector are in `test_multi_connector`, adapters in `test_adapters`.
"""

from collections.abc import Callable

import pytest

from omni_connector.vllm_v1 import connector
from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, prompt, wait
from .held import HeldCopier
from .test_sleep import sleep_and_wake

pytestmark = pytest.mark.vllm

ASKED = prompt(6 * BLOCK - 3, seed=1)
# Of other tokens, and as long.
OTHER = prompt(6 * BLOCK - 3, seed=2)
SHARES = {"share": True}
ANSWER = 2 * BLOCK


def _let_go(owner: InProcessEngine, held: HeldCopier) -> None:
    """Let the copies end: vLLM resets nothing while they hold blocks."""
    held.open()
    wait(lambda: inspection.copies_ended(owner.worker_half))


def nothing(owner: InProcessEngine, held: HeldCopier) -> None:
    """The negative control: what is computed meanwhile is had by all."""


def reset(owner: InProcessEngine, held: HeldCopier) -> None:
    _let_go(owner, held)
    owner.scheduler.reset_prefix_cache(reset_running_requests=True)


def other_weights(owner: InProcessEngine, held: HeldCopier) -> None:
    _let_go(owner, held)
    owner.runner.weights = b"new"
    owner.scheduler.reset_prefix_cache(reset_running_requests=True)


def reset_that_fails(owner: InProcessEngine, held: HeldCopier) -> None:
    """Requests go on, with the KV of the former weights in vLLM's cache."""
    _let_go(owner, held)
    owner.runner.weights = b"new"
    owner.scheduler.reset_prefix_cache()


def sleep(owner: InProcessEngine, held: HeldCopier) -> None:
    _let_go(owner, held)
    for request_id in list(owner.scheduler.requests):
        owner.abort(request_id)
    owner.settle()
    sleep_and_wake(owner)


def preemption(owner: InProcessEngine, held: HeldCopier) -> None:
    """All that runs is preempted, and what was in flight is dropped."""
    for request in list(owner.scheduler.running):
        owner.scheduler.running.remove(request)
        owner.scheduler._preempt_request(request, 0.0)
    owner.scheduler.prev_step_scheduled_req_ids.clear()


def used_ids(owner: InProcessEngine, held: HeldCopier) -> None:
    """Clients leave, and others come with the same ids."""
    used = list(owner.scheduler.requests)
    for request_id in used:
        owner.abort(request_id)
    # vLLM itself takes the output of a step in flight for that of the second request.
    while any(scheduled.num_scheduled_tokens for scheduled, _ in owner.flying):
        owner.step()
    for request_id in used:
        owner.submit(OTHER, max_tokens=4, request_id=request_id)


def failed_load(owner: InProcessEngine, held: HeldCopier) -> None:
    """Slots that a load of the same prompt reads have changed."""
    _let_go(owner, held)
    owner.arena().slots[:, 5] ^= 0x10
    owner.scheduler.reset_prefix_cache(reset_running_requests=True)
    owner.arena().slots[:, 5] ^= 0x08


WAYS = (
    nothing,
    reset,
    other_weights,
    reset_that_fails,
    sleep,
    preemption,
    used_ids,
    failed_load,
)


Way = Callable[[InProcessEngine, HeldCopier], None]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.values
def test_nobody_has_a_wrong_byte(engine, sharer, tokens, monkeypatch, way: Way, overlap: bool):
    # Of engines that receive, vLLM frees blocks late, so that no reset succeeds beside a step.
    owner = sharer("kv_producer", extra=SHARES, async_scheduling=overlap)
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: owner.worker)
    neighbour = engine("kv_both", extra=SHARES)
    far = sharer(extra={"handoff": False})
    wait(lambda: inspection.meets(owner.half) and inspection.meets(neighbour.half))
    held = owner.hold(saves=True)
    asked = owner.submit(ASKED, max_tokens=ANSWER)
    handed = owner.submit(ASKED, params=HANDOFF)
    owner.run(lambda: len(owner.answers[asked].tokens) > BLOCK)
    way(owner, held)
    held.open()
    owner.settle()
    turn = [*ASKED, *tokens(ASKED, ANSWER)]
    expected = {len(each): tokens(each, 6) for each in (ASKED, turn)}
    for reader in (neighbour, far):
        for each in (ASKED, turn):
            assert reader.generate(each, 6).tokens == expected[len(each)]
        reader.settle()
    decode = engine("kv_consumer")
    params = owner.answers[handed].params
    assert decode.generate(ASKED, 6, params=params).tokens == expected[len(ASKED)]
    found = (
        neighbour.count("tokens_from_host"),
        far.count("tokens_shared"),
        decode.count("handoffs_received"),
    )
    if way is nothing:
        assert all(found)
    if way is failed_load:
        assert owner.failures() == {"checksum_mismatch": 1}
    if way in (other_weights, reset_that_fails):
        assert not decode.count("handoffs_received")
