# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between engines of other tensor parallel sizes and other block sizes.

Ranks add up in another order than one rank does, so the answers agree to rounding only; that the
KV is the sender's, cut to the receiver's heads and blocks, is compared byte for byte.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from omni_connector.testing.engines import Engine
from omni_connector.testing.models import make_model

from . import kv
from .harness import ENGINE_ARGUMENTS, ROUNDING, Pair, connector_config, new_engine, new_salt
from .harness import random_prompt as prompt_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPTS = [prompt_of(300 + length, length) for length in (2, 57, 128, 129, 300, 1200)]


@dataclass(frozen=True)
class Shape:
    """An engine of these tests."""

    ranks: int = 1
    block: int = 128
    caches_prefixes: bool = True


TWO_RANKS, ONE_RANK = Shape(ranks=2), Shape()
SMALL_BLOCKS = Shape(block=32, caches_prefixes=False)

STATES = ("LFM2",)
OTHER_STATES = (
    "the recurrent states of engines with other tensor parallel sizes are cut in ways that depend "
    "on the layer; the decode engine computes the prompt"
)


@dataclass
class Engines:
    """Engines of one model, each prefilling and decoding."""

    recipe: str
    kv_heads: int
    folder: Path
    runtime: Path
    engines: dict[str, Engine]
    probes: dict[str, kv.Probe]

    def hand_off(
        self, sender: str, receiver: str, prompt: list[int], *, compare_answers: bool = True
    ) -> None:
        """Hand a prompt off; compare the KV, and the answer with the receiver's own."""
        pair = Pair(self.engines[sender], self.engines[receiver], self.runtime)
        own = pair.decode(prompt, new_salt())
        received = pair.count(pair.decode_engine, "handoffs_received")
        params = pair.prefill(prompt, salt := new_salt())
        self.probes[receiver].spoil()
        answer = pair.decode(prompt, salt, params)
        assert pair.count(pair.decode_engine, "handoffs_received") == received + 1
        sent = self.probes[sender].read("prefilled")
        found = self.probes[receiver].read("first")
        kv.require_same_kv(sent, found, len(prompt) - 1, kv_heads=self.kv_heads)
        if compare_answers:
            answer.require_same(own, tolerance=ROUNDING)


def start(
    recipe: str,
    kv_heads: int,
    shapes: dict[str, Shape],
    factory: pytest.TempPathFactory,
    started: list[Engine],
) -> Engines:
    """Start engines side by side, and add them to `started`."""
    model = make_model(recipe, factory.getbasetemp() / recipe)
    folder, runtime = factory.mktemp(recipe), factory.mktemp("run")
    engines = {}
    for number, (name, shape) in enumerate(shapes.items()):
        arguments = [*ENGINE_ARGUMENTS, *kv.ARGUMENTS]
        arguments += ["--block-size", str(shape.block)]
        arguments += ["--tensor-parallel-size", str(shape.ranks)]
        if not shape.caches_prefixes:
            arguments.append("--no-enable-prefix-caching")
        bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(shape.ranks)))}
        engines[name] = new_engine(
            model,
            folder / f"{name}.log",
            connector_config("kv_both", handoff_ttl_s=30.0),
            runtime,
            arguments=arguments,
            environment=kv.ENVIRONMENT | (bind if shape.ranks > 1 else {}),
            core=number % (os.cpu_count() or 1),
        )
        started.append(engines[name])
        engines[name].start()
    probes = {}
    for name, engine in engines.items():
        engine.wait_ready()
        (folder / name).mkdir()
        probes[name] = kv.Probe(engine, folder / name)
        probes[name].watch()
    return Engines(recipe, kv_heads, folder, runtime, engines, probes)


SETS = {
    # Two KV heads: one a rank of two.
    "llama": ("llama", 2, {"two": TWO_RANKS, "one": ONE_RANK, "small": SMALL_BLOCKS}),
    "ranks": ("llama", 2, {"two": TWO_RANKS, "others": TWO_RANKS}),
    # One KV head, which both ranks of two hold.
    "replicated": ("llama-one-kv-head", 1, {"two": TWO_RANKS, "one": ONE_RANK}),
    # Every rank keeps all of the latent.
    "latent": ("deepseek_v2-two-heads", 1, {"two": TWO_RANKS, "one": ONE_RANK}),
    "states": ("lfm2", 2, {"two": TWO_RANKS, "one": ONE_RANK}),
}


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """The engines of one of SETS; those of another are stopped first."""
    started: list[Engine] = []
    try:
        yield start(*SETS[request.param], tmp_path_factory, started)
    finally:
        for engine in started:
            engine.stop()


def of(name: str) -> pytest.MarkDecorator:
    """Have a test run with these engines."""
    return pytest.mark.parametrize("engines", [name], indirect=True)


@of("llama")
@pytest.mark.supports("TP 2 to TP 1", "Llama")
def test_two_ranks_to_one(engines: Engines) -> None:
    for prompt in PROMPTS:
        engines.hand_off("two", "one", prompt)


@of("llama")
@pytest.mark.supports("TP 1 to TP 2", "Llama")
def test_one_rank_to_two(engines: Engines) -> None:
    for prompt in PROMPTS:
        engines.hand_off("one", "two", prompt)


@of("llama")
@pytest.mark.supports("larger to smaller blocks", "Llama")
def test_blocks_of_128_to_blocks_of_32(engines: Engines) -> None:
    for prompt in PROMPTS:
        engines.hand_off("one", "small", prompt)


@of("llama")
@pytest.mark.supports("smaller to larger blocks", "Llama")
def test_blocks_of_32_to_blocks_of_128(engines: Engines) -> None:
    for prompt in PROMPTS:
        engines.hand_off("small", "one", prompt)


@of("llama")
def test_two_ranks_to_one_with_smaller_blocks(engines: Engines) -> None:
    for prompt in PROMPTS:
        engines.hand_off("two", "small", prompt)


@of("llama")
def test_many_at_once_between_all(engines: Engines) -> None:
    names = list(engines.engines)
    ways = [(a, b) for a in names for b in names if a != b]

    def hand_off(number: int) -> None:
        sender, receiver = ways[number % len(ways)]
        pair = Pair(engines.engines[sender], engines.engines[receiver], engines.runtime)
        prompt, salt = PROMPTS[number % len(PROMPTS)], new_salt()
        answer = pair.decode(prompt, salt, pair.prefill(prompt, salt))
        answer.require_same(pair.decode(prompt, new_salt()), tolerance=ROUNDING)

    before = sum(
        engine.metric("vllm:omni_connector_handoffs_received_total")
        for engine in engines.engines.values()
    )
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(hand_off, range(36)))
    received = sum(
        engine.metric("vllm:omni_connector_handoffs_received_total")
        for engine in engines.engines.values()
    )
    assert received - before == 36


@of("ranks")
@pytest.mark.supports("TP 2 to TP 2", "Llama")
@pytest.mark.parametrize(("sender", "receiver"), [("two", "others"), ("others", "two")])
def test_two_ranks_to_two(engines: Engines, sender: str, receiver: str) -> None:
    for prompt in PROMPTS[1::3]:
        engines.hand_off(sender, receiver, prompt)


@of("replicated")
@pytest.mark.parametrize(("sender", "receiver"), [("two", "one"), ("one", "two")])
def test_a_kv_head_that_both_ranks_hold(engines: Engines, sender: str, receiver: str) -> None:
    for prompt in PROMPTS:
        engines.hand_off(sender, receiver, prompt)


@of("latent")
@pytest.mark.supports("TP 2 to TP 1", "DeepSeek V2")
@pytest.mark.supports("TP 1 to TP 2", "DeepSeek V2")
@pytest.mark.parametrize(("sender", "receiver"), [("two", "one"), ("one", "two")])
def test_latents_that_every_rank_holds(engines: Engines, sender: str, receiver: str) -> None:
    # Answers of one rank with two heads are wrong on this build; see the recipes of the models.
    for prompt in PROMPTS:
        engines.hand_off(sender, receiver, prompt, compare_answers=False)


@of("states")
@pytest.mark.supports("TP 2 to TP 1", *STATES, refused=OTHER_STATES)
@pytest.mark.supports("TP 1 to TP 2", *STATES, refused=OTHER_STATES)
@pytest.mark.parametrize(("sender", "receiver"), [("two", "one"), ("one", "two")])
def test_states_of_another_number_of_ranks_are_refused(
    engines: Engines, sender: str, receiver: str
) -> None:
    pair = Pair(engines.engines[sender], engines.engines[receiver], engines.runtime)
    prompt = PROMPTS[-1]
    own = pair.decode(prompt, new_salt())
    before = pair.count(pair.decode_engine, "failures", kind="incompatible_peer")
    params = pair.prefill(prompt, salt := new_salt())
    pair.decode(prompt, salt, params).require_same(own)
    after = pair.count(pair.decode_engine, "failures", kind="incompatible_peer")
    assert after == before + 1
