# SPDX-License-Identifier: Apache-2.0
"""A drafter on one side only: the model's KV is handed off, the drafter's is left out or zero.

The runner compares, position by position, what a drafter finds of tokens that others have computed.
An engine's blocks hold noise before something is loaded into them.
"""

import msgspec
import pytest

from omni_connector.copy.host import CpuCopier
from omni_connector.copy.load_plans import LoadPlans
from omni_connector.handoff import receiver
from omni_connector.vllm_v1.drafter import layers_of_drafter
from tests import inspection
from tests.simulation import check
from tests.toy import BLOCK, FAMILIES, LAYERS, UNDRAFTED

from .harness import HANDOFF, assert_clean, hand_off, prompt, spoil, wait
from .stores import PREFIX, QUESTION, landed
from .test_host_prefix import neighbours

pytestmark = pytest.mark.vllm

LENGTHS = (2, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 70)
WAYS = [("mtp", 1), ("mtp", 3), ("modules", 2)]
IN_OWN_GROUP, IN_THE_MODELS = "full and drafter", "full with drafter"
MTP = {"drafter": "mtp", "drafts": 1}
SHARE = {"share": True}

of_all = pytest.mark.parametrize("family", UNDRAFTED)
of_both = pytest.mark.parametrize("family", [IN_OWN_GROUP, IN_THE_MODELS])
by_way = pytest.mark.parametrize(("drafter", "drafts"), WAYS)


def without(family):
    """The option for an engine of the same model without the drafter."""
    return {"family": UNDRAFTED[family]}


def found_by_drafter(engine):
    """What the engine's drafter finds from now on that differs from what its tokens give, as
    (position, bytes)."""
    found = []
    engine.runner.drafter_differs = lambda _, position, __, content: found.append(
        (position, content)
    )
    return found


def require_zeros(found, tokens):
    """Raise AssertionError unless the drafter has found zeros for so many positions."""
    assert {position for position, _ in found} == set(range(tokens))
    assert not any(any(content) for _, content in found)


@pytest.mark.shows(
    "a drafter on the decode side alone: every page of its KV",
    control="test_pages_of_the_drafter_that_are_not_zeroed_are_noticed_by_these_tests",
)
@of_all
@by_way
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.values
def test_a_drafter_begins_with_zeros_where_the_prefill_engine_has_none(
    engine, family, drafter, drafts, length
):
    options = {"family": family, "drafter": drafter, "drafts": drafts}
    prefill = engine("kv_producer", **without(family))
    decode = engine("kv_consumer", **options)
    found = found_by_drafter(decode)
    tokens = prompt(length)
    right = engine(None, **options).generate(tokens, 6).tokens
    assert hand_off(prefill, decode, tokens) == right
    assert decode.count("tokens_loaded") == length - 1
    require_zeros(found, length - 1)
    assert not prefill.failures()
    assert not decode.failures()
    assert_clean(prefill, decode)


@pytest.mark.shows(
    "a drafter on the prefill side alone: the model's pages are found beside it",
    control="test_a_model_that_reads_other_pages_is_noticed_by_these_tests",
)
@of_all
@by_way
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.values
def test_a_drafter_of_the_prefill_engine_alone_is_left_out(engine, family, drafter, drafts, length):
    prefill = engine("kv_producer", family=family, drafter=drafter, drafts=drafts)
    decode = engine("kv_consumer", **without(family))
    tokens = prompt(length)
    right = engine(None, **without(family)).generate(tokens, 6).tokens
    params = prefill.generate(tokens, 1, HANDOFF).params
    left = drafts if drafter == "modules" else 1
    assert decode.generate(tokens, 6, params).tokens == right
    if length <= left:
        assert params["omni_no_handoff"] == "nothing_to_hand_off"
        return
    assert decode.count("tokens_loaded") == length - left
    assert not decode.failures()
    assert_clean(prefill, decode)


def test_pages_of_the_drafter_that_are_not_zeroed_are_noticed_by_these_tests(engine, monkeypatch):
    steps = LoadPlans.steps
    monkeypatch.setattr(LoadPlans, "steps", lambda plans, spec: (steps(plans, spec)[0], []))
    prefill = engine("kv_producer", family="full")
    decode = engine("kv_consumer", family=IN_OWN_GROUP, **MTP)
    found = found_by_drafter(decode)
    hand_off(prefill, decode, prompt(70))
    with pytest.raises(AssertionError):
        require_zeros(found, 69)


def test_the_drafters_pages_of_a_mixed_group_that_are_left_are_noticed_by_these_tests(
    engine, monkeypatch
):
    monkeypatch.setattr(CpuCopier, "zero", lambda *_, **__: None)
    prefill = engine("kv_producer", family="full")
    decode = engine("kv_consumer", family=IN_THE_MODELS, **MTP)
    found = found_by_drafter(decode)
    hand_off(prefill, decode, prompt(70))
    with pytest.raises(AssertionError):
        require_zeros(found, 69)


@pytest.mark.parametrize("page", range(LAYERS + 1))
def test_a_slot_with_a_spoilt_page_is_refused_by_who_does_not_read_the_page_too(engine, page):
    """The last page is the drafter's."""
    prefill = engine("kv_producer", family=IN_THE_MODELS, **MTP)
    without_it = engine("kv_consumer", family="full")
    with_it = engine("kv_consumer", family=IN_THE_MODELS, **MTP)
    tokens = prompt(70)
    right = engine(None).generate(tokens, 6).tokens
    for decode in (without_it, with_it):
        params = prefill.generate(tokens, 1, HANDOFF).params
        spoil(prefill, page)
        assert decode.generate(tokens, 6, params).tokens == right
        assert decode.failures() == {"checksum_mismatch": 1}
        assert_clean(prefill, decode)


@of_both
def test_a_model_that_reads_other_pages_is_noticed_by_these_tests(engine, monkeypatch, family):
    prefill = engine("kv_producer", family=family, **MTP)
    right, wrong = (engine("kv_consumer", family="full") for _ in range(2))
    tokens = prompt(70)
    assert hand_off(prefill, right, tokens) == engine(None).generate(tokens, 6).tokens
    places, same = LoadPlans._places, [(layer, layer) for layer in range(LAYERS)]

    def turned(plans, source, group, stage):
        return [
            (at, of, [((layer + 1) % LAYERS, own) for layer, own in pairs or same])
            for at, of, pairs in places(plans, source, group, stage)
        ]

    monkeypatch.setattr(LoadPlans, "_places", turned)
    assert hand_off(prefill, wrong, tokens) != engine(None).generate(tokens, 6).tokens
    assert wrong.count("tokens_loaded") == 69
    assert not wrong.failures()


IN_STAGES = [
    (family, stages)
    for family, alone in UNDRAFTED.items()
    for stages in ((1,), (1, LAYERS + 1))
    if stages[-1] < LAYERS * len(FAMILIES[alone])
]
"""Families, and where the later pipeline stages of an engine begin."""

in_stages = pytest.mark.parametrize(("family", "stages"), IN_STAGES, ids=str)


@in_stages
@pytest.mark.parametrize("of_decode", [(), (1,)], ids=["one stage", "two stages"])
@pytest.mark.values
def test_a_prefill_engine_without_the_drafter_may_have_stages(engine, family, stages, of_decode):
    prefill = engine("kv_producer", stages=stages, **without(family))
    decode = engine("kv_consumer", family=family, stages=of_decode, **MTP)
    found = found_by_drafter(decode)
    tokens = prompt(70)
    right = engine(None, **without(family)).generate(tokens, 6).tokens
    assert hand_off(prefill, decode, tokens) == right
    require_zeros(found, 69)
    assert not decode.failures()


@in_stages
@pytest.mark.parametrize("of_decode", [(), (1,)], ids=["one stage", "two stages"])
@pytest.mark.values
def test_a_prefill_engine_with_the_drafter_may_have_stages(engine, family, stages, of_decode):
    prefill = engine("kv_producer", family=family, stages=stages, **MTP)
    decode = engine("kv_consumer", stages=of_decode, **without(family))
    tokens = prompt(70)
    right = engine(None, **without(family)).generate(tokens, 6).tokens
    assert hand_off(prefill, decode, tokens) == right
    assert decode.count("tokens_loaded") == len(tokens) - 1
    assert not decode.failures()


def test_other_drafters_are_refused_by_name(engine, log):
    prefill = engine("kv_producer", family=IN_OWN_GROUP, **MTP)
    decode = engine("kv_consumer", family=IN_OWN_GROUP, drafter="modules", drafts=2)
    hand_off(prefill, decode, prompt(30))
    assert decode.failures() == {"incompatible_peer": 1}
    assert "drafter" in log[-1]


LIES = {
    # They belong to the model in the reader, which would go on with zeros in their place.
    "a layer of the model is missing": (lambda group: group.of_layers([0, 1]), "layers of group 0"),
    "a layer has another name": (
        lambda group: msgspec.structs.replace(group, names=("a", *group.names[1:]), layers="x"),
        "layers of group 0",
    ),
    "layers have no names": (
        lambda group: msgspec.structs.replace(group, names=msgspec.UNSET, layers="x"),
        "drafter",
    ),
}


@of_both
@pytest.mark.parametrize("lie", LIES)
def test_a_peer_without_layers_of_the_model_is_refused(engine, tokens, log, family, lie):
    changed, told = LIES[lie]
    prefill, decode = (engine("kv_producer"), engine("kv_consumer", family=family, **MTP))
    asked = prompt(70)
    answer = prefill.generate(asked, params=HANDOFF).params
    [group] = inspection.compatibility(prefill.half).groups
    inspection.learn(prefill.half, groups=(changed(group),))
    assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {"incompatible_peer": 1}
    assert told in log[-1]


@of_both
def test_layers_of_the_model_that_a_peer_calls_its_drafters_are_not_left_out(
    engine, tokens, log, family
):
    prefill, decode = engine("kv_producer", family=family, **MTP), engine("kv_consumer")
    asked = prompt(70)
    answer = prefill.generate(asked, params=HANDOFF).params
    layers = inspection.compatibility(decode.half).groups[0].names
    inspection.learn(prefill.half, drafter_layers=layers)
    assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {"incompatible_peer": 1}
    assert "layers of group 0" in log[-1]


def test_a_drafter_whose_layers_are_not_known_is_refused_by_name(engine, tokens, log):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", family=IN_OWN_GROUP, **MTP)
    asked = prompt(70)
    answer = prefill.generate(asked, params=HANDOFF).params
    inspection.learn(decode.half, drafter_layers=msgspec.UNSET)
    assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {"incompatible_peer": 1}
    assert "drafter" in log[-1]


def test_the_log_says_once_that_a_peer_has_no_drafter(engine, monkeypatch):
    log = []
    monkeypatch.setattr(receiver.logger, "info", lambda text, *args: log.append(text % args))
    peers = [engine("kv_producer"), engine("kv_producer")]
    decode = engine("kv_consumer", family=IN_OWN_GROUP, **MTP)
    found_by_drafter(decode)
    for seed in range(3):
        for peer in peers:
            hand_off(peer, decode, prompt(40, seed))
    said = [line for line in log if "has no drafter" in line]
    assert len(said) == 2
    assert [peer.engine_id in line for peer, line in zip(peers, said, strict=True)] == [True] * 2


def drafting(engine, family=IN_THE_MODELS, **options):
    """An engine with a drafter that shares its prefixes."""
    extra = {**SHARE, **options.pop("extra", {})}
    return engine("kv_both", family=family, extra=extra, instant_copies=True, **MTP, **options)


def meet(*engines):
    """Have engines that share know each other."""
    for one in engines:
        wait(lambda one=one: len(neighbours(one).present()) == len(engines) - 1)
        one._before = check.sizes(one)


@of_both
def test_blocks_without_the_drafters_kv_are_not_shared(engine, family):
    prefill = engine("kv_producer")
    first, second = drafting(engine, family), drafting(engine, family)
    found_by_drafter(first)
    meet(first, second)
    assert hand_off(prefill, first, QUESTION) == engine(None).generate(QUESTION, 6).tokens
    assert first.count("tokens_loaded") == len(QUESTION) - 1
    assert first.usage[1] == 0
    # Nor are they when another request finds them in vLLM's own cache, and computes on after them.
    first.generate([*QUESTION, *prompt(3 * BLOCK, 5)], 1)
    assert first.usage[1] == 0
    # The runner raises if the drafter finds anything but what its tokens give.
    second.generate(QUESTION, 6)
    assert second.count("tokens_from_host") == 0
    # What the first computes itself it shares.
    other = prompt(6 * BLOCK, 3)
    first.generate(other, 1)
    assert first.usage[1] > 0
    second.generate(other, 1)
    assert second.count("tokens_from_host") > 0
    assert_clean(prefill, first, second)


def test_blocks_with_the_drafters_kv_are_shared(engine):
    """The control of the test before: the same with a prefill engine that has the drafter."""
    prefill = engine("kv_producer", family=IN_THE_MODELS, **MTP)
    first, second = drafting(engine), drafting(engine)
    meet(first, second)
    hand_off(prefill, first, QUESTION)
    assert first.usage[1] > 0
    second.generate(QUESTION, 6)
    assert second.count("tokens_from_host") > 0


def test_blocks_without_the_drafters_kv_are_not_stored(engine, tmp_path):
    store = {"store": {"path": str(tmp_path / "kv"), "gib": 1, "lookup_timeout_s": 30}}
    prefill, decode = engine("kv_producer"), drafting(engine, extra=store)
    found_by_drafter(decode)
    hand_off(prefill, decode, QUESTION)
    decode.generate(PREFIX, 1)
    landed(decode)
    assert not list((tmp_path / "kv").rglob("*.kv"))
    decode.generate(prompt(6 * BLOCK, 3), 1)
    landed(decode)
    assert list((tmp_path / "kv").rglob("*.kv"))


def test_blocks_without_the_drafters_kv_are_handed_off_to_nobody(engine):
    prefill, middle = engine("kv_producer"), drafting(engine)
    last = engine("kv_consumer", family=IN_THE_MODELS, **MTP)
    found_by_drafter(middle)
    right = hand_off(prefill, middle, QUESTION)
    answer = middle.generate(QUESTION, 1, HANDOFF).params
    assert answer["omni_no_handoff"] == "no_drafter_kv"
    assert last.generate(QUESTION, 6, answer).tokens == right
    assert not last.count("tokens_loaded")
    assert middle.failures() == {"no_drafter_kv": 1}
    assert_clean(prefill, middle, last)


def test_a_drafters_layers_are_known_by_the_names_that_vllm_gives_them(engine):
    made = engine(None, family=IN_OWN_GROUP, **MTP)
    behind = made.config.model_config.get_total_num_hidden_layers()
    drafters = [
        "draft_model.model.layers.0.self_attn.attn",  # a draft model
        f"model.layers.{behind}.self_attn.attn",  # EAGLE
        f"model.layers.{behind}.mtp_block.self_attn.attn",  # DeepSeek
        "mtp.layers.0.self_attn.attn",  # Qwen
        "model.mtp.layers.0.self_attn.attn",  # MiMo V2
    ]
    models = [
        "model.layers.0.self_attn.attn",
        f"model.layers.{behind - 1}.linear_attn",
        f"language_model.model.layers.{behind - 1}.self_attn.attn.1",
    ]
    assert layers_of_drafter(made.config, [*models, *drafters]) == tuple(sorted(drafters))
    alone = engine(None)
    assert layers_of_drafter(alone.config, [*models, *drafters]) == ()
