# SPDX-License-Identifier: Apache-2.0
"""Beside another connector, in both orders: engines share prefixes as they do without it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector.testing.engines import Engine
from omni_connector.testing.reference import ROUNDING

from .configurations import BLOCK, ours
from .harness import References, ask
from .pool import Pool, require_idle
from .prompts import new_salt, random_prompt

pytestmark = pytest.mark.e2e

WAIT_S = 60.0


def example(folder: Path) -> dict[str, Any]:
    """vLLM's own connector, which stores prompts in files of its engine alone."""
    folder.mkdir()
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.fixture(scope="module")
def engines(engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """One on which ours is the first, and one on which it is the second."""
    folder = tmp_path_factory.mktemp("example")
    child = ours(share=True, handoff=False)
    del child["kv_load_failure_policy"]
    children = [child, example(folder / "a")], [example(folder / "b"), child]
    made = [engine_pool.new("beside", connector={"connectors": each}) for each in children]
    try:
        for engine in made:
            engine.start()
        for engine in made:
            engine.wait_ready()
        yield made
    finally:
        for engine in made:
            engine.stop()


@pytest.mark.parametrize("reader", [0, 1], ids=["ours-first", "ours-second"])
def test_a_prefix_is_found_beside_another_connector(
    engines: list[Engine], references: References, reader: int
) -> None:
    reading, writing = engines[reader], engines[1 - reader]
    name = "vllm:omni_connector_tokens_from_host_total"
    found, deadline, number = 0.0, time.monotonic() + WAIT_S, 0
    while not found:  # until they have met, and the prefix is in the arena
        assert time.monotonic() < deadline, reading.log_tail()
        before, number = reading.metric(name), number + 1
        # The other connector knows no salts: it must never have seen the prompt.
        prompt = random_prompt(1000 * reader + number, 2 * BLOCK + 10)
        expected, salt = references.plain("llama", prompt), new_salt()
        for engine in (writing, reading):
            ask(engine, prompt, salt).require_same(expected, tolerance=ROUNDING)
        found = reading.metric(name) - before
    assert found == 2 * BLOCK
    for engine in engines:
        require_idle(engine)
