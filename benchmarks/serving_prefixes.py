# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` with prompts that begin alike, on two engines whose KV caches hold few.

Two loads of vLLM's own load generator:

- `prefix_repetition`: some prefixes, each with many endings, in any order, some requests at a time;
- `timed_trace`: a trace in Mooncake's format, whose requests come at their times. Without `--trace`
  it is drawn by `traces.agents`: agents that call tools, each turn with all that was said before.

Two engines behind a round-robin router without a connector, with OmniKVConnector as it is by
default, and with LMCache's multi-process mode where lmcache is installed; and a prefill and a
decode engine of OmniKVConnector, and of NixlConnector where nixl is installed.

    python benchmarks/serving_prefixes.py [--quick] [--rounds N]

writes results/serving_prefixes.md and results/serving_prefixes.png beside this file. `--port`
measures what serves there already, and prints its rows. On a machine with GPUs (with a model, the
size of the KV caches is needed):

    python benchmarks/serving_prefixes.py --model Qwen/Qwen3-8B --gpus 0,1 --kv-cache-gib 4 \
        --host-gib 32 --requests 480 --vllm-arguments "--dtype bfloat16"
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
import lmcache_server
import matplotlib as mpl
import numpy as np
import traces
from conversations import (
    APART,
    LMCACHE,
    NIXL_PD,
    PD,
    SHARE,
    TOKEN_BYTES,
    RoundRobin,
    configuration,
    memory_in_use,
    sources,
)
from machine import machine, yields
from serving import NIXL_THREADS, NONE, RESULTS, Place, Sizes, cores, nixl_installed

from omni_connector.cli.engines import running
from omni_connector.testing.engines import Engine

mpl.use("Agg")
import matplotlib.pyplot as plt

FAMILY = "llama"
HOST_GIB = 1.0
REPETITION, TIMED = "prefix_repetition", "timed_trace"
OUTPUT_TOKENS = 16
CONCURRENT = 4
# Tokens that a number of a drawn trace stands for; 512 in Mooncake's own traces.
TRACE_BLOCK = 16
MILLISECONDS = 0.001
DRAWN = (
    "The trace is drawn by `traces.agents`, in blocks of 16 tokens, so that its prompts fit an "
    "engine of one core. Those of Mooncake's traces, and of aiperf's generator as it comes, have "
    "ten thousand tokens and more; and vLLM's `timed_trace` needs a time and all blocks in each "
    "line, where aiperf writes a delay and new blocks for all turns but the first. `--trace` takes "
    "other traces"
)
ROOM_TOKENS = 512  # of an engine, beside its longest prompt


@dataclass(frozen=True, slots=True)
class Repetition:
    """Prefixes with many endings.

    Args:
        prefixes: how many.
        prefix, suffix: tokens of each, and of an ending.
        requests: in all.
    """

    prefixes: int
    prefix: int
    suffix: int
    requests: int

    @property
    def name(self) -> str:
        return REPETITION

    @property
    def longest(self) -> int:
        return self.prefix + self.suffix + OUTPUT_TOKENS

    @property
    def distinct(self) -> int:
        """Tokens of all prefixes."""
        return self.prefixes * self.prefix

    def arguments(self) -> dict[str, Any]:
        """Of `vllm bench serve`."""
        return {
            "--prefix-repetition-prefix-len": self.prefix,
            "--prefix-repetition-suffix-len": self.suffix,
            "--prefix-repetition-num-prefixes": self.prefixes,
            "--prefix-repetition-output-len": OUTPUT_TOKENS,
            "--max-concurrency": CONCURRENT,
        }

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {CONCURRENT} at a time, of {self.prefixes} prefixes of "
            f"{self.prefix:,} tokens, each with {self.suffix} tokens of its own"
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """A trace in Mooncake's format.

    Args:
        path: of the trace, a JSON object a line, with times in milliseconds.
        block: tokens that one of its numbers stands for.
        lines: of the trace, as many as are sent.
        drawn: whether it is of `drawn_trace`.
    """

    path: Path
    block: int
    lines: Sequence[Mapping[str, Any]]
    drawn: bool

    @classmethod
    def of_file(cls, path: Path, block: int, requests: int, *, drawn: bool) -> "Timed":
        lines = [json.loads(line) for line in path.read_text().splitlines()[:requests]]
        return cls(path, block, lines, drawn)

    @property
    def name(self) -> str:
        return TIMED

    @property
    def requests(self) -> int:
        return len(self.lines)

    @property
    def longest(self) -> int:
        return max(int(line["input_length"] + line["output_length"]) for line in self.lines)

    @property
    def distinct(self) -> int:
        """Tokens of all blocks, each counted once."""
        return self.block * len({number for line in self.lines for number in line["hash_ids"]})

    def arguments(self) -> dict[str, Any]:
        """Of `vllm bench serve`."""
        return {
            "--dataset-path": self.path,
            "--timed-trace-chunk-hash-size": self.block,
            "--timed-trace-sec-multiplier": MILLISECONDS,
        }

    def __str__(self) -> str:
        seconds = (self.lines[-1]["timestamp"] - self.lines[0]["timestamp"]) * MILLISECONDS
        mean = statistics.mean(line["input_length"] for line in self.lines)
        whose = f". {DRAWN}" if self.drawn else ""
        return (
            f"{self.requests} requests in {seconds:.0f} s, prompts of {mean:,.0f} tokens in the "
            f"mean and {self.longest:,} at most, {self.distinct:,} distinct tokens{whose}"
        )


Workload = Repetition | Timed


def drawn_trace(path: Path, requests: int, rate: float, most: int) -> None:
    """Write a trace of agents that call tools.

    Args:
        rate: requests a second, in the mean; the times between them are exponential.
        most: blocks of a prompt; longer ones are cut off.
    """
    draw = np.random.default_rng(1)
    prompts = traces.agents(seed=1, seconds=600.0)[:requests]
    times = np.cumsum(draw.exponential(1e3 / rate, len(prompts)))
    lines = [
        {
            "timestamp": int(at),
            "input_length": TRACE_BLOCK * len(prompt[:most]),
            "output_length": OUTPUT_TOKENS,
            "hash_ids": prompt[:most],
        }
        for at, prompt in zip(times, prompts, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@dataclass(frozen=True, slots=True)
class Served:
    """What one load told.

    Args:
        requests_per_s: of the whole load.
        first_tokens: seconds to the first token, one a request.
        gaps: seconds between two tokens of an answer.
        tokens: of all prompts, by where their KV came from; see `conversations.sources`.
        memory: bytes of the machine's memory that are in use more than before the engines started,
            and what else the configuration needs; NaN where somebody else has started them.
    """

    requests_per_s: float
    first_tokens: Sequence[float]
    gaps: Sequence[float]
    tokens: Mapping[str, float]
    memory: float


def serve(place: Place, port: int, workload: Workload, engines: Sequence[Engine]) -> Served:
    """Send a load to a server.

    Args:
        engines: whose counters say where the prompts' KV came from; none of a server that somebody
            else has started.
    """
    before = sources(engines)
    told = place.bench_serve(
        port,
        workload.name,
        # The prompts of a trace are drawn by Python's hashes of their blocks.
        {**workload.arguments(), "--num-prompts": workload.requests, "--seed": 1},
        {"PYTHONHASHSEED": "0"},
    )
    after = sources(engines)
    return Served(
        told["request_throughput"],
        told["ttfts"],
        [gap for gaps in told["itls"] for gap in gaps],
        {source: after[source] - before[source] for source in after},
        float(memory_in_use()),
    )


def measure(
    place: Place, name: str, config: Mapping[str, Any] | None, workload: Workload, idle: int
) -> Served:
    """One load of one configuration, whose caches are empty before.

    Args:
        idle: bytes of memory that were in use before anything of it was started.
    """
    apart = name in APART
    roles = ("kv_producer", "kv_consumer") if apart else ("kv_both", "kv_both")
    pair = [
        place.engine(f"{number}", None if config is None else {**config, "kv_role": role}, core)
        for number, (role, core) in enumerate(zip(roles, cores(), strict=True))
    ]
    router = None if apart else RoundRobin
    with running(pair[0], pair[1], place.folder, router_class=router) as deployment:
        served = serve(place, deployment.router.port, workload, pair[:1] if apart else pair)
    return Served(
        served.requests_per_s,
        served.first_tokens,
        served.gaps,
        served.tokens,
        served.memory - idle,
    )


Results = Mapping[str, Mapping[str, Sequence[Served]]]
"""By load and configuration: the rounds."""


def bar(rounds: Sequence[Served]) -> bars.Bar:
    """What a configuration did with a load: the gaps of all rounds, else their medians."""

    def part(source: str) -> float:
        return 100 * statistics.median(
            each.tokens[source] / max(1.0, each.tokens["all"]) for each in rounds
        )

    named = {"KV cache": "cache", "connector": "connector", "computed": "computed"}
    return bars.Bar(
        statistics.median(each.requests_per_s for each in rounds),
        1e3 * float(np.percentile([seconds for each in rounds for seconds in each.gaps], 99)),
        {said: part(source) for source, said in named.items()},
        statistics.median(each.memory for each in rounds),
    )


def row(name: str, rounds: Sequence[Served], plain: Sequence[Served]) -> str:
    """A line of the table; ratios are paired by round."""
    first = [1e3 * seconds for each in rounds for seconds in each.first_tokens]
    pairs = list(zip(rounds, plain, strict=False))  # a run cut short lacks some
    faster = statistics.median(each.requests_per_s / other.requests_per_s for each, other in pairs)
    sooner = statistics.median(
        statistics.median(each.first_tokens) / statistics.median(other.first_tokens)
        for each, other in pairs
    )
    told = bar(rounds)
    cells = [
        *(name, f"{told.requests_per_s:.2f}", f"{faster:.2f}"),
        *(f"{np.percentile(first, 50):.0f}", f"{sooner:.2f}", f"{np.percentile(first, 99):.0f}"),
        f"{told.next_token_ms:.0f}",
        *(f"{part:.1f}" for part in told.sources.values()),
        f"{told.memory / 2**20:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| configuration | requests/s | ratio | first token p50 | ratio | p99 | next token p99 "
    "| cache % | connector % | computed % | memory, MiB |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def markdown(
    results: Results, workloads: Sequence[Workload], about: str, cache: int, sizes: Sizes
) -> str:
    rounds = max(len(each) for by_name in results.values() for each in by_name.values())
    holds = f"holds {cache:,} tokens"
    if sizes.kv_cache_bytes is not None:
        holds = f"has {sizes.kv_cache_bytes / 2**30:g} GiB (model `{sizes.model or FAMILY}`)"
    lines = [
        "# Prompts that begin alike",
        "",
        about,
        "",
        f"`vllm bench serve`; two engines of one {sizes.computes_on} each behind a round-robin "
        f"router, or a prefill and a decode engine. The KV cache of each {holds}; a connector "
        f"has {sizes.host_gib:g} GiB of memory for both. Medians of {rounds} rounds, in each of "
        "which a configuration runs alone and begins with nothing cached; answers of "
        f"{OUTPUT_TOKENS} tokens. *first token*, *next token*: milliseconds, over all requests; "
        "*ratio*: beside no connector. *cache*, *connector*, *computed*: of the tokens of all "
        "prompts, those whose KV was in the engine's own KV cache, came through the connector, and "
        "was computed; with P/D at the prefill engine. *memory*: what the machine uses more than "
        "before the engines, and LMCache's server, started, at the end of the load.",
    ]
    if any(NIXL_PD in by_name for by_name in results.values()) and not sizes.gpus:
        lines += ["", NIXL_THREADS]
    for workload in workloads:
        found = results.get(workload.name)
        if found is None:
            continue
        lines += ["", f"## `{workload.name}`", "", f"{workload}.", "", *HEADER]
        lines += [row(name, each, found[NONE]) for name, each in found.items()]
    lines += ["", "![Times to the first token, and what the tables say](serving_prefixes.png)"]
    return "\n".join([*lines, ""])


def plot(results: Results, path: Path) -> None:
    """How many requests have their first token within a time, by load and configuration; and the
    tables' rest, a line for each load."""
    figure = plt.figure(figsize=(12, 4.5 + 2.5 * len(results)), layout="constrained")
    above, *below = figure.subfigures(
        1 + len(results), 1, height_ratios=(2, *len(results) * [1]), squeeze=False
    )[:, 0]
    panels = above.subplots(1, len(results), squeeze=False)
    for lines, (load, by_name) in zip(below, results.items(), strict=True):
        lines.suptitle(load, fontsize=10)
        bars.draw(
            lines.subplots(1, bars.PANELS),
            {name: bar(rounds) for name, rounds in by_name.items()},
        )
    for axes, (load, by_name) in zip(panels[0], results.items(), strict=True):
        for name, rounds in by_name.items():
            times = np.sort([1e3 * seconds for each in rounds for seconds in each.first_tokens])
            axes.plot(times, 100 * np.arange(1, len(times) + 1) / len(times), label=name)
        axes.set(title=load, xlabel="time to first token (ms)", ylabel="requests (%)")
        axes.set_xscale("log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(
    place: Place, workloads: Sequence[Workload], names: Sequence[str], rounds: int, sizes: Sizes
) -> Iterator[Results]:
    """The results so far, after each load of each configuration; the order turns by round."""
    found: dict[str, dict[str, list[Served]]] = {}
    for number in range(rounds):
        for workload in workloads:
            by_name = found.setdefault(workload.name, {name: [] for name in names})
            for name in reversed(names) if number % 2 else names:
                idle = memory_in_use()
                with configuration(name, place.folder, sizes) as config, place.logs_on_failure():
                    by_name[name].append(measure(place, name, config, workload, idle))
                told = by_name[name][-1]
                print(f"{workload.name}: {row(name, [told], [told])}", flush=True)
                yield {
                    load: {each: served for each, served in loads.items() if served}
                    for load, loads in found.items()
                    if loads[NONE]
                }


def main() -> int:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few short requests, only ours")
    parser.add_argument(
        "--cache-tokens", type=int, help="of each KV cache; a third of the prefixes"
    )
    parser.add_argument("--requests", type=int, default=96, help="of a load")
    parser.add_argument("--prefixes", type=int, default=12)
    parser.add_argument("--prefix-tokens", type=int, default=1536)
    parser.add_argument("--suffix-tokens", type=int, default=128)
    parser.add_argument("--trace", type=Path, help="in Mooncake's format; one is drawn otherwise")
    parser.add_argument("--trace-block", type=int, default=512, help="tokens of a block of --trace")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second that are drawn")
    parser.add_argument("--port", type=int, help="of a server that runs already on this host")
    parser.add_argument("--configuration", action="append", choices=(SHARE, PD, LMCACHE, NIXL_PD))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    Sizes.add(parser, HOST_GIB)
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    if sizes.model is not None and sizes.kv_cache_bytes is None and arguments.port is None:
        parser.error("--model needs --kv-cache-gib")
    quick, output = arguments.quick, arguments.output
    requests = 12 if quick else arguments.requests
    names = [NONE, *(arguments.configuration or (SHARE, PD))]
    if not quick and not arguments.configuration:
        names += [LMCACHE] if lmcache_server.installed() else []
        names += [NIXL_PD] if nixl_installed() else []
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = " ".join(["python benchmarks/serving_prefixes.py", *sys.argv[1:]])
    about = f"`{command}`: {machine()}.{yields()}"
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        trace, block = arguments.trace, arguments.trace_block
        if trace is None:
            trace, block = Path(folder, "trace.jsonl"), TRACE_BLOCK
            drawn_trace(trace, requests, arguments.rate, arguments.prefix_tokens // block)
        prefixes = arguments.prefixes
        workloads: list[Workload] = [
            Repetition(
                prefixes,
                arguments.prefix_tokens,
                arguments.suffix_tokens,
                # vLLM sends as many with each prefix.
                max(1, requests // prefixes) * prefixes,
            ),
            Timed.of_file(trace, block, requests, drawn=arguments.trace is None),
        ]
        longest = max(each.longest for each in workloads) + ROOM_TOKENS
        tokens = arguments.cache_tokens or max(workloads[0].distinct // 3, 2 * longest)
        place = sizes.place(Path(folder), FAMILY, longest, tokens * TOKEN_BYTES)
        if arguments.port is not None:
            print(*HEADER, sep="\n")
            for workload in workloads:
                told = serve(place, arguments.port, workload, ())
                print(row(workload.name, [told], [told]), flush=True)
            return 0
        output.mkdir(parents=True, exist_ok=True)
        # Written after each load, so that a run cut short leaves what it measured.
        for results in compare(place, workloads, names, arguments.rounds, sizes):
            text = markdown(results, workloads, about, tokens, sizes)
            (output / "serving_prefixes.md").write_text(text)
            plot(results, output / "serving_prefixes.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
