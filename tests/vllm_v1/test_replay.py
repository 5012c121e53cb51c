# SPDX-License-Identifier: Apache-2.0
"""Windows that vLLM keeps in no prefix cache (bounded replay): after a prefix hit it computes the
last window again. A hand-off brings the window, and vLLM computes nothing again."""

import pytest

from omni_connector.errors import LayoutError
from omni_connector.vllm_v1 import compat
from omni_connector.vllm_v1.connector import OmniKVConnector
from tests import toy
from tests.toy import BLOCK, REPLAYED

from .harness import assert_clean, hand_off, lose_loads, prompt, require_right_handoffs
from .stores import PREFIX, QUESTION, publish

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not compat.may_load_replayed(), reason="this vLLM replays every load"),
]

GROUP = {
    family: kinds.index("replayed") for family, kinds in toy.FAMILIES.items() if "replayed" in kinds
}
LENGTHS = [2, BLOCK, REPLAYED, REPLAYED + 1, 2 * REPLAYED, 5 * REPLAYED + 7]
of_all = pytest.mark.parametrize("family", GROUP)


@pytest.fixture
def computed(engine):
    """Notes of each engine the tokens that it computes, by request."""

    def note(one):
        tokens: dict[str, int] = {}
        forward = one.runner.forward

        def counted(step):
            for request_id, number in step.num_scheduled_tokens.items():
                tokens[request_id] = tokens.get(request_id, 0) + number
            return forward(step)

        one.runner.forward = counted
        return tokens

    return note


@pytest.mark.shows(
    "windows with bounded replay: hand-offs",
    control="test_a_hand_off_without_the_window_is_found_out",
)
@of_all
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "uncached"])
def test_a_hand_off_brings_the_window(engine, family, caching):
    options = {"family": family, "prefix_caching": caching}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    require_right_handoffs(prefill, decode, engine(**options), LENGTHS)


@of_all
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_after_a_hand_off_nothing_is_computed_again(engine, computed, family, overlap):
    options = {"family": family, "async_scheduling": overlap}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    tokens = computed(decode)
    asked = prompt(4 * REPLAYED + 5)
    hand_off(prefill, decode, asked, count=1)
    assert list(tokens.values()) == [1]


@of_all
@pytest.mark.parametrize("length", [BLOCK, 2 * REPLAYED, 5 * REPLAYED + 7])
def test_a_hand_off_without_the_window_is_found_out(engine, family, monkeypatch, length):
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    lose_loads(decode, GROUP[family], monkeypatch)
    asked = prompt(length)
    assert hand_off(prefill, decode, asked) != engine(family=family).generate(asked, 6).tokens
    assert decode.count("handoffs_received") == 1


@of_all
@pytest.mark.parametrize("local", [BLOCK, 2 * REPLAYED, 4 * REPLAYED], ids=str)
@pytest.mark.values
def test_a_window_is_loaded_where_the_prefix_is_here(engine, computed, family, local):
    """What vLLM's own prefix cache has of the prompt brings no window."""
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    first = prompt(4 * REPLAYED + 9)
    decode.generate(first[: local + 1])
    tokens = computed(decode)
    for asked in ([*first, 7], [*first[:-3], 7], first[: local + 3]):
        expected = engine(family=family).generate(asked, 6).tokens
        assert hand_off(prefill, decode, asked) == expected
    assert decode.count("handoffs_received") == 3
    assert set(tokens.values()) == {6}
    assert_clean(prefill, decode)


@of_all
def test_a_prefill_engine_that_computes_the_window_again_hands_it_off(engine, computed, family):
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    first = prompt(4 * REPLAYED)
    prefill.generate(first)
    tokens = computed(prefill)
    for more in (1, 2, BLOCK, REPLAYED + 3):
        asked = first + prompt(more, seed=more)
        assert hand_off(prefill, decode, asked) == engine(family=family).generate(asked, 6).tokens
    # Of all but the last token, which is left to the decode engine, a hit leaves one to compute.
    before = 3 * REPLAYED if "ring" in family else 4 * REPLAYED - BLOCK
    again = [4 * REPLAYED - before, 1, BLOCK - 1, REPLAYED + 2]
    assert list(tokens.values()) == [REPLAYED + each for each in again]
    assert_clean(prefill, decode)


@of_all
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.values
def test_windows_are_handed_off_between_ranks(engine, family, ranks):
    prefill = engine("kv_producer", family=family, ranks=ranks[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    lengths = (5, REPLAYED, 3 * REPLAYED + 5)
    require_right_handoffs(prefill, decode, engine(family=family), lengths)


# Shared prefixes


@pytest.mark.shows(
    "windows with bounded replay: shared prefixes",
    control="test_a_shared_prefix_of_wrong_bytes_is_found_out",
)
@of_all
@pytest.mark.parametrize("step", [4096, 2 * BLOCK + 5], ids=["whole", "chunks"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_the_last_window_of_a_shared_prefix_is_computed_again(
    sharer, shelf, engine, computed, family, ranks, overlap, step
):
    options = {
        "family": family,
        "ranks": ranks,
        "async_scheduling": overlap,
        "max_tokens_a_step": step,
    }
    first, second = sharer(**options), sharer(**options)
    publish(first, shelf)
    tokens = computed(second)
    expected = engine(family=family, ranks=ranks).generate(QUESTION, 6).tokens
    request_id = second.submit(QUESTION, max_tokens=6)
    second.settle()
    assert second.answers[request_id].tokens == expected
    assert second.count("tokens_shared") == len(PREFIX)
    assert tokens[request_id] >= len(QUESTION) - len(PREFIX) + REPLAYED
    assert not [key for key in shelf.entries if f"/{GROUP[family]}." in key]
    assert not second.failures()
    assert_clean(first, second)


@of_all
def test_the_last_window_of_a_prefix_in_the_own_arena_is_computed_again(engine, computed, family):
    one = engine("kv_both", family=family, extra={"share": True})
    one.generate(PREFIX)
    assert_clean(one)
    assert one.scheduler.reset_prefix_cache()
    tokens = computed(one)
    expected = engine(family=family).generate(QUESTION, 1).tokens
    assert one.generate(QUESTION).tokens == expected
    assert one.count("tokens_kept") == len(PREFIX)
    assert list(tokens.values()) == [len(QUESTION) - len(PREFIX) + REPLAYED]


@of_all
def test_a_prefix_no_longer_than_the_window_is_not_loaded(sharer, shelf, engine, family):
    first, second = sharer(family=family), sharer(family=family)
    publish(first, shelf)
    for asked in (PREFIX[: REPLAYED + 9], PREFIX[:REPLAYED] + prompt(9, seed=4)):
        assert second.generate(asked, 6).tokens == engine(family=family).generate(asked, 6).tokens
    assert second.count("tokens_shared") == 0
    assert_clean(first, second)


@of_all
def test_a_connector_that_says_it_loads_the_window_is_found_out(
    sharer, shelf, engine, family, monkeypatch
):
    first, second = sharer(family=family), sharer(family=family)
    publish(first, shelf)
    every = first.kv_config.transfer_group_ids
    monkeypatch.setattr(OmniKVConnector, "get_loaded_kv_cache_group_ids", lambda *_: every)
    answer = second.generate(QUESTION, 6)
    assert second.count("tokens_shared") == len(PREFIX)
    assert answer.tokens != engine(family=family).generate(QUESTION, 6).tokens


@of_all
def test_a_shared_prefix_of_wrong_bytes_is_found_out(sharer, shelf, engine, family, monkeypatch):
    monkeypatch.setattr("omni_connector.prefix.store_jobs.verify", lambda *args: None)
    first, second = sharer(family=family), sharer(family=family)
    publish(first, shelf)
    shelf.spoil(3)
    answer = second.generate(QUESTION, 6)
    assert second.count("tokens_shared") == len(PREFIX)
    assert answer.tokens != engine(family=family).generate(QUESTION, 6).tokens


def test_a_vllm_that_computes_the_window_again_after_each_load_is_refused(engine, monkeypatch):
    monkeypatch.setattr("omni_connector.vllm_v1.specs.may_load_replayed", lambda: False)
    with pytest.raises(LayoutError, match="--no-swa-bounded-replay"):
        engine("kv_both", family="replayed and full")
