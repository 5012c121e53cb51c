# SPDX-License-Identifier: Apache-2.0
"""Tokens of a prompt are counted by who had them, or by why nobody did."""

import pytest

from omni_connector.prefix import misses
from tests.toy import BLOCK

from .harness import prompt
from .stores import MASTER, PREFIX, QUESTION
from .test_host_prefix import publish, sharer  # noqa: F401 - a fixture

pytestmark = pytest.mark.vllm


@pytest.fixture
def missed(request):
    """What an engine counts of one prompt as missed, by cause."""

    def of(engine, tokens, **options):
        before = count(engine)
        publish(engine, tokens, **options)
        return {
            cause: n - before.get(cause, 0)
            for cause, n in count(engine).items()
            if n > before.get(cause, 0)
        }

    return of


def count(engine):
    engine.count("")
    counts = engine.stats.data["counts"]
    return {n.removeprefix("missed:"): of for n, of in counts.items() if n.startswith("missed:")}


def test_what_nobody_has_computed_was_never_seen(sharer, missed):  # noqa: F811
    first, second = sharer(), sharer()
    assert missed(first, PREFIX) == {"never_seen": 5 * BLOCK}
    assert first.count("tokens_cached") == 0
    assert missed(first, QUESTION + prompt(2 * BLOCK, seed=5)) == {"never_seen": 2 * BLOCK}
    assert first.count("tokens_cached") == 6 * BLOCK
    assert missed(second, QUESTION) == {}


def test_a_store_that_answers_too_late(engine, shelf, missed):
    late = engine("kv_both", extra={"store": {**MASTER["store"], "lookup_timeout_s": 0.01}})
    shelf.stalled = True
    try:
        assert missed(late, PREFIX) == {"too_late": 5 * BLOCK}
    finally:
        shelf.stalled = False


def test_a_load_that_has_failed(sharer, missed):  # noqa: F811
    first, second = sharer(), sharer()
    publish(first)
    first.arena().slots[:] ^= 0x10
    assert missed(second, QUESTION) == {"failed": 6 * BLOCK}


def test_prompts_that_must_be_computed_miss_nothing(sharer, missed):  # noqa: F811
    assert missed(sharer(), PREFIX, prompt_logprobs=1) == {}


def test_the_beginnings_that_were_seen_last_are_remembered(sharer, missed, monkeypatch):  # noqa: F811
    monkeypatch.setattr(misses, "_MAX_BEGINNINGS", 1)
    engine = sharer()
    other = prompt(6 * BLOCK, seed=1)
    for each in (PREFIX, other):
        assert missed(engine, each, salt="a") == {"never_seen": 5 * BLOCK}
    assert missed(engine, other, salt="b") == {"other_salt": 5 * BLOCK}
    assert missed(engine, PREFIX, salt="b") == {"never_seen": 5 * BLOCK}
