# SPDX-License-Identifier: Apache-2.0
"""Under vLLM's MultiConnector, which keys its children by class name and adds up what they say.

It tells all children what one of them has for its scheduler half, so ours must do without that.
"""

import pytest
from vllm.v1.engine import FinishReason

from omni_connector.cli.readings import hit_rates
from omni_connector.errors import ConfigError, TransportError
from omni_connector.net import introductions, rank_socket
from omni_connector.net.runtime import runtime_dir
from omni_connector.testing import no_op
from omni_connector.vllm_v1.connector import OmniKVConnector
from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, hand_off, prompt, wait
from .runners import V1Runner, V2Runner
from .siblings import FAILING, SIBLING
from .stores import PREFIX, QUESTION

pytestmark = pytest.mark.vllm

ORDERS = {
    "alone": {},
    "first": {"after": [SIBLING]},
    "second": {"before": [SIBLING]},
}


@pytest.fixture(params=ORDERS)
def order(request):
    return {"connector": "MultiConnector", **ORDERS[request.param]}


def cached(engine, **options):
    """An engine whose prefix cache is ours, and whose hand-offs are another connector's."""
    return engine("kv_both", extra={"share": True, "handoff": False}, **options)


def ours(engine):
    """The scheduler half of ours among its connectors."""
    children = engine.scheduler.connector.sub_connectors
    [half] = [each._scheduler for each in children if isinstance(each, OmniKVConnector)]
    return half


def heard(engine):
    """What the sibling's scheduler half was told."""
    children = engine.scheduler.connector.sub_connectors
    return [child.heard for child in children if hasattr(child, "heard")]


@pytest.mark.parametrize("family", ["full", "all three"])
def test_a_child_of_multi_connector_hands_off(engine, family):
    options = {"connector": "MultiConnector", "family": family}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    reference = engine(family=family)
    for length in (17, 100):
        asked = prompt(length)
        assert hand_off(prefill, decode, asked) == reference.generate(asked, 6).tokens
    assert decode.stats.data["counts"]["handoffs_received"] == 2
    assert_clean(prefill, decode)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_in_any_order_prefixes_are_shared(engine, order, ranks):
    first, second = (cached(engine, ranks=ranks, **order) for _ in range(2))
    wait(lambda: inspection.meets(ours(second)))
    first.generate(PREFIX)
    expected = engine(ranks=ranks).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_from_host") == len(PREFIX) // BLOCK * BLOCK
    assert_clean(first, second)
    for each in (first, second):
        for metadata in heard(each):
            assert len(metadata) == ranks


def test_the_hand_offs_of_another_connector_are_left_to_it(engine, order, log):
    one = cached(engine, **order)
    asked = prompt(100)
    answer = one.generate(asked, params=HANDOFF)
    params = answer.params
    assert (params is not None) == (len(order) > 1)
    assert not any(str(key).startswith("omni_") for key in params or {})
    remote = {"do_remote_prefill": True, "remote_engine_id": "a", "remote_block_ids": [[1]]}
    assert one.generate(asked, 6, params=remote).tokens == engine().generate(asked, 6).tokens
    assert not one.failures()
    assert not log
    assert_clean(one)


LOADS_ALL = {
    "kv_connector": "NoOpConnector",
    "kv_connector_module_path": no_op.MODULE,
    "kv_role": "kv_both",
}


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_another_connector_loads_is_no_miss_and_no_hit_of_ours(engine, place):
    one = cached(engine, connector="MultiConnector", **{place: [LOADS_ALL]})
    asked = prompt(6 * BLOCK + 1)
    one.generate(asked, params={"do_remote_prefill": True, "remote_num_tokens": len(asked)})
    counts = one.stats.data["counts"]
    assert one.count("tokens_from_others") >= 6 * BLOCK
    assert not [name for name in counts if name.startswith("missed:")]
    assert not one.count("tokens_cached")
    one.generate(prompt(3 * BLOCK, seed=5))
    assert counts["missed:never_seen"] == 2 * BLOCK
    hits = hit_rates([ours(one)._report._status._status()])
    assert hits["other"] > 0
    assert hits["own"] == 0


def beside_failing(engine, *, lifecycle=None, **options):
    """Two engines that share prefixes, each beside a connector whose loads fail."""
    options |= {"connector": "MultiConnector", "after": [FAILING]}
    options["extra"] = {"share": True, "handoff": False}
    first = engine("kv_both", lifecycle=lifecycle, **options)
    second = engine("kv_both", **options)
    wait(lambda: inspection.meets(ours(second)))
    return first, second


def settle(one):
    """Have an engine end its requests, and what it keeps of them be copied."""
    one.settle()
    _, worker = inspection.halves_beside(one.scheduler.connector, [one.worker])
    wait(lambda: inspection.copies_ended(worker))


def test_what_others_find_of_a_load_that_fails_in_the_same_step_is_not_kept(engine):
    """The second request has the block from vLLM's own cache, in the step that was to load it."""
    first, second = beside_failing(engine)
    asked = prompt(3 * BLOCK + 1)
    first.runner.bad_blocks.add(1)
    both = {"do_remote_prefill": True}, None
    ids = [first.submit(asked, max_tokens=6, params=params) for params in both]
    first.step()
    settle(first)
    expected = engine().generate(asked, 6).tokens
    assert [first.answers[each].tokens for each in ids] == [expected] * 2
    assert second.generate(asked, 6).tokens == expected
    assert first.generate(asked, 6).tokens == expected
    assert second.generate([*asked, 1], 6).tokens == engine().generate([*asked, 1], 6).tokens
    assert_clean(first, second)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("runner", [V1Runner, V2Runner])
@pytest.mark.parametrize("steps", range(4))
@pytest.mark.values
def test_who_goes_on_with_blocks_that_another_connector_failed_to_load_keeps_nothing(
    engine, steps, runner, overlap
):
    """vLLM has one request compute the blocks anew, in chunks. Another one that begins alike has
    some of them from vLLM's own cache, and its answer is vLLM's own fault; its KV is given to
    nobody. The steps are those between the failed load and its arrival."""
    first, second = beside_failing(engine, lifecycle=runner(), async_scheduling=overlap)
    asked = prompt(20 * BLOCK + 1)
    longer = [*asked, *prompt(10 * BLOCK, seed=9)]
    first.runner.bad_blocks.add(1)
    first.submit(asked, max_tokens=6, params={"do_remote_prefill": True})
    first.step()
    first.scheduler.max_num_scheduled_tokens = 2 * BLOCK
    for _ in range(steps):
        first.step()
    first.submit(longer, max_tokens=6)
    settle(first)
    for each in (longer, asked):
        assert second.generate(each, 6).tokens == engine().generate(each, 6).tokens
    assert_clean(first, second)


def test_what_the_window_of_such_a_request_has_lost_is_given_to_nobody(engine):
    """It has found the last blocks of the first in vLLM's cache, and not the one that was not
    loaded; what it computes stays in that cache when its window goes on."""
    first, second = beside_failing(engine, family="window", async_scheduling=True)
    asked = prompt(20 * BLOCK + 1)
    longer = [*asked, *prompt(20 * BLOCK, seed=9)]
    first.runner.bad_blocks.add(1)
    first.submit(asked, max_tokens=6, params={"do_remote_prefill": True})
    first.step()
    first.scheduler.max_num_scheduled_tokens = 2 * BLOCK
    first.submit(longer, max_tokens=6)
    first.settle()
    found = [*longer[: 30 * BLOCK], 3]
    first.generate(found)
    settle(first)
    expected = engine(family="window")
    for text in (longer, [*found, 5]):
        assert second.generate(text, 6).tokens == expected.generate(text, 6).tokens
    assert_clean(first, second)


def test_what_was_computed_upon_blocks_that_another_connector_failed_to_load_is_not_handed_off(
    engine,
):
    """vLLM finds it by its hashes, once their beginning was computed again."""
    options = {"connector": "MultiConnector", "after": [FAILING], "async_scheduling": True}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer")
    asked = prompt(20 * BLOCK + 1)
    longer = [*asked, *prompt(10 * BLOCK, seed=9)]
    prefill.runner.bad_blocks.add(1)
    prefill.submit(asked, max_tokens=6, params={"do_remote_prefill": True})
    prefill.step()
    prefill.scheduler.max_num_scheduled_tokens = 2 * BLOCK
    prefill.submit(longer)
    prefill.settle()
    prefill.generate(longer)
    found = [*longer, 3]
    answer = prefill.generate(found, params=HANDOFF).params
    assert decode.generate(found, 6, params=answer).tokens == engine().generate(found, 6).tokens


def test_what_requests_have_computed_that_end_with_a_failed_load_is_given_to_nobody(engine):
    """vLLM ends both, and leaves in its cache what the second has computed."""
    first, second = beside_failing(engine, policy="fail")
    asked = prompt(3 * BLOCK + 1)
    longer = [*asked, *prompt(3 * BLOCK, seed=9)]
    first.runner.bad_blocks.add(1)
    ids = [
        first.submit(each, params={"do_remote_prefill": True} if each is asked else None)
        for each in (asked, longer)
    ]
    first.settle()
    assert [first.answers[each].reason for each in ids] == [FinishReason.ERROR] * 2
    first.generate(asked)
    first.generate([*longer, 3])
    first.settle()
    assert second.generate([*longer, 3], 6).tokens == engine().generate([*longer, 3], 6).tokens
    assert_clean(first, second)


def test_a_block_that_another_connector_fails_to_load_instead_of_ours_is_not_kept(engine):
    """Of a prompt that was prefilled elsewhere it has the first block, and vLLM asks it first."""
    extra = {"share": True}
    prefill = engine("kv_producer")
    decode = engine("kv_both", extra=extra, connector="MultiConnector", before=[FAILING])
    other = engine("kv_both", extra=extra)
    wait(lambda: inspection.meets(ours(decode)) and inspection.meets(other.half))
    asked = prompt(3 * BLOCK + 1)
    params = prefill.generate(asked, params=HANDOFF).params
    request_id = decode.submit(asked, max_tokens=6, params=params)
    while not decode.scheduler.running:
        decode.runner.bad_blocks.add(1)
        decode.step()
    _, worker = inspection.halves_beside(decode.scheduler.connector, [decode.worker])
    wait(lambda: inspection.copies_ended(worker))
    decode.settle()
    expected = engine().generate(asked, 6).tokens
    assert decode.answers[request_id].tokens == expected
    assert other.generate(asked, 6).tokens == expected
    assert_clean(prefill, decode)


def test_a_worker_that_does_not_introduce_itself_is_named(engine, monkeypatch):
    monkeypatch.setattr(introductions, "ANSWER_S", 0.2)
    connect = rank_socket.connect
    monkeypatch.setattr(
        rank_socket, "connect", lambda folder, engine_id, *rank: connect(folder, "none", *rank)
    )
    with pytest.raises(ConfigError, match="worker 0 of OmniKVConnector has not introduced itself"):
        cached(engine, connector="MultiConnector")


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", b"\x91" * 5000])
def test_a_worker_that_lies_is_named(engine, monkeypatch, content):
    monkeypatch.setattr("omni_connector.vllm_v1.metadata.introduced", lambda *name: content)
    with pytest.raises(ConfigError, match="worker 0 of OmniKVConnector"):
        cached(engine, connector="MultiConnector")


def test_a_name_is_introduced_once(engine, runtime):
    cached(engine, connector="MultiConnector", engine_id="taken")
    with pytest.raises(TransportError, match="already"):
        rank_socket.listen(runtime_dir(), "taken", 0, introductions.introduction(b""))
