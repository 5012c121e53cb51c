# SPDX-License-Identifier: Apache-2.0
"""Prefill engines that say of their layers what is not so, or cannot be."""

import copy

import msgspec
import pytest

from tests import inspection

from .harness import HANDOFF, assert_clean, hand_off, prompt

pytestmark = pytest.mark.vllm

FAMILY = "window and full"


def other(group, **fields):
    """The group with other fields, even if there is no such group."""
    made = copy.copy(group)
    for name, value in fields.items():
        msgspec.structs.force_setattr(made, name, value)
    return made


def twice(first, second):
    return other(first, names=(first.names[0],) * len(first.names)), second


def in_two_groups(first, second):
    return first, other(second, names=first.names, layers="other")


def no_names(first, second):
    return other(first, names=()), second


def no_layers(first, second):
    return other(first, names=(), pages=()), second


def ten_thousand(first, second):
    names = tuple(f"model.many.{number}.mixer" for number in range(10_000))
    return other(first, names=names, pages=first.pages[:1] * len(names), layers="many"), second


def one_less(first, second):
    return first.of_layers(range(len(first.names) - 1)), second


def renamed(first, second):
    return other(first, names=tuple(map(str.upper, first.names)), layers="other"), second


LIES = {
    "a layer twice": (twice, "malformed_answer", "has two pages"),
    "a layer in two groups": (in_two_groups, "malformed_answer", "in several pipeline stages or"),
    "layers without names": (no_names, "malformed_answer", "0 names of"),
    "no layers": (no_layers, "malformed_answer", "no layer keeps anything in group 0"),
    "ten thousand layers": (ten_thousand, "incompatible_peer", "layers of group 0"),
    "a layer less": (one_less, "incompatible_peer", "layers of group 0"),
    "layers of another model": (renamed, "incompatible_peer", "layers of group 0"),
}


def refused(engine, prefill, decode, **options):
    """Have a prefill engine's hand-off refused, although the answer is right; returns the kind of
    the failure."""
    asked = prompt(70)
    params = prefill.generate(asked, params=HANDOFF).params
    answer = decode.generate(asked, 6, params=params).tokens
    assert answer == engine(**options).generate(asked, 6).tokens
    assert decode.count("tokens_loaded") == 0
    [(kind, number)] = decode.failures().items()
    assert number == 1
    return kind


@pytest.mark.parametrize("lie", LIES)
def test_layers_that_cannot_be_read_are_refused_by_name(engine, log, lie):
    changed, kind, told = LIES[lie]
    options = {"family": FAMILY}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    groups = inspection.compatibility(prefill.half).groups
    inspection.say(prefill.half, groups=changed(*groups))
    assert refused(engine, prefill, decode, **options) == kind
    assert told in log[-1]
    assert_clean(decode)


def test_what_is_so_is_read(engine):
    """The control of the test before: the same groups, told in the same way."""
    options = {"family": FAMILY}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    inspection.say(prefill.half, groups=inspection.compatibility(prefill.half).groups)
    asked = prompt(70)
    assert hand_off(prefill, decode, asked) == engine(**options).generate(asked, 6).tokens
    assert decode.count("tokens_loaded") == len(asked) - 1


def test_ranks_without_arenas_are_refused_by_their_number(engine, log):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    inspection.say(prefill.half, ranks=2)
    assert refused(engine, prefill, decode) == "malformed_answer"
    assert "1 arenas of 2 ranks" in log[-1]


@pytest.mark.parametrize("ours", [(), (1,), (2,)], ids=["one stage", "its stages", "those said"])
def test_slots_of_other_layers_than_a_rank_says_are_not_read(engine, log, ours):
    """The first stage has one layer, and says that it has two; the other has two."""
    prefill, decode = engine("kv_producer", stages=(1,)), engine("kv_consumer", stages=ours)
    said = inspection.compatibility(engine("kv_producer", stages=(2,)).half)
    inspection.learn(prefill.half, groups=said.groups, later_stages=said.later_stages)
    assert refused(engine, prefill, decode) == "peer_refused"
    assert any("bytes, not" in line for line in log)
    assert_clean(decode)
