# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers are spread over pipeline stages hand off and share, stage by stage."""

import dataclasses

import msgspec
import pytest

from omni_connector.errors import ConfigError
from omni_connector.kv import compatibility
from tests import inspection
from tests.toy import BLOCK, FAMILIES, LAYERS, WINDOW

from .harness import (
    HANDOFF,
    assert_clean,
    hand_off,
    prompt,
    require_right_handoffs,
    spoil,
    turn_plans,
)
from .stores import PREFIX, QUESTION, landed
from .test_host_prefix import publish, sharer  # noqa: F401 - a fixture
from .test_layers import announce, drain

pytestmark = pytest.mark.vllm

LENGTHS = [2, BLOCK, BLOCK + 1, WINDOW + 2, 5 * BLOCK + 1, 150]
ALL_TO_LOAD = [family for family in FAMILIES if family != "chunk"]
HYBRID = "all three"

# Where the later stages begin. Layers of several groups follow each other, so that a stage of a
# hybrid model may have none of the first group, or of the last.
SPLITS = {"two": (1,), "late": (2 * LAYERS - 1,), "three": (1, LAYERS + 1)}
EVEN = (1, 2)  # a layer each of a model of three


def splits(family: str) -> list[str]:
    """Those that leave no stage of a model without a layer."""
    layers = LAYERS * len(FAMILIES[family])
    return [name for name, split in SPLITS.items() if split[-1] < layers]


CASES = [(family, split) for family in FAMILIES for split in splits(family)]


def require_loaded(prefill, decode, reference, family):
    """The same as `require_right_handoffs`, of all tokens that the next one reads."""
    to_load = family in ALL_TO_LOAD
    require_right_handoffs(prefill, decode, reference, LENGTHS, loads_all=to_load)
    if to_load:
        assert decode.count("tokens_loaded") == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.shows(
    "equal pipeline stages: hand-offs of every kind of cache group",
    control="test_stages_that_are_swapped_are_noticed_by_these_tests",
)
@pytest.mark.parametrize(("family", "split"), CASES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_tokens_are_those_of_a_single_engine(engine, family, split, ranks):
    options = {"family": family, "ranks": ranks, "stages": SPLITS[split]}
    reference = engine(family=family, ranks=ranks)
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    require_loaded(prefill, decode, reference, family)


@pytest.mark.parametrize("family", ["full", HYBRID])
def test_a_connector_that_moves_nothing_is_found_out(engine, family):
    options = {"family": family, "stages": SPLITS["two"], "connector": "NoOpConnector"}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    reference = engine(family=family)
    for length in LENGTHS[1:]:
        asked = prompt(length)
        assert hand_off(prefill, decode, asked) != reference.generate(asked, 6).tokens


def test_stages_that_are_swapped_are_noticed_by_these_tests(engine, monkeypatch, tokens):
    """Stages with equally many layers have slots of one size, and their checksums are right."""
    prefill = engine("kv_producer", stages=EVEN)
    right, wrong = (engine("kv_consumer", stages=EVEN) for _ in range(2))
    asked = prompt(100)
    assert hand_off(prefill, right, asked) == tokens(asked, 6)
    other = {0: 0, 1: 2, 2: 1}
    turn_plans(
        monkeypatch,
        lambda each, *_: dataclasses.replace(each, arenas=tuple(map(other.get, each.arenas))),
    )
    assert hand_off(prefill, wrong, asked) != tokens(asked, 6)
    assert wrong.count("tokens_loaded") == 99
    assert not wrong.failures()


OTHERS = [
    *(((), split) for split in SPLITS.values()),
    *((split, ()) for split in SPLITS.values()),
    *((SPLITS["two"], SPLITS["three"]), (SPLITS["three"], SPLITS["two"])),
    *((SPLITS["two"], SPLITS["late"]), (EVEN, SPLITS["three"])),
]
"""Engines with other stages: where those of the prefill engine begin, and those of the other."""


@pytest.mark.shows(
    "other pipeline stages, or none on one side",
    control="test_layers_that_are_swapped_are_noticed_by_these_tests",
)
@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        (family, *stages)
        for family, groups in FAMILIES.items()
        for stages in OTHERS
        if max(sum(stages, ())) < LAYERS * len(groups)
    ],
    ids=str,
)
@pytest.mark.values
def test_engines_with_other_stages_read_each_other_by_layer(engine, family, theirs, ours):
    reference = engine(family=family)
    prefill = engine("kv_producer", family=family, stages=theirs)
    decode = engine("kv_consumer", family=family, stages=ours)
    require_loaded(prefill, decode, reference, family)


@pytest.mark.parametrize(
    "ranks", [(2, 1), (1, 2), (2, 2)], ids=lambda pair: f"{pair[0]} to {pair[1]}"
)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("family", ["full", "window and full", "latent"])
@pytest.mark.parametrize("way", ["to one", "to two"])
@pytest.mark.values
def test_other_stages_ranks_and_blocks_at_once(engine, family, sizes, ranks, way):
    stages = [(1,), ()] if way == "to one" else [(), (1,)]
    prefill, decode = (
        engine(role, family=family, stages=split, ranks=each, block_size=size)
        for role, split, each, size in zip(
            ("kv_producer", "kv_consumer"), stages, ranks, sizes, strict=True
        )
    )
    reference = engine(family=family, block_size=sizes[1])
    require_right_handoffs(prefill, decode, reference, LENGTHS)


def test_layers_that_are_swapped_are_noticed_by_these_tests(engine, monkeypatch, tokens):
    """Pages of two layers are of one size, and the checksum of their slot is right."""
    read_by = compatibility.LayerPlaces.read_by

    def swapped(places, reader):
        [part] = read_by(places, reader)
        turned = [at for at, _ in part.places[::-1]]
        pairs = [(at, own) for at, (_, own) in zip(turned, part.places, strict=True)]
        return [part._replace(places=pairs)]

    prefill, decode = engine("kv_producer"), engine("kv_consumer", stages=(1,))
    asked = prompt(100)
    answer = prefill.generate(asked, params=HANDOFF).params
    monkeypatch.setattr(compatibility.LayerPlaces, "read_by", swapped)
    assert decode.generate(asked, 6, params=answer).tokens != tokens(asked, 6)
    assert decode.count("tokens_loaded") == 99
    assert not decode.failures()


def of_names(key, names):
    """The key of an engine of one stage and one group with other layers' names."""
    [group] = key.groups
    return {"groups": (msgspec.structs.replace(group, names=names, layers="other"),)}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (msgspec.UNSET, "pipeline stages"),
        (("a", "b", "c"), "layers of group 0"),
        (tuple(f"model.layers.{i}.attn" for i in range(LAYERS)), "layers of group 0"),
    ],
    ids=["none", "other", "other of the same numbers"],
)
def test_a_peer_of_other_stages_with_other_layers_is_refused(engine, tokens, log, names, told):
    prefill, decode = engine("kv_producer", stages=(1,)), engine("kv_consumer")
    asked = prompt(70)
    answer = prefill.generate(asked, params=HANDOFF).params
    inspection.learn(decode.half, **of_names(inspection.compatibility(decode.half), names))
    for _ in range(2):  # the second time it is known already
        assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {"incompatible_peer": 2}
    assert prefill.failures() == {"refused_peer": 1}
    assert decode.count("tokens_loaded") == 0
    assert all(told in line for line in log)


def test_a_stage_that_is_missing_is_refused_by_its_layers(engine, tokens, log):
    prefill, decode = engine("kv_producer", stages=EVEN), engine("kv_consumer")
    asked = prompt(70)
    answer = prefill.generate(asked, params=HANDOFF).params
    key = inspection.compatibility(decode.half)
    inspection.learn(decode.half, groups=(key.groups[0].of_layers([0, 2]),))
    assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {"incompatible_peer": 1}
    assert "layers of group 0" in log[-1]
    assert key.groups[0].names[1] in log[-1]


@pytest.mark.parametrize("family", ["full", "window and full"])
def test_saves_follow_the_layers_of_each_stage(engine, family):
    options = {"family": family, "stages": SPLITS["two"]}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)

    def computed(layer: str) -> None:
        for worker, config in zip(prefill.workers, prefill.stage_configs, strict=True):
            if any(layer in group.layer_names for group in config.kv_cache_groups):
                announce(prefill, layer, [worker])
        drain(prefill)

    prefill.runner.layer_computed = computed
    asked = prompt(5 * BLOCK - 3)
    assert hand_off(prefill, decode, asked) == engine(family=family).generate(asked, 6).tokens
    assert prefill.count("bytes_saved_early") == prefill.count("bytes_saved") > 0
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.shows(
    "equal pipeline stages: shared prefixes",
    control="test_wrong_bytes_of_a_later_stage_that_nobody_checks_are_noticed",
)
@pytest.mark.parametrize(("family", "split"), [case for case in CASES if case[0] in ALL_TO_LOAD])
@pytest.mark.values
def test_engines_of_equal_stages_share_prefixes(sharer, engine, family, split):  # noqa: F811
    options = {"family": family, "stages": SPLITS[split]}
    first, second = sharer(**options), sharer(**options)
    publish(first)
    expected = engine(family=family).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


def test_wrong_bytes_of_a_later_stage_that_nobody_checks_are_noticed(
    sharer,  # noqa: F811
    tokens,
    monkeypatch,
):
    inspection.compare_nothing(monkeypatch.setattr)
    first, second = sharer(stages=SPLITS["two"]), sharer(stages=SPLITS["two"])
    publish(first)
    first.arena(1).slots[:] ^= 0x10
    answer = second.generate(QUESTION, 6)
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert answer.tokens != tokens(QUESTION, 6)


@pytest.mark.parametrize("other", [(), (2,)], ids=["of one stage", "split elsewhere"])
def test_engines_of_other_stages_share_nothing(engine, tokens, other):
    share = {"share": True}
    first = engine("kv_both", extra=share, stages=(1,))
    second = engine("kv_both", extra=share, stages=other)
    publish(first)
    found = inspection.neighbours(second.half)
    found.look()
    assert not found.present()
    assert inspection.refused_neighbours(second.half)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_from_host") == 0


@pytest.mark.parametrize("family", ["full", "window and full", "latent"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_engines_of_equal_stages_share_through_a_store(engine, tmp_path, family, ranks):
    store = {"store": {"path": str(tmp_path / "kv"), "gib": 1, "lookup_timeout_s": 30}}
    options = {"family": family, "ranks": ranks, "stages": SPLITS["two"], "extra": store}
    first, second = engine("kv_both", **options), engine("kv_both", **options)
    first.generate(PREFIX)
    landed(first)
    groups, stages = len(FAMILIES[family]), 2
    files = len(list((tmp_path / "kv").rglob("*.kv")))
    if family == "latent":
        assert files == 6 * stages  # one for all ranks of a stage
    else:
        # The first stage has none of the second group.
        assert files == 6 * ranks * (1 + groups)
    expected = engine(family=family, ranks=ranks).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_shared") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


def test_beside_other_connectors_all_stages_introduce_themselves(engine, tokens):
    options = {"connector": "MultiConnector", "stages": EVEN}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    asked = prompt(100)
    assert hand_off(prefill, decode, asked) == tokens(asked, 6)
    assert decode.stats.data["counts"]["handoffs_received"] == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("missing", [0, 1])
def test_an_engine_without_one_of_its_stages_does_not_start(engine, missing):
    one = engine("kv_both", stages=(1,))
    said = {(stage, 0): each.get_handshake_metadata() for stage, each in enumerate(one.workers)}
    del said[missing, 0]
    made = one.scheduler.connector
    made.shutdown()
    made._scheduler_half = None
    with pytest.raises(ConfigError, match="2 pipeline stages of 1 ranks"):
        made.set_xfer_handshake_metadata_pp_aware(said)


def test_stages_with_a_layer_of_one_name_are_refused(engine):
    """vLLM numbers EAGLE's layers so."""
    one = engine("kv_both", stages=(1,))
    said = {(stage, 0): each.get_handshake_metadata() for stage, each in enumerate(one.workers)}
    said[1, 0] = dataclasses.replace(said[1, 0], groups=said[0, 0].groups)
    made = one.scheduler.connector
    made.shutdown()
    made._scheduler_half = None
    with pytest.raises(ConfigError, match="layers of several pipeline stages"):
        made.set_xfer_handshake_metadata_pp_aware(said)


@pytest.mark.parametrize("drafter", ["ngram", "mtp"])
def test_what_the_runner_does_not_end_in_the_first_stage_is_saved_all_the_same(engine, drafter):
    """With drafts, vLLM's V1 runner calls `wait_for_save` in the last stage alone."""
    family = "full" if drafter == "ngram" else "full and drafter"
    options = {"family": family, "stages": (1,), "drafter": drafter, "drafts": 2}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    reference = engine(None, **options)
    for length in LENGTHS:
        asked = prompt(length)
        right = reference.generate(asked, 6).tokens
        params = prefill.generate(asked, 1, HANDOFF).params
        assert decode.generate(asked, 6, params).tokens == right
    assert decode.count("tokens_loaded") == sum(LENGTHS) - len(LENGTHS)
    assert not decode.failures()
    assert_clean(prefill, decode)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_slot_with_a_spoilt_byte_is_refused_whoever_reads_the_layer(engine, tokens, layer):
    """The first stage of the decode engine reads layer 0 alone, the other one the rest."""
    prefill = engine("kv_producer")
    decode = engine("kv_consumer", stages=(1,))
    asked = prompt(7 * BLOCK + 3)
    answer = prefill.generate(asked, params=HANDOFF).params
    spoil(prefill, layer)
    assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {"checksum_mismatch": 1}
    assert_clean(prefill, decode)
