# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests of this folder.

An engine takes about 20 s to start, so they are shared by the tests of a module, and prompts
are kept apart by `cache_salt`, which makes the same prompt unknown to both prefix caches again.
"""

import os
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omni_connector.testing import reference
from omni_connector.testing.engines import Client, Engine, free_port, prefill
from omni_connector.testing.models import make_model

BLOCK = 128
MAX_TOKENS = 8
# Another vLLM connector in place of ours, to tell a fault of this harness from one of ours.
CONNECTOR = os.environ.get("OMNI_E2E_CONNECTOR", "OmniKVConnector")
ENGINE_ARGUMENTS = ("--max-model-len", "4096")
LENGTHS = {
    "within-a-block": 57,
    "one-block": BLOCK,
    "one-block-and-a-token": BLOCK + 1,
    "two-blocks-less-a-token": 2 * BLOCK - 1,
    "two-blocks": 2 * BLOCK,
    "not-aligned": 300,
    "two-thousand": 2049,
    "two-thousand-not-aligned": 2100,
}

pytestmark = pytest.mark.e2e


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt that shares no block with one of another seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


PROMPTS = {name: random_prompt(seed, length) for seed, (name, length) in enumerate(LENGTHS.items())}


def engine_environment(runtime: Path) -> dict[str, str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "OMNI_CONNECTOR_RUNTIME_DIR": str(runtime)}


def connector_config(role: str, **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` of an engine under test."""
    config: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": role}
    if CONNECTOR == "OmniKVConnector":
        config["kv_connector_extra_config"] = {"arena_gib": 0.25, **extra}
    if CONNECTOR == "NixlConnector":
        config["kv_buffer_device"] = "cpu"
    return config


@dataclass
class Pair:
    """A prefill and a decode engine, and hand-offs between them."""

    prefill_engine: Engine
    decode_engine: Engine
    runtime: Path

    def prefill(self, prompt: list[int], salt: str, **fields: Any) -> dict[str, Any]:
        return prefill(self.prefill_engine, prompt, cache_salt=salt, **fields)

    def decode(
        self, prompt: list[int], salt: str, params: dict[str, Any] | None, **fields: Any
    ) -> reference.Answer:
        settings = {"max_tokens": MAX_TOKENS, "cache_salt": salt, **fields}
        if params is not None:
            settings["kv_transfer_params"] = params
        return reference.ask(self.decode_engine, prompt, **settings)

    def hand_off(self, prompt: list[int], salt: str | None = None) -> reference.Answer:
        salt = salt or new_salt()
        return self.decode(prompt, salt, self.prefill(prompt, salt))


def new_salt() -> str:
    return uuid.uuid4().hex


def fill_with_other_bytes(engine: Engine) -> None:
    """Leave the KV of other requests in every block of the engine's cache."""
    [(cache, _)] = engine.samples("vllm:cache_config_info")
    blocks = int(cache["num_gpu_blocks"])
    with engine.client() as client:
        for seed in range(-(-blocks * BLOCK // 2048) + 1):
            client.complete(random_prompt(1000 + seed, 2048), max_tokens=1, cache_salt=new_salt())


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


StartEngine = Callable[..., Engine]


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
        environment = engine_environment(runtime) | settings.pop("environment", {})
        if config and config["kv_connector"] == "NixlConnector":
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        arguments = [*ENGINE_ARGUMENTS, *settings.pop("arguments", ())]
        engine = Engine(
            model,
            folder / f"{name}-{len(started)}.log",
            kv_transfer_config=config,
            arguments=arguments,
            environment=environment,
            core=len(started) % (os.cpu_count() or 1),
            **{"kv_cache_bytes": 64 << 20, **settings},
        )
        started.append(engine)
        engine.start()
        return engine

    yield start
    for engine in started:
        engine.stop()
