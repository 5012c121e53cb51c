# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests of this folder, shared by all of them.

Prompts are kept apart by `cache_salt`, which makes the same prompt unknown to all prefix caches
again.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import PROMPTS, Case, Pair, References
from .pool import Pool


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("engines")).engines() as pool:
        yield pool


@pytest.fixture
def pool(engine_pool: Pool) -> Iterator[Pool]:
    """The engines of all tests, which this one leaves fit for the next."""
    yield engine_pool
    engine_pool.require_quiet()


@pytest.fixture(scope="session")
def references(engine_pool: Pool) -> References:
    """Answers of engines that move nothing."""
    return References(engine_pool)


@pytest.fixture
def pair(pool: Pool) -> Pair:
    """Two engines that prefill and decode."""
    return Pair.of(*pool.take(("both", "llama", "a"), ("both", "llama", "b")))


@pytest.fixture(params=PROMPTS)
def case(request: pytest.FixtureRequest, references: References) -> Case:
    """Each prompt in turn."""
    return Case(request.param, PROMPTS[request.param], references)


@pytest.fixture
def cases(references: References) -> dict[str, Case]:
    """All prompts."""
    return {name: Case(name, prompt, references) for name, prompt in PROMPTS.items()}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for engines of users' own programs, whose sockets vLLM leaves there."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        yield Path(folder)
