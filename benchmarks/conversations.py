# SPDX-License-Identifier: Apache-2.0
"""A replay of conversations on two engines whose KV caches do not hold them.

All conversations begin with the same long prompt, and each turn sends all that was said before;
`traces.dialogues` says how long the turns are, and after which published statistics. They
arrive in the same order in each configuration, some of them at a time:

- two engines without a connector behind a round-robin router;
- two `kv_both` engines of OmniKVConnector behind the same router;
- a prefill and a decode engine of OmniKVConnector;
- vLLM's OffloadingConnector on each of two engines, which runs on GPUs only;
- LMCache's multi-process mode under two engines, where lmcache is installed;
- a prefill and a decode engine of NixlConnector, if `--configuration` asks for it.

The answers of the engines without a connector are what all others must answer, and what the next
turns go on with.

    python benchmarks/conversations.py [--sessions 20] [--turns 10] [--shared-tokens 8192] [--quick]

writes results/conversations.md and results/conversations.png beside this file. The exit status is 1
if an answer was wrong. On a machine with GPUs (with a model, the size of the KV caches is needed):

    python benchmarks/conversations.py --model Qwen/Qwen3-8B --gpus 0,1 --kv-cache-gib 4 \
        --host-gib 32 --sessions 40 --vllm-arguments "--dtype bfloat16"
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bars
import lmcache_server
import matplotlib as mpl
import numpy as np
from machine import machine, yields
from serving import (
    NIXL,
    NIXL_THREADS,
    NONE,
    RESULTS,
    Place,
    Sizes,
    cores,
    nixl_installed,
)
from traces import Turn, dialogues

from omni_connector.cli.engines import Router, running
from omni_connector.testing.engines import Client, Engine, EngineError, completion
from omni_connector.testing.models import VOCAB_SIZE
from omni_connector.testing.reference import LOGPROBS, ROUNDING, Answer

mpl.use("Agg")
import matplotlib.pyplot as plt

SHARE, PD, OFFLOADING, LMCACHE = "kv_both, share", "P/D, share", "OffloadingConnector", "LMCache"
NIXL_PD = "P/D, NixlConnector"
APART = (PD, NIXL_PD)
"""Configurations of a prefill and a decode engine."""

OURS = "OmniKVConnector"
FAMILY, TOKEN_BYTES = "llama", 4096  # 4 layers x 2 heads x 64 x (K, V) x 4 bytes
BLOCK = 128
VOCABULARY = range(3, VOCAB_SIZE)
CONCURRENT = 4
# Memory for what the KV caches do not hold, of two engines together.
HOST_GIB = 2
ANSWER_S = 600.0
WARM_UP_TOKENS = 16
UNASKED = (
    "measured only if `--configuration` asks for it. A thread of NIXL polls on the core where an "
    "engine computes."
)
# An exception at the start of a line, or behind the prefix of a log.
_RAISED = re.compile(r"(?:^|\] )(\w*(?:Error|Exception): .+)$", re.MULTILINE)


class RoundRobin(Router):
    """`vllm-router` that gives each of two engines every other request."""

    def routes(self) -> list[str]:
        ports = (self.prefill_port, self.decode_port)
        urls = (f"http://127.0.0.1:{port}" for port in ports)
        return ["--policy", "round_robin", "--worker-urls", *urls]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a turn.

    Attributes:
        first_token_s: seconds to the first token.
        gaps_s: seconds between two tokens.
        answer: the tokens.
    """

    first_token_s: float
    gaps_s: Sequence[float]
    answer: Answer


@dataclass(slots=True)
class Replay:
    """What came of all turns in one configuration.

    Attributes:
        replies: in the order of the turns; of several rounds one after the other.
        seconds: for all of them.
        tokens: of the prompts, by where their KV came from, at the engines that compute prompts.
        memory: bytes of the machine's memory that are in use more than before the engines started,
            and what else the configuration needs.
        wrong: what was wrong with answers that were.
    """

    replies: list[Reply]
    seconds: float
    tokens: Mapping[str, float]
    memory: float
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Sequence["Replay"]) -> "Replay":
        """All rounds of a configuration; of their memory the median."""
        return cls(
            [reply for each in rounds for reply in each.replies],
            sum(each.seconds for each in rounds),
            {name: sum(each.tokens[name] for each in rounds) for name in rounds[0].tokens},
            statistics.median(each.memory for each in rounds),
            [text for each in rounds for text in each.wrong],
        )

    @property
    def requests_per_s(self) -> float:
        return len(self.replies) / self.seconds

    def percentile(self, rank: float) -> float:
        """Milliseconds to the first token."""
        return 1e3 * float(np.percentile([reply.first_token_s for reply in self.replies], rank))

    def gap(self, rank: float) -> float:
        """Milliseconds between two tokens."""
        return 1e3 * float(np.percentile([s for each in self.replies for s in each.gaps_s], rank))

    def part(self, source: str) -> float:
        """Percent of the prompts' tokens that had this source."""
        return 100 * self.tokens[source] / self.tokens["all"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The turns, and how they are sent."""

    shared: list[int]
    turns: list[Turn]
    concurrent: int

    def distinct(self) -> int:
        """Tokens of which an engine would have to keep the KV to compute none twice."""
        return len(self.shared) + sum(len(turn.question) + turn.answer for turn in self.turns)

    def longest(self) -> int:
        """Tokens of the longest conversation."""
        said: dict[int, int] = {}
        for turn in self.turns:
            said[turn.session] = said.get(turn.session, 0) + len(turn.question) + turn.answer
        return len(self.shared) + max(said.values())

    def cache_tokens(self) -> int:
        """Tokens of the KV cache of one engine: two together do not hold the conversations, but
        each holds those that are answered at a time, if there are many others."""
        return max(self.distinct() // 3, self.longest() + 4 * BLOCK)


def streamed(port: int, prompt: Sequence[int], tokens: int) -> Reply:
    """One answer, and when its first token came."""
    found: dict[str, list[Any]] = {"ids": [], "logprobs": [], "likeliest": []}
    times: list[float] = []
    start = time.perf_counter()
    with Client(port, timeout=ANSWER_S) as client:
        body = completion(prompt, max_tokens=tokens, **LOGPROBS)
        for event in client.stream("/v1/completions", body):
            for choice in json.loads(event)["choices"]:
                if not choice.get("token_ids"):
                    continue
                times.append(time.perf_counter())
                found["ids"] += choice["token_ids"]
                found["logprobs"] += choice["logprobs"]["token_logprobs"]
                found["likeliest"] += choice["logprobs"]["top_logprobs"]
    logprobs = {"token_logprobs": found["logprobs"], "top_logprobs": found["likeliest"]}
    answer = Answer.of({"choices": [{"token_ids": found["ids"], "logprobs": logprobs}]})
    first = times[0] - start if times else float("nan")
    return Reply(first, np.diff(times).tolist(), answer)


def replay(
    port: int,
    workload: Workload,
    expected: Sequence[Answer] | None,
    said: dict[int, list[int]] | None = None,
) -> tuple[list[Reply], list[str]]:
    """Send all turns; a session's next one waits for the answer of the one before.

    Args:
        expected: the answers, with which the conversations go on; None takes those that come.
        said: what each session has said before, which is added to; None begins all.

    Returns:
        The replies in the order of the turns, and what was wrong with them.
    """
    if said is None:
        said = {turn.session: list(workload.shared) for turn in workload.turns}
    last: dict[int, Future[Reply]] = {}
    wrong: list[str] = []

    def send(number: int, turn: Turn, before: Future[Reply] | None) -> Reply:
        if before is not None:
            before.result()
        prompt = said[turn.session] + turn.question
        reply = streamed(port, prompt, turn.answer)
        answer = reply.answer
        if expected is not None:
            answer = expected[number]
            try:
                reply.answer.require_same(answer, tolerance=ROUNDING)
            except AssertionError as error:
                wrong.append(f"turn {number}, session {turn.session}: {error}")
        said[turn.session] = [*prompt, *answer.tokens]
        return reply

    futures: list[Future[Reply]] = []
    with ThreadPoolExecutor(workload.concurrent) as pool:
        # Turns are begun in their order, so that those that are waited for have been.
        for number, turn in enumerate(workload.turns):
            future = pool.submit(send, number, turn, last.get(turn.session))
            last[turn.session] = future
            futures.append(future)
    return [future.result() for future in futures], wrong


def memory_in_use() -> int:
    """Bytes of the machine's memory that nobody else could have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) << 10


def sources(engines: Sequence[Engine]) -> dict[str, float]:
    """Tokens of all prompts so far, by where their KV came from."""

    def total(name: str, **labels: str) -> float:
        return sum(engine.metric(f"vllm:{name}_total", **labels) for engine in engines)

    by_source = "prompt_tokens_by_source"
    return {
        "all": total(by_source),
        "computed": total(by_source, source="local_compute"),
        "KV cache": total(by_source, source="local_cache_hit"),
        "connector": total(by_source, source="external_kv_transfer"),
        "another engine": total("omni_connector_tokens_from_host"),
    }


def measure(
    place: Place,
    name: str,
    config: Mapping[str, Any] | None,
    workload: Workload,
    expected: Sequence[Answer] | None,
    idle: int,
) -> Replay:
    """One configuration.

    Args:
        idle: bytes of memory that were in use before anything of it was started.

    Raises:
        EngineError: an engine did not start.
    """
    apart = name in APART
    roles = ("kv_producer", "kv_consumer") if apart else ("kv_both", "kv_both")
    pair = [
        place.engine(f"{number}", None if config is None else {**config, "kv_role": role}, core)
        for number, (role, core) in enumerate(zip(roles, cores(), strict=True))
    ]
    router = None if apart else RoundRobin
    with running(pair[0], pair[1], place.folder, router_class=router) as deployment:
        # The shared prompt has been met before, by each engine.
        for port in [deployment.router.port] if apart else [engine.port for engine in pair]:
            streamed(port, [*workload.shared, VOCABULARY.start], WARM_UP_TOKENS)
        asked = pair[:1] if apart else pair
        before = sources(asked)
        start = time.perf_counter()
        replies, wrong = replay(deployment.router.port, workload, expected)
        seconds = time.perf_counter() - start
        after = sources(asked)
        memory = memory_in_use() - idle
    tokens = {source: after[source] - before[source] for source in after}
    return Replay(replies, seconds, tokens, memory, wrong)


@contextlib.contextmanager
def configuration(name: str, folder: Path, sizes: Sizes) -> Iterator[Mapping[str, Any] | None]:
    """The `--kv-transfer-config` of the engines; what else they need runs meanwhile."""
    each = sizes.host_gib / 2
    if name == LMCACHE:
        with lmcache_server.server(folder, sizes.host_gib) as config:
            yield config
        return
    ours = {
        "kv_connector": OURS,
        "kv_connector_extra_config": {"arena_gib": each, "share": True},
    }
    offloading = {
        "kv_connector": OFFLOADING,
        "kv_connector_extra_config": {"cpu_bytes_to_use": int(each * 2**30)},
    }
    nixl = {"kv_connector": NIXL, "kv_buffer_device": sizes.kv_buffer_device}
    configs: Mapping[str, Mapping[str, Any]] = {
        SHARE: ours,
        PD: ours,
        OFFLOADING: offloading,
        NIXL_PD: nixl,
    }
    yield configs.get(name)


def reason(log: Path) -> str:
    """Why an engine did not start: the last exception in its log that names no other."""
    raised = _RAISED.findall(log.read_text(errors="replace"))
    told = [line for line in raised if "root cause" not in line]
    return told[-1].strip() if told else "no reason is told"


def row(name: str, each: Replay, plain: Replay) -> str:
    hits = [each.part(source) for source in ("KV cache", "connector", "another engine", "computed")]
    # Others do not tell which engine has computed what they load.
    parts = [f"{hit:.1f}" for hit in hits]
    if name not in (SHARE, PD):
        parts[2] = "-"
    times = [
        f"{each.percentile(rank):.0f} | {each.percentile(rank) / plain.percentile(rank):.2f}"
        for rank in (50, 99)
    ]
    faster = each.requests_per_s / plain.requests_per_s
    cells = [
        *(name, str(len(each.replies)), f"{each.requests_per_s:.2f}", f"{faster:.2f}"),
        *(*parts, *times, f"{each.gap(99):.0f}", f"{each.memory / 2**20:,.0f}"),
        str(len(each.wrong)),
    ]
    return f"| {' | '.join(cells)} |"


def markdown(
    results: Mapping[str, Replay],
    absent: Mapping[str, str],
    workload: Workload,
    about: str,
    rounds: int,
    sizes: Sizes,
) -> str:
    sessions = len({turn.session for turn in workload.turns})
    distinct, cache = workload.distinct(), workload.cache_tokens()
    if sizes.kv_cache_bytes is None:
        tokens = f"{distinct:,} tokens, {distinct * TOKEN_BYTES >> 20} MiB of KV"
        holds = f"holds {cache:,} tokens, {cache * TOKEN_BYTES >> 20} MiB"
    else:
        tokens = f"{distinct:,} tokens. Model: `{sizes.model or FAMILY}`"
        holds = f"has {sizes.kv_cache_bytes / 2**30:g} GiB"
    lines = [
        "# Conversations",
        "",
        about,
        "",
        f"{sessions} conversations of {len(workload.turns) // sessions} turns after a shared "
        f"prompt of {len(workload.shared):,} tokens, {workload.concurrent} turns at a time: "
        f"{tokens}. The KV cache of each of two engines {holds}; a connector has "
        f"{sizes.host_gib:g} GiB of memory for both. Lengths of questions and answers: "
        f"`traces.dialogues`. Each engine computes on one {sizes.computes_on}. "
        f"Rounds: {rounds}, every second one "
        "in the other order; in each a configuration runs alone and begins with nothing cached.",
        "",
        "Of the tokens of all prompts, in percent: those whose KV was in the engine's own KV "
        "*cache*, those that came through the *connector* (of which *another engine* had computed "
        "some), and those that were *computed*. With P/D: at the prefill engine, while the decode "
        "engine gets all others from it. *p50*, *p99*: milliseconds to the first token at a client "
        "of the router; *ratio*: beside no connector. *next token*: milliseconds between two "
        "tokens, 99 %. *memory*: what the machine uses more than before the engines, and "
        "LMCache's server, started, at the end. *wrong*: answers that differ from those without a "
        "connector.",
        "",
        "| configuration | requests | requests/s | ratio | cache | connector | another engine "
        "| computed | p50 | p50 ratio | p99 | p99 ratio | next token | memory, MiB | wrong |",
        f"|---|{14 * '---:|'}",
        *(row(name, each, results[NONE]) for name, each in results.items()),
    ]
    notes = [f"- {name} does not run here: {why}" for name, why in absent.items()]
    if not sizes.gpus:
        notes += [f"- {NIXL_PD}: {NIXL_THREADS if NIXL_PD in results else UNASKED}"]
    if notes:
        lines += ["", *notes]
    wrong = [f"- {name}: {each}" for name, found in results.items() for each in found.wrong]
    if wrong:
        lines += ["", "## Wrong", "", *wrong[:50]]
    lines += ["", "![Times to the first token, and what the table says](conversations.png)"]
    return "\n".join([*lines, ""])


def plot(results: Mapping[str, Sequence[Replay]], sessions: int, path: Path) -> None:
    """Times to the first token: how many are below, and the median by turn; below, bars of what
    else the table says."""
    figure = plt.figure(figsize=(12, 7.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1), squeeze=False)[:, 0]
    shares, turns = above.subplots(1, 2)
    whole = {name: Replay.of(rounds) for name, rounds in results.items()}
    named = {"KV cache": "cache", "connector": "connector", "computed": "computed"}
    bars.draw(
        below.subplots(1, bars.PANELS),
        {
            name: bars.Bar(
                each.requests_per_s,
                each.gap(99),
                {said: each.part(source) for source, said in named.items()},
                each.memory,
            )
            for name, each in whole.items()
        },
    )
    for name, each_round in results.items():
        each, rounds = whole[name], len(each_round)
        times = np.array([1e3 * reply.first_token_s for reply in each.replies])
        shares.plot(np.sort(times), 100 * np.arange(1, len(times) + 1) / len(times), label=name)
        by_turn = times.reshape(rounds, -1, sessions).swapaxes(0, 1)
        medians = np.median(by_turn.reshape(len(by_turn), -1), axis=1)
        turns.plot(range(1, len(medians) + 1), medians, "o-", label=name)
    shares.set(xlabel="time to first token (ms)", ylabel="requests (%)", xscale="log")
    turns.set(xlabel="turn", ylabel="median time to first token (ms)", yscale="log")
    turns.xaxis.get_major_locator().set_params(integer=True)
    for axes in (shares, turns):
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(
    place: Place, workload: Workload, names: Sequence[str], rounds: int, sizes: Sizes
) -> Iterator[tuple[dict[str, list[Replay]], dict[str, str]]]:
    """The rounds so far of each configuration, and why others have none, after each."""
    results: dict[str, list[Replay]] = {}
    absent: dict[str, str] = {}
    order = [name for number in range(rounds) for name in (names, reversed(names))[number % 2]]
    for name in order:
        if name in absent:
            continue
        expected = [reply.answer for reply in results[NONE][0].replies] if results else None
        start = time.monotonic()
        idle = memory_in_use()
        with configuration(name, place.folder, sizes) as config:
            try:
                told = measure(place, name, config, workload, expected, idle)
                results.setdefault(name, []).append(told)
            except EngineError:
                absent[name] = reason(place.folder / "0.log")
                if name != OFFLOADING:
                    print(f"{name}: {absent[name]}", file=sys.stderr)
                    raise
        line = absent.get(name) or row(name, results[name][-1], results[NONE][-1])
        print(f"{name}, {time.monotonic() - start:.0f} s: {line}", flush=True)
        yield results, absent


def main() -> int:
    """Replay, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10, help="of each session")
    parser.add_argument("--shared-tokens", type=int, default=8192, help="with which all begin")
    parser.add_argument("--quick", action="store_true", help="4 short sessions, only ours")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    choices = (SHARE, PD, OFFLOADING, LMCACHE, *([NIXL_PD] if nixl_installed() else []))
    parser.add_argument("--configuration", action="append", choices=choices)
    Sizes.add(parser, HOST_GIB)
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    if sizes.model is not None and sizes.kv_cache_bytes is None:
        parser.error("--model needs --kv-cache-gib")
    quick, output = arguments.quick, arguments.output
    sessions, count, shared = (
        (4, 3, 1024) if quick else (arguments.sessions, arguments.turns, arguments.shared_tokens)
    )
    draw = np.random.default_rng(arguments.seed)
    workload = Workload(
        draw.integers(VOCABULARY.start, VOCABULARY.stop, shared).tolist(),
        dialogues(sessions, count, VOCABULARY, arguments.seed + 1),
        CONCURRENT,
    )
    names = [NONE, *(arguments.configuration or (SHARE, PD))]
    if not quick and not arguments.configuration:
        names += [OFFLOADING, *([LMCACHE] if lmcache_server.installed() else [])]
    # What counts the ranks of log-probabilities is compiled for half a minute otherwise.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/conversations.py", *sys.argv[1:]])
    about = f"`{command}`: {machine()}.{yields()}"
    cache_bytes = workload.cache_tokens() * TOKEN_BYTES
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        place = sizes.place(Path(folder), FAMILY, workload.longest() + BLOCK, cache_bytes)
        with place.logs_on_failure():
            # Written after each configuration, so that a run cut short leaves what it measured.
            for results, absent in compare(place, workload, names, arguments.rounds, sizes):
                joined = {name: Replay.of(each) for name, each in results.items()}
                rounds = max(map(len, results.values()))
                text = markdown(joined, absent, workload, about, rounds, sizes)
                (output / "conversations.md").write_text(text)
                plot(results, sessions, output / "conversations.png")
    print(text)
    return int(any(each.wrong for each in joined.values()))


if __name__ == "__main__":
    sys.exit(main())
