# SPDX-License-Identifier: Apache-2.0
"""`omni-connector cache` lists, pins and drops what the arenas of engines hold by prompt."""

import json

import pytest

from omni_connector.cli.main import main
from tests.toy import BLOCK

from .harness import assert_clean, prompt, slots
from .stores import PREFIX, QUESTION
from .test_host_prefix import (  # noqa: F401 - a fixture
    FAMILIES,
    crowd,
    kept,
    pinned,
    publish,
    sharer,
)

pytestmark = pytest.mark.vllm


@pytest.fixture
def cache(capsys):
    """Runs a verb; returns its exit status and the document that it prints."""

    def run(*words):
        capsys.readouterr()
        status = main(["cache", *words, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def listed(cache):
    """The prompts of the only engine."""

    def run(engine):
        _, document = cache("ls", "--engine", engine.engine_id)
        (found,) = document["engines"]
        assert found["engine_id"] == engine.engine_id
        return found["prompts"]

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_each_prompt_is_listed_with_what_the_arena_has_of_it(sharer, listed, family):  # noqa: F811
    alone = sharer(family=family)
    assert listed(alone) == []
    publish(alone)
    (found,) = listed(alone)
    assert found["tokens"] == found["kept"] or "full" not in family
    assert 0 < found["kept"] <= found["tokens"] == len(PREFIX) // BLOCK * BLOCK
    assert (found["hits"], found["pinned"]) == (0, 0.0)
    publish(alone, [*PREFIX, *prompt(2 * BLOCK, seed=1)])  # it begins with the other
    (again,) = listed(alone)
    assert again["name"] != found["name"]
    assert again["hits"] == 1
    assert again["tokens"] > found["tokens"]
    publish(alone, [*PREFIX, *prompt(2 * BLOCK, seed=1)])
    assert listed(alone)[0]["hits"] == 2
    assert_clean(alone)


def test_engines_give_a_prompt_one_name(sharer, listed):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first)
    publish(second, params={"omni": {"prefetch": True}})
    assert listed(first)[0]["name"] == listed(second)[0]["name"]


def test_what_is_not_kept_is_not_listed(sharer, listed):  # noqa: F811
    alone = sharer()
    publish(alone, params={"omni": {"cache": "no"}})
    assert listed(alone) == []


def test_what_was_evicted_is_not_listed(sharer, listed):  # noqa: F811
    alone = sharer(extra=slots(16))
    publish(alone, PREFIX[: 4 * BLOCK])
    (found,) = listed(alone)
    crowd(alone, 8)
    assert found["name"] not in {each["name"] for each in listed(alone)}


def test_a_pinned_prompt_stays(sharer, cache, listed):  # noqa: F811
    alone = sharer(extra=slots(16))
    publish(alone, PREFIX[: 4 * BLOCK])
    (found,) = listed(alone)
    status, document = cache("pin", found["name"][:6], "600")
    assert status == 0
    assert document["engines"] == [{"engine_id": alone.engine_id, "blocks": 4, "others": 0}]
    assert pinned(alone) == 4
    crowd(alone, 8)
    (stays,) = [each for each in listed(alone) if each["name"] == found["name"]]
    assert stays["kept"] == 4 * BLOCK
    assert 0 < stays["pinned"] <= 600.25


def test_no_more_is_pinned_than_a_quarter_of_the_arena(sharer, cache, listed):  # noqa: F811
    alone = sharer(extra=slots(16))
    publish(alone)
    _, document = cache("pin", listed(alone)[0]["name"], "600")
    assert document["engines"] == [{"engine_id": alone.engine_id, "blocks": 4, "others": 2}]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_dropped_is_found_by_nobody(sharer, engine, cache, listed, family):  # noqa: F811
    first, second = sharer(family=family), sharer(family=family)
    publish(first)
    publish(first, prompt(6 * BLOCK, seed=77))  # the control: it stays
    (other, found) = listed(first)
    free = kept(first)
    status, document = cache("drop", found["name"])
    assert status == 0
    (done,) = document["engines"]
    assert done["blocks"] == free - kept(first) > 0
    assert done["others"] == 0
    assert [each["name"] for each in listed(first)] == [other["name"]]
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert second.generate(QUESTION, 6).tokens == expected
    assert second.count("tokens_from_host") == 0
    second.generate([*prompt(6 * BLOCK, seed=77), 5])
    assert second.count("tokens_from_host") > 0
    assert_clean(first, second)


def test_the_beginning_of_another_prompt_is_not_dropped(sharer, cache, listed):  # noqa: F811
    alone = sharer()
    shared = PREFIX[: 3 * BLOCK]
    publish(alone, [*shared, *prompt(2 * BLOCK, seed=1)])
    publish(alone, [*shared, *prompt(2 * BLOCK, seed=2)])
    second, first = listed(alone)
    _, document = cache("drop", first["name"])
    assert document["engines"][0]["blocks"] == 2
    (left,) = listed(alone)
    assert left == second | {"age": left["age"]}
    _, document = cache("drop", left["name"])
    assert document["engines"][0]["blocks"] == 5
    assert kept(alone) == 0


def test_all_is_dropped_pinned_or_not(sharer, cache, listed):  # noqa: F811
    alone = sharer()
    publish(alone, params={"omni": {"pin_s": 600}})
    publish(alone, prompt(4 * BLOCK, seed=3))
    status, document = cache("drop", "--all")
    assert (status, document["engines"][0]["blocks"]) == (0, 10)
    assert (kept(alone), pinned(alone), listed(alone)) == (0, 0, [])
    publish(alone)
    assert kept(alone) == 6


def test_a_name_that_nobody_or_several_have_is_refused(sharer, cache, capsys):  # noqa: F811
    alone = sharer()
    publish(alone)
    status, document = cache("drop", "ffffffffffffffff")
    assert (status, document["engines"]) == (1, [])
    assert "name begins with ffffffffffffffff" in document["remarks"][0]
    publish(alone, prompt(4 * BLOCK, seed=3))
    assert main(["cache", "drop", "", "--json"]) == 2
    assert "2 prompts have names that begin with" in capsys.readouterr().err
    assert kept(alone) == 10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_a_prompt_moves_to_another_arena(
    sharer,  # noqa: F811
    engine,
    cache,
    listed,
    family,
    ranks,
):
    options = {"family": family, "ranks": ranks}
    first, second = sharer(**options), sharer(**options)
    publish(first)
    (found,) = listed(first)
    had = kept(first)
    status, document = cache("move", found["name"], second.engine_id)
    if family == "latent" and ranks > 1:  # each rank holds a part of the slots
        assert (status, kept(first), kept(second)) == (1, had, 0)
        assert "spread over its ranks" in document["remarks"][0]
        return
    assert status == 0, document
    assert document["engines"] == [
        {"engine_id": second.engine_id, "blocks": had},
        {"engine_id": first.engine_id, "dropped": had},
    ]
    assert (kept(first), kept(second)) == (0, had)
    assert listed(first) == []
    assert listed(second)[0]["kept"] == found["kept"]
    expected = engine(**options).generate(QUESTION, 6).tokens
    third = sharer(**options)
    assert third.generate(QUESTION, 6).tokens == expected
    assert third.count("tokens_from_host") == 6 * BLOCK
    assert not third.failures()
    assert_clean(first, second, third)


def test_wrong_bytes_are_not_moved(sharer, cache, listed):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first)
    first.arena().slots[:] ^= 0x10
    status, document = cache("move", listed(first)[0]["name"], second.engine_id)
    assert (status, document["engines"]) == (1, [])
    assert "did not get 6 blocks" in document["remarks"][0]
    assert (kept(first), kept(second)) == (6, 0)
    assert_clean(first, second)
    assert second.usage == (0, 0, 0)


def test_a_prompt_does_not_move_where_there_is_no_room(sharer, cache, listed):  # noqa: F811
    first, second = sharer(), sharer(extra=slots(2))
    publish(first)
    status, document = cache("move", listed(first)[0]["name"], second.engine_id)
    assert (status, document["engines"]) == (1, [])
    assert kept(first) == 6
    assert kept(second) <= 2
    assert_clean(first, second)
