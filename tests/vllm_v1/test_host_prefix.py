# SPDX-License-Identifier: Apache-2.0
"""Engines of one host find each other's prefixes: every answer is that of an engine alone."""

import pytest

from omni_connector.testing.simulation import check
from omni_connector.testing.toy import BLOCK

from .harness import assert_clean, prompt, wait
from .stores import PREFIX, QUESTION

pytestmark = pytest.mark.vllm

FAMILIES = ["full", "window", "window and full", "latent"]
SHARE = {"share": True}


@pytest.fixture
def sharer(engine):
    """Makes engines that share their prefixes, each of which has met those before it."""
    made = []

    def make(role="kv_both", extra=None, **options):
        made.append(engine(role, extra={**SHARE, **(extra or {})}, **options))
        for each in made:
            wait(lambda each=each: len(neighbours(each).present()) == len(made) - 1)
            each._before = check.sizes(each)
        return made[-1]

    return make


def neighbours(engine):
    found = engine.half._shared._host._neighbours
    found.look()
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefix_is_found_in_the_arena_of_another_engine(sharer, engine, family, ranks, overlap):
    options = {"family": family, "ranks": ranks, "async_scheduling": overlap}
    first, second = sharer(**options), sharer(**options)
    first.generate(PREFIX)
    expected = engine(family=family, ranks=ranks).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)
