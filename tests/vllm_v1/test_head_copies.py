# SPDX-License-Identifier: Apache-2.0
"""KV heads that several ranks hold, as a model has fewer of them than ranks, are kept once.

The toy model reads the KV of every rank with each token, and raises where two ranks hold different
bytes of one head. So an answer is right only if all ranks got the right bytes.
"""

import dataclasses
from collections import Counter

import pytest

from omni_connector.vllm_v1 import assembly
from tests import inspection
from tests.toy import BLOCK, LAYERS

from .harness import (
    HANDOFF,
    assert_clean,
    hand_off,
    prompt,
    require_right_handoffs,
    turn_plans,
)
from .stores import MASTER, PREFIX, QUESTION, landed
from .test_host_prefix import neighbours, publish, sharer  # noqa: F401 - a fixture
from .test_stripes import HEADS, LENGTHS, arena_bytes, published

pytestmark = pytest.mark.vllm

# Heads of the toy: 2 of `full`, 4 of `more`, whatever its configuration says.
between = pytest.mark.parametrize("ranks", HEADS, ids=lambda pair: f"{pair[0]} to {pair[1]}")


def stripes(engine):
    return inspection.compatibility(engine.half).num_stripes


def spread_in_part(engine):
    """Whether only some groups are kept once, and blocks of the others are divided."""
    return inspection.compatibility(engine.half).num_shards > 1


@pytest.mark.parametrize(
    ("family", "fewer", "ranks"), [("full", 2, 4), ("full", 2, 8), ("full", 4, 8), ("more", 4, 8)]
)
def test_a_token_takes_as_many_bytes_of_arenas_as_with_a_rank_for_each_head(
    engine, family, fewer, ranks
):
    one, several = (engine("kv_producer", family=family, ranks=each) for each in (fewer, ranks))
    asked = prompt(20 * BLOCK)
    for each in (one, several):
        each.generate(asked, params=HANDOFF)
    heads = 2 if family == "full" else 4
    assert sum(published(one)) == sum(published(several)) == heads * 20
    assert max(published(several)) == 20 * heads // ranks, "each rank saves its part"
    assert several.count("bytes_saved") == one.count("bytes_saved")
    assert arena_bytes(several) <= arena_bytes(one)
    assert abs(several.directory.num_slots - one.directory.num_slots) < ranks


@pytest.mark.shows(
    "one copy of a head that several ranks hold: hand-offs",
    control="test_the_slots_of_another_head_are_noticed_by_these_tests",
)
@pytest.mark.parametrize("family", ["full", "more", "more and full"])
@between
@pytest.mark.values
def test_every_rank_gets_the_bytes_of_a_handoff(engine, family, ranks):
    prefill = engine("kv_producer", family=family, ranks=ranks[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    reference = engine(family=family)
    heads = 4 if "more" in family else 2
    assert stripes(prefill) == (2 if spread_in_part(prefill) else max(1, ranks[0] // heads))
    assert spread_in_part(prefill) == (family == "more and full" and ranks[0] == 4)
    require_right_handoffs(prefill, decode, reference, LENGTHS)


@pytest.mark.parametrize(
    ("family", "ranks", "found"),
    [
        ("more and full", 8, 2),
        ("more and full", 4, 2),
        ("latent and full", 8, 4),
        ("ring and full", 4, 2),
        ("state and full", 4, 2),
        ("all three", 4, 2),
    ],
)
def test_ranks_that_hold_the_same_of_some_groups_share_a_copy(engine, family, ranks, found):
    """Those of the greatest common factor. States are divided over all ranks."""
    options = {"family": family, "ranks": ranks}
    prefill, decode = (engine(role, **options) for role in ("kv_producer", "kv_consumer"))
    assert stripes(prefill) == found
    reference = engine(family=family)
    require_right_handoffs(prefill, decode, reference, LENGTHS)


@pytest.mark.parametrize("ranks", [(8, 8), (8, 4), (8, 2), (2, 8)], ids=str)
@pytest.mark.parametrize(
    "family", ["full and drafter", "full and wide drafter", "latent and drafter"]
)
@pytest.mark.values
def test_the_heads_of_a_drafter_count_by_themselves(engine, family, ranks):
    options = {"family": family, "drafter": "mtp", "drafts": 2}
    prefill = engine("kv_producer", ranks=ranks[0], **options)
    decode = engine("kv_consumer", ranks=ranks[1], **options)
    found = {"full and drafter": 4, "full and wide drafter": 2, "latent and drafter": 4}[family]
    # Two ranks keep the latent cache once, and heads of the drafter of their own.
    fewer = 2 if family == "latent and drafter" else 1
    assert stripes(prefill) == (found if ranks[0] == 8 else fewer)
    reference = engine(None, **options)
    # The runner compares the drafter's KV, too.
    require_right_handoffs(prefill, decode, reference, LENGTHS)


@pytest.mark.parametrize(
    ("family", "stages", "ranks", "found"),
    [
        ("full", (1,), 4, 2),
        ("full", (1, 2), 8, 4),
        ("more and full", (LAYERS,), 8, (2, 4)),
        ("more and full", (1,), 8, 2),
        ("ring and full", (LAYERS,), 4, (4, 2)),
        ("latent and full", (LAYERS,), 4, (4, 2)),
        ("state and full", (LAYERS,), 4, (1, 2)),
    ],
    ids=str,
)
def test_each_pipeline_stage_spreads_its_slots_over_as_many_ranks_as_its_layers_allow(
    engine, family, stages, ranks, found
):
    """A stage may have the layers of one group alone."""
    options = {"family": family, "ranks": ranks}
    both = engine("kv_both", stages=stages, extra={"share": False}, **options)
    prefill, decode = (
        engine(role, stages=stages, **options) for role in ("kv_producer", "kv_consumer")
    )
    assert stripes(prefill) == stripes(both) == found
    alone = engine("kv_consumer", **options)
    reference = engine(family=family)
    require_right_handoffs(prefill, decode, reference, LENGTHS)
    require_right_handoffs(both, alone, reference, LENGTHS)


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_slots_of_another_head_are_noticed_by_these_tests(engine, monkeypatch, ranks):
    of_head = {each: (each + ranks // 2) % ranks for each in range(ranks)}
    turn_plans(
        monkeypatch,
        lambda each, *_: dataclasses.replace(each, arenas=tuple(map(of_head.get, each.arenas))),
    )
    prefill, decode = (engine(role, ranks=ranks) for role in ("kv_producer", "kv_consumer"))
    asked = prompt(8 * BLOCK + 1)
    assert hand_off(prefill, decode, asked) != engine().generate(asked, 6).tokens
    assert decode.count("tokens_loaded") == 8 * BLOCK
    assert not decode.failures()


def test_an_engine_that_keeps_a_copy_a_rank_is_no_neighbour(sharer, engine, monkeypatch):  # noqa: F811
    first = sharer(ranks=4)
    with monkeypatch.context() as apart:
        apart.setattr(assembly, "num_near_ranks", lambda _: 1)
        second = engine("kv_both", extra={"share": True}, ranks=4)
    assert (stripes(first), stripes(second)) == (2, 1)
    publish(first)
    assert not neighbours(second).present()
    assert second.generate(QUESTION, 6).tokens == engine().generate(QUESTION, 6).tokens
    assert second.count("tokens_from_host") == 0


def test_where_it_is_not_known_which_ranks_hold_the_same_each_keeps_all(engine, monkeypatch):
    """The plugin was loaded after the model, or the model has projections of its own."""
    with monkeypatch.context() as unknown:
        unknown.setattr("tests.vllm_v1.harness.head_copies", lambda *_: {})
        prefill = engine("kv_producer", ranks=4)
    assert stripes(prefill) == 1
    asked = prompt(8 * BLOCK + 1)
    expected = engine().generate(asked, 6).tokens
    for ranks in (1, 2, 4):
        decode = engine("kv_consumer", ranks=ranks)
        assert hand_off(prefill, decode, asked) == expected
        assert decode.count("tokens_loaded") == 8 * BLOCK
    assert published(prefill) == [8] * 4


@pytest.mark.parametrize(
    ("family", "ranks", "heads"),
    [("full", 4, [2]), ("more and full", 8, [4, 2]), ("latent and full", 4, [1, 2])],
)
def test_a_store_has_one_entry_of_a_head(engine, shelf, family, ranks, heads):
    options = {"family": family, "ranks": ranks, "extra": MASTER}
    first, second = engine("kv_both", **options), engine("kv_both", **options)
    first.generate(PREFIX)
    landed(first)
    entries = Counter(key.split("/")[-2] for key in shelf.entries)
    owners = [(g, r) for g, n in enumerate(heads) for r in range(0, ranks, ranks // n)]
    assert entries == {f"{group}.{rank}": 6 for group, rank in owners}
    assert second.generate(QUESTION, 6).tokens == engine(family=family).generate(QUESTION, 6).tokens
    assert second.count("tokens_shared") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


def test_an_engine_that_knows_of_no_copies_reads_no_other_heads_in_a_store(
    engine, shelf, monkeypatch
):
    """It misses the entries that others do not make, and makes its own, which others read."""
    with monkeypatch.context() as unknown:
        unknown.setattr("tests.vllm_v1.harness.head_copies", lambda *_: {})
        older = engine("kv_both", ranks=4, extra=MASTER)
    newer, third = (engine("kv_both", ranks=4, extra=MASTER) for _ in range(2))
    expected = engine().generate(QUESTION, 6).tokens
    newer.generate(PREFIX)
    landed(newer)
    assert older.generate(QUESTION, 6).tokens == expected
    landed(older)
    assert older.count("tokens_shared") == 0
    assert {key.split("/")[-2] for key in shelf.entries} == {"0.0", "0.1", "0.2", "0.3"}
    shelf.evict(lambda key: "/0.1/" in key or "/0.3/" in key)
    assert third.generate(QUESTION, 6).tokens == expected
    assert third.count("tokens_shared") == 6 * BLOCK
