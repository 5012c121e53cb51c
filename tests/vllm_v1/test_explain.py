# SPDX-License-Identifier: Apache-2.0
"""What `omni-connector explain` says of a prompt is what the engine then does with it."""

import json
from itertools import cycle

import pytest

from omni_connector.cli import explained as module
from omni_connector.cli.explain import Asking, ask
from omni_connector.cli.main import main
from omni_connector.prefix.explain import FoundTail
from tests import inspection
from tests.toy import BLOCK
from tests.toy import FAMILIES as GROUPS

from .harness import assert_clean, prompt, slots
from .stores import IMPATIENT, MASTER, PREFIX, QUESTION, landed
from .test_host_prefix import FAMILIES, neighbours, publish, sharer  # noqa: F401 - a fixture

pytestmark = pytest.mark.vllm

COUNTERS = {
    "own": "tokens_cached",
    "arena": "tokens_kept",
    "host": "tokens_from_host",
    "store": "tokens_shared",
}


STATES = ["state and full", "all three"]


def has_tails(family):
    """Whether the ends of requests within blocks are kept."""
    return family in STATES


def explanation(engine, tokens, salt=None):
    """What one engine has of a prompt."""
    for sharing in [engine] if inspection.shares(engine.half) else []:
        neighbours(sharing)
    answer = ask(Asking(None, list(tokens), salt), "default", engine.engine_id)
    assert not answer.remarks
    (found,) = [each for each in answer.engines if each.engine_id == engine.engine_id]
    return found


def misses(engine):
    engine.count("")
    counts = engine.stats.data["counts"]
    return {n.removeprefix("missed:"): of for n, of in counts.items() if n.startswith("missed:")}


def happens(engine, tokens, salt=None):
    """Tokens by source, and missed tokens by cause, of a request with this prompt."""
    before, missed = {name: engine.count(name) for name in COUNTERS.values()}, misses(engine)
    engine.generate(tokens, salt=salt)
    assert_clean(engine)
    assert not engine.failures()
    return (
        {source: engine.count(name) - before[name] for source, name in COUNTERS.items()},
        {cause: n - missed.get(cause, 0) for cause, n in misses(engine).items()},
    )


def agree(engine, tokens, salt=None):
    """The explanation, which must be what happens then."""
    found = explanation(engine, tokens, salt)
    sources, missed = happens(engine, tokens, salt)
    assert found.sources == sources
    assert found.computed == len(tokens) - sum(sources.values())
    said = {} if found.missing is None else {found.missing.cause: found.missing.tokens}
    assert said == {cause: n for cause, n in missed.items() if n}
    return found


def runs(found):
    """Of the first group."""
    return [
        (run["source"], run["engine"], run["first_block"], run["blocks"])
        for run in found.groups[0]["runs"]
    ]


@pytest.mark.parametrize(
    ("family", "ranks"), [*((each, 1) for each in FAMILIES), ("full", 2), ("all three", 2)]
)
@pytest.mark.values
def test_a_prefix_in_the_arena_of_another_engine(sharer, family, ranks):  # noqa: F811
    first, second = sharer(family=family, ranks=ranks), sharer(family=family, ranks=ranks)
    assert agree(second, PREFIX).sources["own"] == 0
    assert agree(second, QUESTION).sources["own"] == 6 * BLOCK
    assert agree(first, QUESTION).sources["host"] == 6 * BLOCK
    ends = len(QUESTION) if has_tails(family) else 6 * BLOCK
    found = agree(first, QUESTION + prompt(4 * BLOCK, seed=7))
    assert found.missing.first_token == ends
    assert (found.tail is not None) == has_tails(family)


@pytest.mark.parametrize(
    ("length", "family"),
    [*zip([2, 9, BLOCK - 1, 3 * BLOCK + 5, 6 * BLOCK - 1], cycle(STATES), strict=False)],
)
@pytest.mark.values
def test_a_prompt_that_goes_on_within_a_block(sharer, family, length):  # noqa: F811
    first, second = sharer(family=family), sharer(family=family)
    said = prompt(length)
    publish(first, said)
    question = [*said, *prompt(2 * BLOCK, seed=1)]
    found = agree(second, question)
    begin = length // BLOCK * BLOCK
    assert found.tail == FoundTail(length // BLOCK, begin, length, "host", first.engine_id)
    assert found.sources["host"] == length
    other = [*said, *prompt(2 * BLOCK, seed=2)]
    publish(first, other)
    found = agree(first, [*other, 5])
    assert found.tail.source == "arena"
    assert found.sources["arena"] == len(other) % BLOCK


@pytest.mark.parametrize("family", STATES)
def test_a_prompt_whose_attention_blocks_reach_beyond_all_states(sharer, family):  # noqa: F811
    first, second = sharer(family=family), sharer(family=family)
    long = prompt(9 * BLOCK + 3)
    publish(first, long)
    publish(first, long[: 4 * BLOCK + 5])
    found = agree(second, [*long[: 6 * BLOCK + 7], 7, 8, 9])
    assert found.tail.end_token == 4 * BLOCK + 5
    assert found.missing.first_token == 4 * BLOCK + 5


@pytest.mark.parametrize(("length", "family"), [(9, "all three"), (3 * BLOCK + 5, STATES[0])])
def test_a_prompt_that_goes_on_within_a_block_in_a_store(engine, shelf, family, length):
    first, second = (engine("kv_both", extra=MASTER, family=family) for _ in range(2))
    said = prompt(length)
    first.generate(said)
    landed(first)
    begin = length // BLOCK * BLOCK
    found = agree(second, [*said, *prompt(2 * BLOCK, seed=1)])
    assert found.tail == FoundTail(length // BLOCK, begin, length, "store")
    assert found.sources["store"] == length
    assert agree(second, [*said[:-1], 7, *prompt(2 * BLOCK, seed=2)]).tail is None


def test_a_tail_in_a_store_behind_blocks_in_arenas(sharer, engine, shelf):  # noqa: F811
    family = "state and full"
    first = engine("kv_both", extra=MASTER, family=family)
    said = prompt(3 * BLOCK + 5)
    second, third = (sharer(extra=MASTER, family=family) for _ in range(2))
    publish(second, said[: 3 * BLOCK])
    first.generate(said)
    for each in (first, second):
        landed(each)
    found = agree(third, [*said, 7, 8])
    assert found.sources["host"] + found.sources["store"] == len(said)
    assert found.sources["host"] > 0
    assert found.tail.source == "store"


def test_a_store_that_is_late_with_tails(engine, shelf):
    alone = engine("kv_both", extra=IMPATIENT, family="state and full")
    shelf.stalled = True
    try:
        found = explanation(alone, prompt(3 * BLOCK + 5))
    finally:
        shelf.stalled = False
    assert found.tail is None
    assert sum("did not answer" in each for each in found.remarks) == 1


def test_a_tail_of_other_tokens_or_of_another_salt_is_not_found(sharer):  # noqa: F811
    first, second = sharer(family="state and full"), sharer(family="state and full")
    said = prompt(3 * BLOCK + 5)
    publish(first, said, salt="a")
    other = said.copy()
    other[-1] = other[-1] % 400 + 3
    assert agree(second, [*other, 7, 8], "a").tail is None
    for salt in ("b", None):
        assert agree(second, [*said, 7, 8], salt).tail is None
    assert agree(second, [*said, 7, 8], "a").tail is not None


def test_an_explanation_of_another_prompt_is_noticed_by_these_tests(sharer, monkeypatch):  # noqa: F811
    first, second = sharer(family="state and full"), sharer(family="state and full")
    publish(first, prompt(3 * BLOCK + 5))
    asks = module.AskedEngine.explained
    monkeypatch.setattr(
        module.AskedEngine, "explained", lambda self, tokens, salt: asks(self, tokens, "other")
    )
    with pytest.raises(AssertionError):
        agree(second, [*prompt(3 * BLOCK + 5), 7, 8])


def test_blocks_of_several_engines_and_the_store_run_by_run(sharer, shelf):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first, PREFIX[: 2 * BLOCK])
    publish(second, PREFIX[: 4 * BLOCK])
    third = sharer(extra=MASTER)
    publish(third)
    landed(third)
    inspection.pool(third.half).forget()
    fourth = sharer(extra=MASTER)
    found = agree(fourth, QUESTION)
    assert runs(found) == [
        ("host", first.engine_id, 0, 2),
        ("host", second.engine_id, 2, 2),
        ("store", "", 4, 2),
    ]
    assert found.sources == {"own": 0, "arena": 0, "host": 4 * BLOCK, "store": 2 * BLOCK}
    assert set(found.shares_with) == {first.engine_id, second.engine_id, third.engine_id}
    assert not found.apart


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 6 * BLOCK - 1, 6 * BLOCK])
def test_the_last_token_is_computed(sharer, length):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first)
    assert agree(second, PREFIX[:length]).missing is None


def test_another_salt(sharer):  # noqa: F811
    engine = sharer()
    publish(engine, PREFIX, salt="a")
    assert agree(engine, PREFIX, "b").missing.cause == "other_salt"
    assert agree(engine, PREFIX, "a").missing is None
    assert agree(engine, PREFIX).missing.cause == "other_salt"


def test_what_was_evicted_here_and_there(sharer):  # noqa: F811
    first, second = sharer(extra=slots(8)), sharer()
    for seed in (1, 2, 3):
        publish(first, prompt(4 * BLOCK, seed=seed))
    found = explanation(second, prompt(4 * BLOCK, seed=1))
    assert (found.missing.cause, found.missing.evicted_from) == ("never_seen", (first.engine_id,))
    assert first.scheduler.kv_cache_manager.reset_prefix_cache()
    # Its own blocks are found after a reset, too.
    assert agree(first, prompt(4 * BLOCK, seed=3)).missing is None
    found = agree(first, prompt(4 * BLOCK, seed=1))
    assert (found.missing.cause, found.missing.evicted_from) == ("evicted", ())


def test_asking_changes_nothing(sharer):  # noqa: F811
    engine = sharer()
    assert explanation(engine, PREFIX) == explanation(engine, PREFIX)
    assert engine.count("tokens_missed") == engine.count("store_misses") == 0
    assert not misses(engine)
    assert agree(engine, PREFIX).missing.cause == "never_seen"


def test_an_engine_that_has_only_a_store(engine, shelf):
    first, second = engine("kv_both", extra=MASTER), engine("kv_both", extra=MASTER)
    first.generate(PREFIX)
    landed(first)
    found = agree(second, QUESTION)
    assert runs(found) == [("store", "", 0, 6)]
    assert found.sources["store"] == 6 * BLOCK
    assert "arenas" in found.remarks[0]
    assert "arenas" in found.apart[first.engine_id]


def test_a_store_that_does_not_answer(engine, shelf):
    alone = engine("kv_both", extra=IMPATIENT)
    shelf.stalled = True
    try:
        found = explanation(alone, PREFIX)
    finally:
        shelf.stalled = False
    assert found.missing.cause == "too_late"
    assert "did not answer" in found.remarks[0]


def test_after_new_weights_nothing_is_shared(sharer):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first)
    first.runner.weights = b"new"
    assert first.scheduler.reset_prefix_cache()
    first.generate(prompt(20, seed=5))
    found = agree(second, QUESTION)
    assert found.sources["host"] == 0
    assert "other weights" in found.apart[first.engine_id]


def test_what_a_fresh_engine_would_load_is_called_not_known_yet(sharer):  # noqa: F811
    first, fresh = sharer(), sharer(fresh=True)
    publish(first)
    found = explanation(fresh, QUESTION)
    assert (found.computed, found.missing) == (None, None)
    assert runs(found) == [("unknown", "", 0, 6)]
    assert "not known yet" in found.remarks[0]
    for one, other in ((fresh, first), (first, fresh)):
        found = explanation(one, QUESTION)
        assert not found.shares_with
        assert "not known yet" in found.apart[other.engine_id]
        assert found.model
    assert happens(fresh, QUESTION)[0]["host"] == 6 * BLOCK
    assert agree(fresh, prompt(2 * BLOCK, seed=5)).shares_with == [first.engine_id]


def test_why_engines_do_not_share(sharer, engine):  # noqa: F811
    first = sharer()
    other = engine("kv_both", extra={"share": True, "model_id": "b"})
    found = explanation(first, PREFIX)
    assert found.apart[other.engine_id].startswith("another model: 'b', here ")


def test_long_prompts_are_told_in_parts(sharer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 2 * BLOCK + 3)
    first, second = sharer(), sharer()
    publish(first)
    assert agree(second, QUESTION + prompt(5 * BLOCK, seed=1)).sources["host"] == 6 * BLOCK


def test_blocks_with_the_kv_of_a_drafter(sharer):  # noqa: F811
    options = {"family": "full and drafter", "drafter": "mtp", "drafts": 1}
    first, second = sharer(**options), sharer(**options)
    publish(first, QUESTION)
    assert agree(second, QUESTION).sources["host"] == 6 * BLOCK


@pytest.mark.skipif("replayed and full" not in GROUPS, reason="this vLLM replays every load")
@pytest.mark.parametrize(("blocks", "loaded"), [(2, 0), (4, 4)])
def test_what_vllm_computes_again_is_not_loaded(sharer, blocks, loaded):  # noqa: F811
    first, second = sharer(family="replayed and full"), sharer(family="replayed and full")
    publish(first)
    assert agree(second, [*PREFIX[: blocks * BLOCK], 7]).sources["host"] == loaded * BLOCK


def test_requests_with_the_prompt_are_told_by_their_phases(sharer):  # noqa: F811
    one = sharer()
    asked = [one.submit(each, max_tokens=20) for each in (QUESTION, [*QUESTION[:-1], 7])]
    assert explanation(one, QUESTION).requests == {"arrived": 1}
    one.step()
    assert explanation(one, QUESTION).requests == {"computing": 1}
    assert (
        explanation(one, QUESTION[:-1]).requests == explanation(one, QUESTION, "a").requests == {}
    )
    one.run(lambda: one.done(*asked))
    one.settle()
    assert explanation(one, QUESTION).requests == {}


def test_the_command_line(sharer, capsys):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first)
    neighbours(second)
    ids = ",".join(map(str, QUESTION))
    assert main(["explain", "--tokens", ids, "--engine", second.engine_id, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == 1
    assert told["engines"][0]["sources"]["host"] == 6 * BLOCK
    assert main(["explain", "--tokens", ids]) == 0
    shown = capsys.readouterr().out
    assert first.engine_id in shown
    assert "own KV cache" in shown
