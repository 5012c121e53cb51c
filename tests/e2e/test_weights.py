# SPDX-License-Identifier: Apache-2.0
"""Engines share KV with those whose weights in memory are the same, whatever way they came by.

Of four engines that are started with the same weights, two get others: one from other files, one by
a trainer's call that changes a few elements in place. The answers are those of an engine that is
started with these weights and has no connector.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from omni_connector.testing.engines import Engine

from .configurations import BLOCK
from .harness import ask
from .pool import Member, Pool
from .prompts import random_prompt

pytestmark = pytest.mark.e2e

WAIT_S = 60.0
EDITED = "model.layers.0.input_layernorm.weight"
ELEMENTS = 8
VALUE = 3.0
PROMPT = random_prompt(31, 4 * BLOCK + 20)


def edited(model: Path, path: Path) -> Path:
    """A copy of a model in which a few elements of one weight are others."""
    shutil.copytree(model, path)
    found = False
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        if EDITED in weights:
            weights[EDITED][:ELEMENTS] = VALUE
            save_file(weights, file, metadata={"format": "pt"})
            found = True
    assert found
    return path


@dataclass
class Four:
    """Four engines that share, and one without connector that has the other weights."""

    members: list[Member]
    other: Engine
    files: tuple[Path, Path]

    def found(self, engine: int) -> float:
        """Tokens that an engine has loaded from arenas of others."""
        return self.members[engine].engine.metric("vllm:omni_connector_tokens_from_host_total")

    def saved(self, engine: int, prompt: list[int]) -> list[int]:
        """Have an engine compute a prompt and keep its blocks; its answer."""
        one = self.members[engine].engine
        counter = "vllm:omni_connector_blocks_saved_total"
        wanted = one.metric(counter) + len(prompt) // BLOCK
        tokens = answer(one, prompt)
        deadline = time.monotonic() + WAIT_S
        while one.metric(counter) < wanted:
            assert time.monotonic() < deadline, one.log_tail()
            one.complete(random_prompt(7, 3), max_tokens=1)  # idle engines tell nothing
        return tokens

    def post(self, engine: int, path: str, body: dict[str, object]) -> None:
        with self.members[engine].engine.client() as client:
            client.send(path, body)
            client.connection.getresponse().read()

    def reload(self, engine: int, path: Path) -> None:
        """Load weights from files while the engine runs, and reset its prefix cache."""
        self.post(
            engine,
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(path)}},
        )
        self.post(engine, "/reset_prefix_cache", {})

    def edit(self, engine: int) -> None:
        """Change elements of a weight in place, and reset the prefix cache."""
        arguments = [EDITED, str(ELEMENTS), str(VALUE)]
        self.post(engine, "/collective_rpc", {"method": "edit_weight", "args": arguments})
        self.post(engine, "/reset_prefix_cache", {})


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    return list(ask(engine, prompt, "weights").tokens)


@pytest.fixture(scope="module")
def four(engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    model = engine_pool.model("llama")
    files = model, edited(model, tmp_path_factory.mktemp("weights") / "edited")
    other = engine_pool.new("reference")
    other.model = files[1]
    engines = [engine_pool.new("share") for _ in range(4)]
    try:
        for engine in (*engines, other):
            engine.start()
        other.wait_ready()
        yield Four([engine_pool.adopt(engine) for engine in engines], other, files)
    finally:
        for engine in (*engines, other):
            engine.stop()


def test_engines_share_with_those_whose_weights_are_the_same(four: Four) -> None:
    before = four.saved(0, PROMPT)
    deadline = time.monotonic() + WAIT_S
    for engine in (1, 2, 3):  # all have met, and have the same weights
        while not four.found(engine):
            assert time.monotonic() < deadline
            probe = random_prompt(int(1e6 * time.monotonic()) % 100_000, 2 * BLOCK + 1)
            four.saved(0, probe)
            answer(four.members[engine].engine, probe)
    other = answer(four.other, PROMPT)
    assert other != before
    four.reload(2, four.files[1])
    four.edit(3)
    hits = [four.found(engine) for engine in range(4)]
    assert four.saved(2, PROMPT) == other
    assert four.found(2) == hits[2], "an engine has loaded KV of other weights"
    assert answer(four.members[3].engine, PROMPT) == other
    assert four.found(3) - hits[3] == 4 * BLOCK, "engines of the same weights do not share"
    assert answer(four.members[1].engine, PROMPT) == before
    assert four.found(1) - hits[1] == 4 * BLOCK, "engines of the first weights do not share"
    # All have the first weights again.
    for engine in (2, 3):
        four.reload(engine, four.files[0])
        hits = [four.found(each) for each in range(4)]
        assert answer(four.members[engine].engine, PROMPT) == before
        assert four.found(engine) - hits[engine] == 4 * BLOCK


def test_without_digests_these_tests_fail(four: Four) -> None:
    """The negative control: engines that take all weights for the same answer wrongly."""
    for member in four.members:
        member.probe.call("all_weights_are_the_same")
        with member.engine.client() as client:
            client.send("/reset_prefix_cache", {})
            client.connection.getresponse().read()
    prompt = random_prompt(32, 4 * BLOCK + 20)
    four.saved(0, prompt)
    four.edit(3)
    hits = four.found(3)
    assert answer(four.members[3].engine, prompt) != answer(four.other, prompt)
    assert four.found(3) > hits
