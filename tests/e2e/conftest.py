# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests of this folder.

An engine takes about 20 s to start, so they are shared by the tests of a module, and prompts
are kept apart by `cache_salt`, which makes the same prompt unknown to both prefix caches again.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine
from omni_connector.testing.models import make_model

from .harness import (
    ENGINE_ARGUMENTS,
    MAX_TOKENS,
    PROMPTS,
    Case,
    Pair,
    StartEngine,
    connector_config,
    engine_environment,
    fill_with_other_bytes,
    new_engine,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.getbasetemp() / "llama")


@pytest.fixture(scope="session")
def references(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, reference.Answer]:
    """Same-path answers to all of PROMPTS, of an engine without connector, stopped again."""
    folder = tmp_path_factory.mktemp("reference")
    engine = Engine(
        model,
        folder / "engine.log",
        arguments=[*ENGINE_ARGUMENTS, "--logits-processors", reference.PROCESSOR],
        environment=engine_environment(folder),
    )
    with engine, engine.client() as client:
        return {
            name: reference.same_path(client, prompt, max_tokens=MAX_TOKENS)
            for name, prompt in PROMPTS.items()
        }


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime folder of the engines of a module."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def start_engine(
    model: Path,
    references: dict[str, reference.Answer],
    runtime: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartEngine]:
    """A function that starts an engine, without waiting; all are stopped with the module.

    It takes the references first, so that their engine is gone before others start.
    """
    folder = tmp_path_factory.mktemp("engines")
    started: list[Engine] = []

    def start(name: str, config: dict[str, Any] | None, **settings: Any) -> Engine:
        engine = new_engine(
            model,
            folder / f"{name}-{len(started)}.log",
            config,
            runtime,
            arguments=[*ENGINE_ARGUMENTS, *settings.pop("arguments", ())],
            core=len(started) % (os.cpu_count() or 1),
            **settings,
        )
        started.append(engine)
        engine.start()
        return engine

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def pair(start_engine: StartEngine, runtime: Path) -> Pair:
    """A producer, and a consumer whose blocks are all dirty."""
    extra = {"handoff_ttl_s": 8.0}
    producer = start_engine("prefill", connector_config("kv_producer", **extra))
    consumer = start_engine("decode", connector_config("kv_consumer", **extra))
    producer.wait_ready()
    consumer.wait_ready()
    fill_with_other_bytes(consumer)
    return Pair(producer, consumer, runtime)


@pytest.fixture(params=PROMPTS)
def case(request: pytest.FixtureRequest, references: dict[str, reference.Answer]) -> Case:
    """Each prompt in turn."""
    return Case(request.param, PROMPTS[request.param], references[request.param])


@pytest.fixture
def cases(references: dict[str, reference.Answer]) -> dict[str, Case]:
    """All prompts."""
    return {name: Case(name, PROMPTS[name], references[name]) for name in PROMPTS}
