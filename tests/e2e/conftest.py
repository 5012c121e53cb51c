# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests of this folder, shared by all of them.

Prompts are kept apart by `cache_salt`, which makes the same prompt unknown to all prefix caches
again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .. import early
from . import programs
from .configurations import ours
from .harness import PROMPTS, Case, Pair, References
from .pool import Pool, engine_environment

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "ar_to_diffusion.py"
# The former begins with engines that it shares with the latter.
DRAFTERS = (FOLDER / "test_one_drafter.py", FOLDER / "test_speculative_drafters.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have tests of one drafter follow each other, in whichever file, so that its engines start
    once: the pool cannot hold those of all drafters."""
    of_drafters = [item for item in items if item.path in DRAFTERS]
    if of_drafters:
        last = items.index(of_drafters[-1])
        behind = items[last + 1 :]
        methods = list(dict.fromkeys(map(method_of, of_drafters)))
        items[:] = [item for item in items[: last + 1] if item not in of_drafters]
        items += sorted(of_drafters, key=lambda item: methods.index(method_of(item)))
        items += behind


def method_of(item: pytest.Item) -> str:
    """The drafter of a test."""
    return str(item.callspec.params["method"])  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("engines")).engines() as pool:
        yield pool


@pytest.fixture(scope="session", autouse=True)
def engines_begun_early(request: pytest.FixtureRequest) -> None:
    """Those that are not forked take half a minute to start, and here they have it."""
    early.begin(request, "unlike", "in_process", "example")


@pytest.fixture(scope="session")
def unlike(engine_pool: Pool) -> None:
    """For tests that take this engine of the pool: it is on its way."""
    engine_pool.begin(("unlike", "llama", ""))


@pytest.fixture(scope="session")
def in_process(
    engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[programs.Program]:
    """A program that decodes with an engine of its own, once it is told what."""
    settings = {
        "model": str(engine_pool.model("llama")),
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
    }
    setting = {"settings": settings, "kv_transfer_config": ours("kv_consumer")}
    with programs.running(
        tmp_path_factory.mktemp("in-process") / "log",
        engine_environment(engine_pool.runtime),
        *(str(FOLDER / "in_process.py"), json.dumps(setting)),
    ) as program:
        yield program


@pytest.fixture(scope="session")
def example(
    engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[programs.Program]:
    """The example of KV that goes from an engine to another stage, which asks for nothing."""
    folder = tmp_path_factory.mktemp("example")
    with programs.running(
        folder / "log",
        engine_environment(folder),
        *(str(EXAMPLE), "--model", str(engine_pool.model("llama"))),
    ) as program:
        yield program


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
