# SPDX-License-Identifier: Apache-2.0
"""KV that all tensor-parallel ranks hold is kept once an engine: each slot in one rank's arena.

The toy model reads the KV of every rank with each token, and raises where two ranks hold different
bytes of what both hold. So an answer is right only if all ranks got the right bytes.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from msgspec import UNSET

from omni_connector.arena.format import SlotState
from omni_connector.errors import ConfigError
from omni_connector.vllm_v1 import assembly
from omni_connector.vllm_v1.metadata import num_near_ranks
from tests import inspection
from tests.toy import BLOCK, LAYERS
from tests.toy_runner import WrongBytes

from .harness import (
    HANDOFF,
    assert_clean,
    hand_off,
    leased,
    prompt,
    require_right_handoffs,
    run,
    turn_plans,
    wait,
)
from .stores import QUESTION
from .test_host_prefix import neighbours, publish, sharer  # noqa: F401 - a fixture

pytestmark = pytest.mark.vllm

LENGTHS = [2, BLOCK, BLOCK + 1, 5 * BLOCK + 1, 150]
SIZES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8), (8, 8)]
LATENT = {"family": "latent"}
HEADS = [pair for pair in itertools.product((1, 2, 4, 8), repeat=2) if max(pair) > 2]
"""Numbers of ranks, of which some have one of the two heads of `full` in common."""

# What several ranks hold alike: all of it, or each of two heads.
kept_once = pytest.mark.parametrize(("family", "ranks"), [("latent", 2), ("full", 4)])


def published(engine):
    """How many slots hold a block, by rank."""
    arenas = [engine.arena(rank) for rank in range(len(engine.workers))]
    return [
        sum(arena.header(slot).state == SlotState.PUBLISHED for slot in range(arena.n_slots))
        for arena in arenas
    ]


def arena_bytes(engine):
    return sum(engine.arena(rank).slots.nbytes for rank in range(len(engine.workers)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_token_takes_as_many_bytes_of_arenas_as_with_one_rank(engine, ranks):
    one, several = engine("kv_producer", **LATENT), engine("kv_producer", ranks=ranks, **LATENT)
    least = one.directory.num_slots // ranks * ranks  # the rest is no slot for each rank
    assert several.directory.num_slots == least
    assert arena_bytes(several) <= arena_bytes(one)
    asked = prompt(20 * BLOCK)
    for each in (one, several):
        each.generate(asked, params=HANDOFF)
    assert sum(published(several)) == sum(published(one)) == 20
    assert max(published(several)) == -(-20 // ranks), "each rank saves its part"
    assert several.count("bytes_saved") == one.count("bytes_saved")


@pytest.mark.parametrize(("family", "ranks"), [("full", 2), ("more", 4)])
def test_where_ranks_hold_heads_of_their_own_each_keeps_every_block(engine, family, ranks):
    several = engine("kv_producer", family=family, ranks=ranks)
    several.generate(prompt(20 * BLOCK), params=HANDOFF)
    assert published(several) == [20] * ranks


@pytest.mark.shows(
    "one copy of MLA for all ranks: hand-offs",
    control="test_slots_of_another_stripe_are_noticed_by_these_tests",
)
@pytest.mark.parametrize("ranks", SIZES, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def test_every_rank_gets_the_bytes_of_a_handoff(engine, ranks):
    prefill = engine("kv_producer", ranks=ranks[0], **LATENT)
    decode = engine("kv_consumer", ranks=ranks[1], **LATENT)
    reference = engine(**LATENT)
    require_right_handoffs(prefill, decode, reference, LENGTHS)
    assert decode.count("bytes_loaded") == ranks[1] * prefill.count("bytes_saved")


@pytest.mark.parametrize("stages", [(), (2,), (3,)], ids=str)
@pytest.mark.parametrize(("family", "stripes"), [("ring and latent", 2), ("ring and full", 2)])
@pytest.mark.values
def test_some_groups_must_be_the_same_on_all_ranks(engine, family, stripes, stages):
    """With pipeline stages, all groups of a stage: which may have the layers of one alone."""
    if stages and family == "ring and full":
        stripes = (2, 1)
    options = {"family": family, "ranks": 2, "stages": stages}
    prefill, decode = (engine(role, **options) for role in ("kv_producer", "kv_consumer"))
    assert inspection.compatibility(prefill.half).num_stripes == stripes
    reference = engine(family=family)
    require_right_handoffs(prefill, decode, reference, LENGTHS)


def other_stripe(monkeypatch):
    """Have ranks read each slot in the arena of the rank after its owner's."""
    turn_plans(
        monkeypatch,
        lambda each, *_: dataclasses.replace(each, arenas=each.arenas[1:] + each.arenas[:1]),
    )


def test_a_rank_that_alone_reads_another_stripe_is_noticed_by_these_tests(engine, monkeypatch):
    prefill, decode = (engine(role, ranks=2, **LATENT) for role in ("kv_producer", "kv_consumer"))
    wrong = inspection.load_plans(decode.worker_halves[1])

    def turned(each, _, __, plans):
        return dataclasses.replace(each, arenas=each.arenas[::-1]) if plans is wrong else each

    turn_plans(monkeypatch, turned)
    with pytest.raises(WrongBytes, match="two ranks keep different bytes"):
        hand_off(prefill, decode, prompt(8 * BLOCK + 1))
    assert not decode.failures()


def test_the_own_blocks_in_another_stripe_are_not_read(sharer, engine, monkeypatch):  # noqa: F811
    """The header of a slot names its block."""
    alone = sharer(usable_blocks=32, ranks=2, **LATENT)
    publish(alone)
    for seed in range(5):
        publish(alone, prompt(8 * BLOCK, seed=seed))
    other_stripe(monkeypatch)
    assert alone.generate(QUESTION, 6).tokens == engine(**LATENT).generate(QUESTION, 6).tokens
    assert alone.count("tokens_kept") == 0
    assert set(alone.failures()) == {"stale_slot"}
    assert_clean(alone)


@pytest.mark.parametrize(
    ("ranks", "stages", "hosts", "executor", "near"),
    [
        (8, 1, 1, "mp", 8),
        (8, 2, 1, "mp", 8),
        (8, 2, 2, "mp", 8),
        (16, 1, 2, "mp", 1),
        (6, 2, 3, "mp", 1),
        (1, 4, 2, "mp", 1),
        (8, 1, 1, "ray", 1),
        (8, 1, 1, "external_launcher", 1),
    ],
)
def test_ranks_are_near_if_a_stage_is_on_one_host(ranks, stages, hosts, executor, near):
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        nnodes_within_dp=hosts,
        distributed_executor_backend=executor,
    )
    assert num_near_ranks(SimpleNamespace(parallel_config=parallel)) == near


def test_ranks_that_disagree_about_stripes_are_refused(engine, monkeypatch):
    said = iter([2, 1])
    monkeypatch.setattr(assembly, "num_near_ranks", lambda _: next(said))
    with pytest.raises(ConfigError, match="only some ranks"):
        engine("kv_producer", ranks=2, **LATENT)


def test_a_version_that_knows_no_stripes_reads_and_is_read_as_before(engine):
    prefill, decode = engine("kv_producer", **LATENT), engine("kv_consumer", ranks=2, **LATENT)
    inspection.learn(decode.half, stripes=UNSET)
    asked = prompt(4 * BLOCK + 1)
    assert hand_off(prefill, decode, asked) == engine(**LATENT).generate(asked, 6).tokens
    assert decode.count("tokens_loaded") == 4 * BLOCK


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [*(("latent", pair) for pair in SIZES), *(("full", pair) for pair in HEADS)],
    ids=str,
)
@pytest.mark.values
def test_blocks_of_another_size_are_made_of_slots_of_several_ranks(engine, family, ranks, sizes):
    prefill = engine("kv_producer", family=family, ranks=ranks[0], block_size=sizes[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1], block_size=sizes[1])
    reference = engine(family=family, block_size=sizes[1])
    require_right_handoffs(prefill, decode, reference, LENGTHS)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("latent", (2, 1)),
        ("latent", (4, 2)),
        ("full", (4, 2)),
        ("full", (8, 8)),
        ("full", (8, 1)),
    ],
    ids=str,
)
def test_slots_of_another_stripe_are_noticed_by_these_tests(engine, monkeypatch, family, ranks):
    """They hold whole blocks of the same prompt, with right checksums and generations."""
    other_stripe(monkeypatch)
    prefill = engine("kv_producer", family=family, ranks=ranks[0])
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    asked = prompt(8 * BLOCK + 1)
    expected = engine(family=family).generate(asked, 6).tokens
    assert hand_off(prefill, decode, asked) != expected
    assert decode.count("tokens_loaded") == 8 * BLOCK
    assert not decode.failures()


@pytest.mark.parametrize(
    ("family", "ranks"), [("latent", 2), ("latent", 8), ("full", 4), ("more and full", 8)]
)
def test_an_engine_gets_back_what_its_own_cache_has_evicted(sharer, engine, family, ranks):  # noqa: F811
    alone = sharer(usable_blocks=64, family=family, ranks=ranks)
    publish(alone)
    for seed in range(10):
        publish(alone, prompt(8 * BLOCK, seed=seed))
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert alone.generate(QUESTION, 6).tokens == expected
    assert alone.count("tokens_kept") == 6 * BLOCK
    assert not alone.failures()
    assert_clean(alone)


@pytest.mark.shows(
    "one copy of latents, or of a head, that several ranks hold: shared prefixes",
    control="test_wrong_bytes_in_one_rank_are_noticed",
)
@pytest.mark.parametrize(
    ("family", "ranks", "stages"),
    [
        ("latent", 2, ()),
        ("latent", 8, (1,)),
        ("full", 4, (1,)),
        ("full", 8, ()),
        ("more and full", 4, ()),
        ("more and full", 8, (LAYERS,)),
    ],
    ids=str,
)
def test_a_neighbours_blocks_are_read_from_all_its_ranks(
    sharer,  # noqa: F811
    engine,
    family,
    ranks,
    stages,
):
    options = {"family": family, "ranks": ranks, "stages": stages}
    first, second = sharer(**options), sharer(**options)
    publish(first)
    expected = engine(family=family).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


@kept_once
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_wrong_bytes_in_one_rank_are_noticed(sharer, engine, monkeypatch, family, ranks, checked):  # noqa: F811
    if not checked:
        inspection.compare_nothing(monkeypatch.setattr)
    options = {"family": family, "ranks": ranks}
    first, second = sharer(**options), sharer(**options)
    publish(first)
    first.arena(ranks // 2).slots[:] ^= 0x10
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert (second.generate(QUESTION, 6).tokens == expected) == checked
    if checked:
        assert set(second.failures()) == {"checksum_mismatch"}
        assert_clean(first, second)
    else:
        assert second.count("tokens_from_host") == 6 * BLOCK


@kept_once
def test_an_orphan_is_read_from_all_its_ranks(sharer, engine, family, ranks):  # noqa: F811
    options = {"family": family, "ranks": ranks}
    first, second = sharer(**options), sharer(**options)
    publish(first)
    first.shutdown()
    wait(lambda: [each.orphan for each in neighbours(second).present()] == [True])
    successor = engine("kv_both", extra={"share": True}, **options)
    wait(lambda: any(each.orphan for each in neighbours(successor).present()))
    expected = engine(family=family).generate(QUESTION, 6).tokens
    for each in (second, successor):
        assert each.generate(QUESTION, 6).tokens == expected
        assert each.count("tokens_from_host") > 0
        assert not each.failures()


@pytest.mark.parametrize("family", ["latent", "full"])
def test_new_weights_void_what_each_rank_owns(engine, family):
    require_void(engine, family, stripes=8 if family == "latent" else 4)


def require_void(engine, family, stripes):
    """After new weights, no rank of eight has anything that was computed with the old ones."""
    roles = ("kv_producer", "kv_consumer")
    prefill, decode = (engine(role, family=family, ranks=8) for role in roles)
    asked = prompt(8 * BLOCK + 1)
    late = leased(prefill, decode, asked)
    [handoff] = prefill.handoffs
    generations = prefill.directory.pool.generation[handoff.held].tolist()
    read = dict(zip(handoff.held.tolist(), generations, strict=True))
    prefill.runner.weights = b"new"
    assert prefill.scheduler.reset_prefix_cache(reset_connector=True)
    for seed in range(2):  # the ranks say which weights they have, and hear what is void
        prefill.generate(prompt(5, seed=seed))
    for slot, generation in read.items():
        for first in range(0, 8, stripes):
            arena = prefill.arena(first + slot % stripes)
            at = (arena, slot // stripes, generation)
            wait(lambda at=at: at[0].header(at[1]).generation > at[2])
    run([prefill, decode], lambda: decode.done(late))
    assert decode.answers[late].tokens == engine(family=family).generate(asked, 6).tokens
    assert_clean(prefill, decode)


@pytest.mark.parametrize(
    ("family", "ranks"), [("latent", (2, 2)), ("full", (4, 4)), ("full", (4, 2))], ids=str
)
def test_where_the_ranks_of_a_stage_are_on_several_hosts_each_keeps_all(
    engine, monkeypatch, family, ranks
):
    """A rank could not read the arenas of the others."""
    with monkeypatch.context() as apart:
        apart.setattr(assembly, "num_near_ranks", lambda _: 1)
        prefill = engine("kv_producer", family=family, ranks=ranks[0])
    assert inspection.compatibility(prefill.half).num_stripes == 1
    decode = engine("kv_consumer", family=family, ranks=ranks[1])
    asked = prompt(8 * BLOCK + 1)
    assert hand_off(prefill, decode, asked) == engine(family=family).generate(asked, 6).tokens
    assert published(prefill) == [8] * ranks[0]
    assert decode.count("tokens_loaded") == 8 * BLOCK
    assert_clean(prefill, decode)


def test_a_version_that_knows_no_stripes_is_refused_by_name(engine, log):
    prefill, decode = engine("kv_producer", ranks=2, **LATENT), engine("kv_consumer", **LATENT)
    asked = prompt(4 * BLOCK + 1)
    answer = prefill.generate(asked, params=HANDOFF).params
    inspection.learn(decode.half, stripes=UNSET)
    expected = engine(**LATENT).generate(asked, 6).tokens
    assert decode.generate(asked, 6, params=answer).tokens == expected
    assert decode.failures() == {"incompatible_peer": 1}
    assert "stripes of slots" in log[-1]
