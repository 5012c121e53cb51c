# SPDX-License-Identifier: Apache-2.0
"""Circular buffers: a request's one block, in which each position has the place of its number
modulo the size of that. The next token reads the latest positions there."""

import pytest

from omni_connector.errors import LayoutError
from omni_connector.kv.shapes import GroupShape
from omni_connector.vllm_v1.specs import require_supported
from tests import toy
from tests.toy import BLOCK, RATIO, RING

from .harness import HANDOFF, assert_clean, hand_off, lose_loads, prompt, require_right_handoffs

pytestmark = pytest.mark.vllm

FAMILIES = ["ring and full", "ring and latent", "all and a ring"]
GROUP = {family: toy.FAMILIES[family].index("ring") for family in FAMILIES}
of_all = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.shows(
    "circular buffers: hand-offs",
    control="test_a_connector_that_leaves_out_the_ring_is_found_out",
)
@of_all
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "uncached"])
@pytest.mark.values
def test_every_place_of_the_ring_is_handed_off(engine, family, caching):
    options = {"family": family, "prefix_caching": caching}
    reference = engine(**options)
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    require_right_handoffs(prefill, decode, reference, range(2, 2 * RING + 3))


@of_all
@pytest.mark.parametrize("length", [BLOCK, 2 * RING, 5 * RING + 2])
def test_a_connector_that_leaves_out_the_ring_is_found_out(engine, family, monkeypatch, length):
    """Only where the next token reads it: not where the prompt ends with a compressed group."""
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    lose_loads(decode, GROUP[family], monkeypatch)
    asked = prompt(length)
    expected = engine(family=family).generate(asked, 6).tokens
    assert (hand_off(prefill, decode, asked) == expected) is ((length - 1) % RATIO == 0)
    assert decode.count("handoffs_received") == 1


@of_all
def test_a_ring_is_loaded_where_the_prefix_is_here(engine, family):
    """What vLLM's own prefix cache has of the prompt brings no ring."""
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    first = prompt(10 * BLOCK)
    hand_off(prefill, decode, first)
    for length in range(9 * BLOCK, 10 * BLOCK):
        asked = [*first[:length], 7]
        before = decode.count("bytes_loaded")
        assert hand_off(prefill, decode, asked) == engine(family=family).generate(asked, 6).tokens
        assert decode.count("bytes_loaded") > before or length % (3 * BLOCK) == 0
    assert decode.count("tokens_loaded") < 10 * BLOCK + BLOCK * 6 * BLOCK
    assert_clean(prefill, decode)


@pytest.mark.shows(
    "circular buffers between other tensor-parallel sizes",
    control="test_a_connector_that_leaves_out_the_ring_is_found_out",
)
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("family", ["ring and full", "ring and latent"])
@pytest.mark.values
def test_all_ranks_keep_the_whole_ring(engine, family, ranks):
    prefill = engine("kv_producer", family=family, ranks=ranks[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    lengths = (5, RING, 3 * RING + 5)
    require_right_handoffs(prefill, decode, engine(family=family), lengths)


@of_all
@pytest.mark.parametrize("rings", [(RING, 2 * RING), (2 * RING, RING)], ids=str)
def test_a_ring_of_another_size_is_refused_by_name(engine, monkeypatch, log, family, rings):
    made = []
    for role, ring in zip(("kv_producer", "kv_consumer"), rings, strict=True):
        make = toy.kv_cache_config
        monkeypatch.setattr(
            "tests.vllm_v1.harness.kv_cache_config",
            lambda *args, ring=ring, make=make, **options: make(*args, ring=ring, **options),
        )
        made.append(engine(role, family=family, block_size=64))
    prefill, decode = made
    asked = prompt(40)
    answer = prefill.generate(asked, params=HANDOFF).params
    expected = engine(family=family, block_size=64).generate(asked, 6).tokens
    assert decode.generate(asked, 6, params=answer).tokens == expected
    assert decode.failures() == {"incompatible_peer": 1}
    assert f"block_size of group {GROUP[family]} (circular_buffer)" in log[-1]


@pytest.mark.parametrize("drafts", [1, 5])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_rejected_drafts_leave_the_ring_right(engine, drafts, overlap):
    """Each engine writes its drafts to the ring before it knows which of them are right."""
    options = {
        "family": "ring and full",
        "drafter": "ngram_gpu" if overlap else "ngram",
        "drafts": drafts,
        "async_scheduling": overlap,
    }
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    for each in (prefill, decode):
        each.runner.proposed = lambda token_ids: [token_ids[-1]] * drafts
    for length in (RING - 1, RING, 3 * RING + 2):
        asked = prompt(length)
        expected = engine(family="ring and full").generate(asked, 20).tokens
        assert hand_off(prefill, decode, asked, 20) == expected
    assert decode.count("handoffs_received") == 3
    assert_clean(prefill, decode)


def test_a_prompt_has_one_block_of_a_ring():
    shape = GroupShape(
        kind="circular_buffer",
        block_size=RING,
        attention_type="ring",
        layers="",
        pages=("N12.C8",),
        uncached=True,
    )
    assert [shape.num_blocks(tokens) for tokens in (0, 1, RING, RING + 1, 500)] == [0, 1, 1, 1, 1]
    for tokens in (1, RING, RING + 1, 500):
        assert shape.needed(tokens) == shape.needed(tokens, start=tokens - 1) == range(1)


def test_a_ring_in_the_prefix_cache_is_refused():
    with pytest.raises(ValueError, match="prefix cache"):
        GroupShape(
            kind="circular_buffer", block_size=4, attention_type="ring", layers="", pages=("C8",)
        )


def test_other_groups_that_are_not_cached_are_refused_by_name(engine, monkeypatch):
    one = engine(family="window and full")
    spec = one.kv_config.kv_cache_groups[0].kv_cache_spec
    monkeypatch.setattr(type(spec), "prefix_cacheable", property(lambda self: False))
    with pytest.raises(LayoutError, match=r"leaves out layer model\.layers\.0\.mixer"):
        require_supported(one.config, one.kv_config)
