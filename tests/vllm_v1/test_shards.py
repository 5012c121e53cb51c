# SPDX-License-Identifier: Apache-2.0
"""KV that ranks hold alike is kept once beside states of which each rank has its own.

As in Qwen3-Next, of whose 2 KV heads 4 or 8 ranks hold copies beside gated delta nets, and in Kimi
Linear, whose latent cache all ranks hold. The toy model reads the KV of every rank with each token,
and raises where two ranks hold different bytes of one head. So an answer is right only if all ranks
got the right bytes of all groups.
"""

import dataclasses

import msgspec
import pytest
from msgspec import UNSET
from vllm.config.kv_events import KVEventsConfig

from tests import inspection, toy, toy_runner
from tests.toy import BLOCK

from .harness import (
    HANDOFF,
    assert_clean,
    hand_off,
    prompt,
    require_right_handoffs,
    slots,
    turn_plans,
    wait,
)
from .places import Place, ask, publish
from .stores import MASTER
from .test_head_copies import between
from .test_stripes import LENGTHS, published, require_void

pytestmark = pytest.mark.vllm

FAMILIES = ["state and full", "state and latent", "all three"]
NEW = [7, 8, 9]

each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def states_of_eight_ranks(monkeypatch):
    monkeypatch.setattr(toy, "STATE_HEADS", 8)
    inputs = toy.INPUTS * (8 * toy.HEAD_DIM + 2 * toy.STATE_SIZE) * 2
    for module in (toy, toy_runner):
        monkeypatch.setattr(module, "STATE_BYTES", inputs + 8 * toy.HEAD_DIM * toy.STATE_SIZE * 4)


@pytest.fixture
def place(engine):
    return Place(engine, {"share": True}, "tokens_from_host")


def shards(engine):
    return inspection.compatibility(engine.half).num_shards


def expected_shards(family, ranks):
    """As many ranks hold the same of the groups of which any do."""
    return ranks if family == "state and latent" else max(1, ranks // toy.HEADS)


@each_family
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.values
def test_attention_takes_as_many_slots_as_with_a_rank_for_each_head(engine, family, ranks):
    """A state takes one of each rank, as it must."""
    several = engine("kv_producer", family=family, ranks=ranks)
    assert shards(several) == expected_shards(family, ranks)
    asked = prompt(20 * BLOCK + 3)
    several.generate(asked, params=HANDOFF)
    heads = 1 if "latent" in family else toy.HEADS
    blocks = [
        (shape.attention_type, len(shape.needed(len(asked) - 1)))
        for shape in inspection.compatibility(several.half).groups
    ]
    found = published(several)
    assert sum(found) == sum(
        number * (ranks if attention == "last" else heads) for attention, number in blocks
    )
    assert max(found) - min(found) <= 1, "each rank saves its part"
    alone = engine("kv_producer", family=family)
    alone.generate(asked, params=HANDOFF)
    assert sum(published(alone)) == sum(number for _, number in blocks)


@pytest.mark.shows(
    "one copy of heads or latents beside recurrent states: hand-offs",
    control="test_shards_of_another_rank_are_noticed_by_these_tests",
)
@each_family
@between
@pytest.mark.values
def test_every_rank_gets_the_bytes_of_a_handoff(engine, family, ranks):
    prefill = engine("kv_producer", family=family, ranks=ranks[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    assert shards(prefill) == expected_shards(family, ranks[0])
    require_right_handoffs(prefill, decode, engine(family=family), LENGTHS)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("ranks", [(4, 4), (4, 2), (8, 4), (2, 8)], ids=str)
@pytest.mark.parametrize("family", ["state and latent", "all three"])
@pytest.mark.values
def test_blocks_of_another_size_are_made_of_slots_of_several_ranks(engine, family, ranks, sizes):
    prefill = engine("kv_producer", family=family, ranks=ranks[0], block_size=sizes[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1], block_size=sizes[1])
    require_right_handoffs(prefill, decode, engine(family=family, block_size=sizes[1]), LENGTHS)


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (8, 4)], ids=str)
def test_an_engine_that_shares_hands_off_and_receives_in_shards(engine, ranks):
    """Both sides have arenas, and divide blocks into other numbers of shards."""
    one, other = (
        engine("kv_both", family="state and latent", ranks=each, extra={"share": True})
        for each in ranks
    )
    for each in (one, other):
        inspection.neighbours(each.half).look()
        wait(lambda of=each: not inspection.neighbours(of.half).present())
    reference = engine(family="state and latent")
    for length in LENGTHS:
        asked = prompt(length)
        expected = reference.generate(asked, 6).tokens
        assert hand_off(one, other, asked) == expected
        again = prompt(length, seed=1)
        assert hand_off(other, one, again) == reference.generate(again, 6).tokens
    for each in (one, other):
        assert each.count("handoffs_received") == len(LENGTHS)
        assert not each.failures()


@pytest.mark.shows(
    "one copy of heads or latents beside recurrent states: shared prefixes",
    control="test_shards_of_another_rank_are_noticed_by_these_tests",
)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@each_family
@pytest.mark.values
def test_a_neighbours_blocks_are_read_in_shards(place, engine, family, ranks, overlap):
    options = {"family": family, "ranks": ranks, "async_scheduling": overlap}
    options |= {"max_tokens_a_step": 2 * BLOCK + 5, "usable_blocks": 200}
    first, second, alone = place(**options), place(**options), engine(family=family)
    assert shards(first) == expected_shards(family, ranks)
    long = prompt(9 * BLOCK + 3, seed=3)
    publish(place, first, long)
    loaded = [
        ask(place, second, [*long[: blocks * BLOCK + 5], *prompt(40, seed=blocks)], alone)
        for blocks in (3, 7, 8)
    ]
    assert loaded == [2 * BLOCK, 4 * BLOCK, 2 * BLOCK]
    assert not second.failures()
    assert_clean(first, second)


@pytest.mark.parametrize("where", ["arena", "store"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@each_family
@pytest.mark.values
def test_the_next_turn_goes_on_within_a_block(engine, shelf, family, ranks, where):
    extra = {"share": True} if where == "arena" else MASTER
    place = Place(engine, extra, "tokens_from_host" if where == "arena" else "tokens_shared")
    options = {"family": family, "ranks": ranks, "usable_blocks": 200}
    first, second, alone = place(**options), place(**options), engine(family=family)
    for length in (1, 7, BLOCK, 2 * BLOCK + 5):
        question = prompt(4 * BLOCK + 9, seed=length)
        said = question + publish(place, first, question, max_tokens=length)
        assert ask(place, second, [*said, *NEW], alone, count=3 * BLOCK) == len(said) - 1
        other = [*question, said[-1] % 400 + 3, *NEW]
        assert ask(place, second, other, alone) >= 4 * BLOCK
    assert first.count("tails_kept") > 4
    assert not second.failures()
    assert_clean(first, second)


@pytest.mark.parametrize("sharing", [False, True], ids=["hand-off", "sharing"])
@each_family
@pytest.mark.values
def test_shards_of_another_rank_are_noticed_by_these_tests(
    engine, place, monkeypatch, family, sharing
):
    """They hold states of the same tokens, with right checksums and generations."""

    def turned(each, found, *_):
        number = len(found.sources[0].arenas)
        shard = (each.shard + 1) % number if found.divided else each.shard
        return dataclasses.replace(each, shard=shard)

    turn_plans(monkeypatch, turned)
    asked = prompt(8 * BLOCK + 1)
    expected = engine(family=family).generate([*asked, 5], 6).tokens
    if sharing:
        first, second = (place(family=family, ranks=4, usable_blocks=200) for _ in range(2))
        publish(place, first, asked)
        answer = second.generate([*asked, 5], 6).tokens
        assert place.loaded(second) >= 8 * BLOCK
    else:
        prefill, second = (
            engine(role, family=family, ranks=4) for role in ("kv_producer", "kv_consumer")
        )
        answer = hand_off(prefill, second, [*asked, 5])
        assert second.count("tokens_loaded") == 8 * BLOCK + 1
    assert answer != expected


@each_family
def test_a_connector_that_moves_nothing_is_noticed_by_these_tests(engine, family):
    options = {"connector": "NoOpConnector", "family": family, "ranks": 4}
    prefill, decode = (engine(role, **options) for role in ("kv_producer", "kv_consumer"))
    with pytest.raises(toy_runner.WrongBytes):
        hand_off(prefill, decode, prompt(8 * BLOCK + 1))


def test_wrong_bytes_of_one_shard_are_noticed_by_its_rank(place, engine):
    first, second = (place(family="state and latent", ranks=4, usable_blocks=200) for _ in range(2))
    asked = prompt(4 * BLOCK + 9)
    publish(place, first, asked)
    first.arena(2).slots[:] ^= 0x10
    expected = engine(family="state and latent").generate([*asked, *NEW], 6).tokens
    assert second.generate([*asked, *NEW], 6).tokens == expected
    assert set(second.failures()) == {"checksum_mismatch"}
    assert_clean(first, second)


def test_new_weights_void_what_each_rank_has(engine):
    require_void(engine, "state and full", stripes=4)


EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


@pytest.mark.parametrize(
    "options", [{"stages": (3,)}, {"events": EVENTS}], ids=["stages", "events"]
)
def test_where_no_block_may_be_divided_each_rank_keeps_all(engine, options):
    """With pipeline stages a rank does not know the groups of the others; and KV events tell of
    whole blocks."""
    prefill = engine("kv_producer", family="state and full", ranks=4, **options)
    assert shards(prefill) == 1
    decode = engine("kv_consumer", family="state and full", ranks=2)
    require_right_handoffs(prefill, decode, engine(family="state and full"), LENGTHS)


def test_a_version_that_knows_no_shards_is_refused_by_name(engine, log):
    prefill = engine("kv_producer", family="state and full", ranks=4)
    decode = engine("kv_consumer", family="state and full")
    asked = prompt(4 * BLOCK + 1)
    answer = prefill.generate(asked, params=HANDOFF).params
    inspection.learn(decode.half, shards=UNSET)
    expected = engine(family="state and full").generate(asked, 6).tokens
    assert decode.generate(asked, 6, params=answer).tokens == expected
    assert decode.failures() == {"incompatible_peer": 1}
    assert "shards of blocks" in log[-1]


def test_a_version_that_knows_no_shards_serves_one_that_does(engine):
    """It leaves the field out that it does not know."""
    key = inspection.compatibility(
        engine("kv_both", family="state and full", ranks=4, extra={"share": True}).half
    )
    older = msgspec.structs.replace(key, shards=UNSET)
    assert (key.num_shards, key.stripes, older.num_stripes) == (2, 1, 1)
    assert older.difference(key) is None
    assert not older.has_bytes_of(key)


def test_an_arena_of_a_slot_a_rank_keeps_one_divided_block_and_comes_to_rest(engine):
    alone = engine("kv_both", family="state and full", ranks=8, extra={"share": True, **slots(8)})
    assert shards(alone) == 4
    alone.generate(prompt(6 * BLOCK + 9))
    alone.settle()
    assert inspection.prefix_saves(alone.half).num_waiting == 0
