# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between two real engines, and what these tests ask of them."""

import os
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_connector.testing import hollow, reference
from omni_connector.testing.engines import Engine, free_port, prefill

StartEngine = Callable[..., Engine]
"""Starts an engine; see the fixture `start_engine`."""

BLOCK = 128
# 4 layers x 2 heads x 64 x (K, V) x 4 bytes
BLOCK_BYTES = BLOCK * 4 * 2 * 64 * 2 * 4
MAX_TOKENS = 8
# Requests that share a batch, or a prompt computed in other pieces, round differently.
ROUNDING = 1e-3
# Another vLLM connector in place of ours, to tell a fault of this harness from one of ours.
CONNECTOR = os.environ.get("OMNI_E2E_CONNECTOR", "OmniKVConnector")
# In float32 a tolerance can be far smaller than what a wrong byte does. 512 tokens a step is small
# enough that long prompts are prefilled in chunks; chunks are part of the numeric path, so the
# reference engine has the same.
ENGINE_ARGUMENTS = (
    *("--dtype", "float32"),
    *("--max-model-len", "4096"),
    *("--max-num-batched-tokens", "512"),
)
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


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt that shares no block with one of another seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


PROMPTS = {name: random_prompt(seed, length) for seed, (name, length) in enumerate(LENGTHS.items())}
PROMPTS["shares-a-prefix"] = PROMPTS["two-thousand"][:1024] + random_prompt(99, 700)


def engine_environment(runtime: Path) -> dict[str, str]:
    folders = [Path(__file__).parent / "site", Path(__file__).parents[2]]
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "OMNI_CONNECTOR_RUNTIME_DIR": str(runtime)}


HOLLOW_CONFIG = {
    "kv_connector": "HollowConnector",
    "kv_connector_module_path": hollow.MODULE,
    "kv_role": "kv_both",
}
"""The `--kv-transfer-config` of the negative control."""


def connector_config(role: str, **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` of an engine under test."""
    config: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": role}
    if CONNECTOR == "OmniKVConnector":
        config["kv_connector_extra_config"] = {"arena_gib": 0.25, **extra}
    if CONNECTOR == "NixlConnector":
        config["kv_buffer_device"] = "cpu"
    return config


def new_engine(
    model: Path, log: Path, config: dict[str, Any] | None, runtime: Path, **settings: Any
) -> Engine:
    """An engine of these tests, not started; `settings` are those of `Engine`."""
    environment = engine_environment(runtime) | dict(settings.pop("environment", {}))
    if config and config["kv_connector"] == "NixlConnector":
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    return Engine(
        model,
        log,
        kv_transfer_config=config,
        environment=environment,
        **{"kv_cache_bytes": 64 << 20, **settings},
    )


@dataclass(frozen=True)
class Case:
    """A prompt, and what every correct decode engine answers to it."""

    name: str
    prompt: list[int]
    reference: reference.Answer


@dataclass
class Pair:
    """A prefill and a decode engine, and hand-offs between them."""

    prefill_engine: Engine
    decode_engine: Engine
    runtime: Path

    def prefill(self, prompt: list[int], salt: str, **fields: Any) -> dict[str, Any]:
        return prefill(self.prefill_engine, prompt, cache_salt=salt, **fields)

    def decode(
        self, prompt: list[int], salt: str, params: Any = None, **fields: Any
    ) -> reference.Answer:
        settings = {"max_tokens": MAX_TOKENS, "cache_salt": salt, **fields}
        if params is not None:
            settings["kv_transfer_params"] = params
        return reference.ask(self.decode_engine, prompt, **settings)

    def hand_off(self, prompt: list[int], salt: str | None = None) -> reference.Answer:
        """Prefill, then decode into blocks that hold another request's bytes."""
        salt = salt or new_salt()
        params = self.prefill(prompt, salt)
        other = random_prompt(random.getrandbits(32), len(prompt))
        self.decode(other, new_salt(), max_tokens=1)
        return self.decode(prompt, salt, params)

    def count(self, engine: Engine, counter: str, **labels: str) -> float:
        return engine.metric(f"vllm:omni_connector_{counter}_total", **labels)

    def wait_until_idle(self, *engines: Engine, timeout: float = 40.0) -> None:
        """Wait until no request, block, slot or lease is held; AssertionError names what is."""
        for engine in engines or (self.prefill_engine, self.decode_engine):
            deadline = time.monotonic() + timeout
            while held := held_resources(engine):
                if time.monotonic() > deadline:
                    raise AssertionError(f"still held after {timeout:.0f} s: {held}")
                time.sleep(0.5)


def held_resources(engine: Engine) -> dict[str, float]:
    """What the engine still holds, by metric. An idle engine reports with its next step only."""
    engine.complete(random_prompt(7, 3), max_tokens=1)
    gauges = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
    gauges += ["omni_connector_slots_in_use", "omni_connector_leases"]
    values = {gauge: engine.metric(f"vllm:{gauge}") for gauge in gauges}
    return {gauge: value for gauge, value in values.items() if value}


def new_salt() -> str:
    return uuid.uuid4().hex


def fill_with_other_bytes(engine: Engine) -> None:
    """Leave the KV of other requests in every block of the engine's cache."""
    [(cache, _)] = engine.samples("vllm:cache_config_info")
    blocks = int(cache["num_gpu_blocks"])
    with engine.client() as client:
        for seed in range(-(-blocks * BLOCK // 2048) + 1):
            client.complete(random_prompt(1000 + seed, 2048), max_tokens=1, cache_salt=new_salt())
