# SPDX-License-Identifier: Apache-2.0
"""Every kind of cache group and their mixtures, handed off under vLLM's own scheduler."""

import dataclasses

import pytest
from vllm.v1.request import FinishReason

from tests import inspection
from tests.toy import (
    BLOCK,
    CHUNK,
    FAMILIES,
    LAYERS,
    PAGE,
    REPLAYED,
    RING,
    RING_BYTES,
    STATE_BYTES,
    WINDOW,
)

from .harness import (
    HANDOFF,
    Answer,
    assert_clean,
    hand_off,
    prompt,
    require_right_handoffs,
    turn_plans,
)

pytestmark = pytest.mark.vllm

LENGTHS = [2, BLOCK - 3, BLOCK, BLOCK + 1, WINDOW, WINDOW + 2, 5 * BLOCK, 5 * BLOCK + 1, 150]
# Where all layers attend to chunks, vLLM takes the chunks before the last for cached.
ALL_TO_LOAD = [family for family in FAMILIES if family != "chunk"]


@pytest.mark.shows(
    "every kind of cache group, and their mixtures",
    control="test_a_connector_that_moves_nothing_is_found_out",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [4096, 24], ids=["whole", "chunked"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "uncached"])
@pytest.mark.values
def test_tokens_are_those_of_a_single_engine(engine, family, chunk, caching):
    options = {"family": family, "max_tokens_a_step": chunk, "prefix_caching": caching}
    reference = engine(**options)
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    to_load = family in ALL_TO_LOAD or not caching
    require_right_handoffs(prefill, decode, reference, LENGTHS, loads_all=to_load)
    if to_load:
        assert decode.count("tokens_loaded") == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("family", ALL_TO_LOAD)
@pytest.mark.parametrize("length", [4 * BLOCK + 1, 4 * BLOCK + 6, WINDOW + 2 * BLOCK])
@pytest.mark.values
def test_what_is_passed_on_spoils_nothing(engine, family, length):
    """A model whose prompt would be shortened passes no hand-off on: it would be loaded in whole,
    and vLLM would write its last token twice."""
    reference = engine(family=family)
    first, second, third = (engine("kv_both", family=family) for _ in range(3))
    asked = prompt(length)
    answer = first.generate(asked, params=HANDOFF).params
    passed = second.generate(asked, params={**answer, "do_remote_decode": True}).params
    assert second.count("tokens_loaded") == length - 1
    assert third.generate(asked, 6, params=passed).tokens == reference.generate(asked, 6).tokens
    longer = asked[:-1] + prompt(20, seed=9)
    assert second.generate(longer, 6).tokens == reference.generate(longer, 6).tokens
    if family in {"full", "latent"}:
        assert third.count("tokens_loaded") == length - 1
    else:
        assert passed["omni_no_handoff"] == "passed_on"
        assert second.failures() == {"passed_on": 1}
    assert_clean(first, second, third)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_connector_that_moves_nothing_is_found_out(engine, family):
    options = {"family": family, "connector": "NoOpConnector"}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    reference = engine(family=family)
    for length in LENGTHS[1:]:
        if family == "chunk" and (length - 1) % CHUNK == 0:  # the next token reads nothing
            continue
        asked = prompt(length)
        assert hand_off(prefill, decode, asked) != reference.generate(asked, 6).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_the_next_token_reads_is_moved(engine, family):
    options = {"family": family, "usable_blocks": 200}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    expected = 0
    for length in [*LENGTHS, 700]:
        hand_off(prefill, decode, prompt(length))
        end = length - 1
        sizes = {
            "full": -(-end // BLOCK) * PAGE,
            "window": (-(-end // BLOCK) - max(0, end - WINDOW + 1) // BLOCK) * PAGE,
            "replayed": (-(-end // BLOCK) - max(0, end - REPLAYED + 1) // BLOCK) * PAGE,
            "state": STATE_BYTES,
            "latent": -(-end // BLOCK) * PAGE,
            "chunk": (-(-end // BLOCK) - end // CHUNK * CHUNK // BLOCK) * PAGE,
            "ring": RING * RING_BYTES,
        }
        assert sizes["window"] <= (-(-WINDOW // BLOCK) + 1) * PAGE
        expected += LAYERS * sum(sizes[kind] for kind in FAMILIES[family])
        assert prefill.count("bytes_saved") == decode.count("bytes_loaded") == expected
    assert_clean(prefill, decode)


def in_turns(families, others):
    """Each family with each of `others`, which are values by name; and with and without a prefix
    cache in turn."""
    return [
        pytest.param(family, value, (number + place) % 2 == 0, id=f"{family}-{name}")
        for number, family in enumerate(families)
        for place, (name, value) in enumerate(others.items())
    ]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.values
def test_a_failed_load_ends_no_engine_and_serves_no_wrong_token(engine, family, policy):
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family, policy=policy)
    asked = prompt(7 * BLOCK + 3)
    for group in range(len(FAMILIES[family])):
        answer = prefill.generate(asked, params=HANDOFF).params
        handoff = prefill.handoffs[0]
        prefill.arena().slots[handoff.slots[group][-1]][3] ^= 1
        request_id = decode.submit(asked, max_tokens=6, params=answer)
        other = decode.submit(prompt(50, seed=1), max_tokens=4)
        decode.settle()
        if policy == "fail":
            assert decode.answers[request_id].reason is FinishReason.ERROR
            assert decode.answers[request_id].tokens == []
        else:
            expected = engine(family=family).generate(asked, 6).tokens
            assert decode.answers[request_id].tokens == expected
            decode.scheduler.reset_prefix_cache()
        expected = engine(family=family).generate(prompt(50, seed=1), 4).tokens
        assert decode.answers[other].tokens == expected
        prefill.scheduler.reset_prefix_cache(reset_connector=True)
        assert_clean(prefill, decode)
    assert decode.failures() == {"checksum_mismatch": len(FAMILIES[family])}


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_failed_load_hold_nothing_of_it(engine, family, monkeypatch):
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    answer = prefill.generate(prompt(7 * BLOCK), params=HANDOFF).params
    handoff = prefill.handoffs[0]
    for slots in handoff.slots:
        for slot in slots:
            prefill.arena().slots[slot][3] ^= 1
    zeroed = []
    copier = inspection.copier(decode.worker_half)
    zero = copier.zero

    def zero_too(group, ids, *, fence):
        zeroed.extend(ids)
        zero(group, ids, fence=fence)

    monkeypatch.setattr(copier, "zero", zero_too)
    decode.generate(prompt(7 * BLOCK), 6, params=answer)
    assert len(zeroed) == sum(len(slots) for slots in handoff.slots)


def test_a_prompt_whose_logprobs_are_asked_for_is_not_handed_off_where_it_would_be_cut(engine):
    prefill = engine("kv_producer", family="state and full")
    decode = engine("kv_consumer", family="state and full")
    asked = prompt(50)
    answer = prefill.generate(asked, params=HANDOFF, prompt_logprobs=1)
    assert answer.params["omni_no_handoff"] == "prompt_logprobs"
    assert prefill.failures() == {"prompt_logprobs": 1}
    reference = engine(family="state and full")
    assert answer.tokens == reference.generate(asked, 1).tokens
    assert decode.generate(asked, 6, params=answer.params).tokens == (
        reference.generate(asked, 6).tokens
    )
    assert_clean(prefill, decode)


def test_a_prompt_that_reads_no_prefix_cache_is_refused_under_that_name(engine):
    prefill = engine("kv_producer", family="state and full")
    request = prefill.request(prompt(50), params=HANDOFF)
    request.sampling_params.skip_reading_prefix_cache = True
    request.skip_reading_prefix_cache = True
    prefill.scheduler.add_request(request)
    assert prefill.failures() == {"skip_reading_prefix_cache": 1}
    prefill.abort(request.request_id)


@pytest.mark.parametrize("family", ["full", "state and full"])
def test_a_prompt_whose_logprobs_are_asked_for_is_loaded_by_nobody(
    engine, monkeypatch, log, family
):
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    connector, asked, matched = decode.scheduler.connector, prompt(50), []
    ask = connector.get_num_new_matched_tokens

    def noted(request, num_computed_tokens):
        matched.append(ask(request, num_computed_tokens))
        return matched[-1]

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", noted)
    params = prefill.generate(asked, params=HANDOFF).params
    expected = engine(family=family).generate(asked, 6).tokens
    assert decode.generate(asked, 6, params=params, prompt_logprobs=1).tokens == expected
    assert matched == [(0, False)]
    assert decode.count("tokens_loaded") == 0
    assert decode.failures() == {"prompt_logprobs": 1}
    assert [line for line in log if "prompt_logprobs" in line] == log
    assert len(log) == 1
    assert_clean(prefill, decode)
    # The prefill engine was told without a lease.
    assert prefill.handoffs == []
    assert prefill.count("leases") == prefill.count("handoffs_expired") == 0
    assert prefill.failures() == {}


def test_a_prompt_that_reads_no_prefix_cache_is_computed_under_that_name(engine, tokens, log):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    params = prefill.generate(prompt(50), params=HANDOFF).params
    request = decode.request(prompt(50), max_tokens=6, params=params)
    request.sampling_params.skip_reading_prefix_cache = True
    request.skip_reading_prefix_cache = True
    decode.answers[request.request_id] = Answer()
    decode.scheduler.add_request(request)
    decode.run(lambda: decode.done(request.request_id))
    assert decode.answers[request.request_id].tokens == tokens(prompt(50), 6)
    assert decode.failures() == {"skip_reading_prefix_cache": 1}
    assert len(log) == 1
    assert_clean(prefill, decode)


def test_a_prefill_that_is_cut_ends_with_one_token(engine):
    prefill = engine("kv_producer", family="state and full")
    decode = engine("kv_consumer", family="state and full")
    answer = prefill.generate(prompt(50), 30, params=HANDOFF)
    assert len(answer.tokens) == 1
    expected = engine(family="state and full").generate(prompt(50), 6).tokens
    assert decode.generate(prompt(50), 6, params=answer.params).tokens == expected


PAIRS = [(2, 2), (2, 1), (1, 2), (4, 4), (4, 1), (1, 4), (4, 2), (2, 4)]


@pytest.mark.shows(
    "heads and recurrent states between other tensor-parallel sizes",
    control="test_what_another_rank_has_of_them_is_noticed_by_these_tests",
)
@pytest.mark.parametrize("ranks", PAIRS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
@pytest.mark.parametrize("family", ["full", "window and full", "state and full", "all three"])
@pytest.mark.values
def test_heads_and_states_are_sliced_and_joined(engine, family, ranks):
    prefill = engine("kv_producer", family=family, ranks=ranks[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    reference = engine(family=family)
    require_right_handoffs(prefill, decode, reference, LENGTHS)


@pytest.mark.parametrize("kind", ["state", "full"])
def test_what_another_rank_has_of_them_is_noticed_by_these_tests(engine, monkeypatch, kind):
    """It has slots of the same size, with right checksums and generations."""
    family = "state and full"
    swapped = FAMILIES[family].index(kind)

    def turned(each, _, group, __):
        arenas = tuple(1 - at for at in each.arenas)
        return dataclasses.replace(each, arenas=arenas) if group == swapped else each

    turn_plans(monkeypatch, turned)
    prefill = engine("kv_producer", family=family, ranks=2)
    decode = engine("kv_consumer", family=family)
    asked = prompt(5 * BLOCK + 1)
    assert hand_off(prefill, decode, asked) != engine(family=family).generate(asked, 6).tokens
    assert decode.count("tokens_loaded") == 5 * BLOCK
    assert not decode.failures()


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)])
@pytest.mark.parametrize("side", [0, 1])
def test_states_whose_rule_is_not_known_move_between_equal_ranks_only(
    engine, ranks, side, log, monkeypatch
):
    family = "state and full"
    engines = []
    for number, role in enumerate(("kv_producer", "kv_consumer")):
        with monkeypatch.context() as patched:
            if number == side:
                patched.setattr("omni_connector.vllm_v1.states._RULES", {})
            engines.append(engine(role, family=family, ranks=ranks[number]))
    prefill, decode = engines
    answer = prefill.generate(prompt(70), params=HANDOFF).params
    expected = engine(family=family, ranks=ranks[1]).generate(prompt(70), 6).tokens
    assert decode.generate(prompt(70), 6, params=answer).tokens == expected
    if ranks[0] == ranks[1]:
        assert decode.count("handoffs_received") == 1
    else:
        assert decode.failures() == {"incompatible_peer": 1}
        assert "share out states in a way that is not known" in log[-1]


SIZES = [(16, 32), (32, 16), (16, 64), (64, 16)]


@pytest.mark.parametrize(
    ("family", "sizes", "caching"),
    in_turns(FAMILIES, {f"{theirs} to {ours}": (theirs, ours) for theirs, ours in SIZES}),
)
@pytest.mark.values
def test_blocks_of_another_size(engine, family, sizes, caching):
    """With and without a prefix cache in turn: each family meets all sizes, and both kinds of
    caching; and each pair of sizes both kinds."""
    options = {"family": family, "prefix_caching": caching}
    prefill = engine("kv_producer", block_size=sizes[0], **options)
    decode = engine("kv_consumer", block_size=sizes[1], **options)
    reference = engine(block_size=sizes[1], **options)
    for length in [*LENGTHS, 64, 65, 129]:
        asked = prompt(length)
        assert hand_off(prefill, decode, asked) == reference.generate(asked, 6).tokens
    shared = [*asked[:100], *prompt(40, seed=3)]
    assert hand_off(prefill, decode, shared) == reference.generate(shared, 6).tokens
    assert not decode.failures()
    assert_clean(prefill, decode)
