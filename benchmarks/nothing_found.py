# SPDX-License-Identifier: Apache-2.0
"""What requests a second an engine loses to sharing where no prompt ever comes again.

An engine without a connector, one with a connector whose methods do nothing, and one with `kv_both`
and defaults stand on the same core. The second shows what vLLM itself spends on any connector. They
get the same random prompts of 100 to 400 tokens, with answers of 24 tokens, 8 at a time, in turns,
and their order changes with each round. Beside requests a second, which a busy machine
scatters, stand the processor's seconds of the engine core's main thread, of its other threads, and
of the other processes of the engine. In the end all engines get nothing for a while, and the
processor's time of the idle engine cores is measured.

    python benchmarks/nothing_found.py [--rounds 12] [--answer 24] [--full] [--setting KEY=JSON ...]
                                       [--quick]

writes results/nothing_found.md beside this file; with `--full`, which fills the arena first,
nothing_found_full.md; and with answers of another length a page that has it in its name. Beside
each page stands its plot. At 0.99 the interval of twelve quiet rounds excludes 0.98; a busy machine
needs more.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from machine import machine, yields
from serving import NONE, OURS, RESULTS, Place, cores, started

from omni_connector.testing.engines import Engine, completion
from omni_connector.testing.models import VOCAB_SIZE

mpl.use("Agg")
import matplotlib.pyplot as plt

# Not imported from `omni_connector.testing.no_op`, which imports vLLM.
NO_OP, NO_OP_MODULE = "NoOpConnector", "omni_connector.testing.no_op"

REQUESTS, AT_ONCE = 300, 8
SHORTEST, LONGEST, ANSWER = 100, 400, 24
TARGET, WORSE = 0.99, 0.98
IDLE_S = 20.0
IDLE_TARGET: Final = 0.0005
# Quantiles of Student's distribution for 95 % of confidence, by the number of rounds.
_STUDENT: Final = {
    2: 12.71,
    3: 4.30,
    4: 3.18,
    5: 2.78,
    6: 2.57,
    7: 2.45,
    8: 2.36,
    9: 2.31,
    10: 2.26,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of the processor, since the start of its processes, of an engine.

    Attributes:
        main: of the engine core's main thread, which runs scheduler and worker.
        others: of the engine core's other threads.
        rest: of the engine's other processes.
        wakes: how often a thread of the engine core went to sleep by itself.
    """

    main: float
    others: float
    rest: float
    wakes: int

    def since(self, before: "Usage") -> "Usage":
        return Usage(
            self.main - before.main,
            self.others - before.others,
            self.rest - before.rest,
            self.wakes - before.wakes,
        )

    @classmethod
    def of(cls, engine: Engine) -> "Usage":
        """Read from /proc."""
        assert engine.process is not None
        main = others = rest = 0.0
        wakes = 0
        for pid in _group(engine.process.pid):
            is_core = "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            for task in Path(f"/proc/{pid}/task").iterdir():
                try:
                    seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
                    status = (task / "status").read_text()
                except OSError:  # the thread has ended
                    continue
                if not is_core:
                    rest += seconds
                    continue
                wakes += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
                if task.name == str(pid):
                    main += seconds
                else:
                    others += seconds
        return cls(main, others, rest, wakes)


def _group(leader: int) -> Iterator[int]:
    """The processes of a group."""
    for each in Path("/proc").iterdir():
        try:
            if each.name.isdecimal() and os.getpgid(int(each.name)) == leader:
                yield int(each.name)
        except ProcessLookupError:
            continue


@dataclass(frozen=True, slots=True)
class Round:
    """What one engine did in one round."""

    requests: int
    requests_per_s: float
    used: Usage


def load(engine: Engine, prompts: Sequence[Sequence[int]], answer: int) -> Round:
    """Send all prompts, `AT_ONCE` at a time.

    Raises:
        Exception: the first that a request raised.
    """
    left = iter(list(prompts))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with engine.client() as client:
                while not failures:
                    with lock:
                        prompt = next(left, None)
                    if prompt is None:
                        return
                    fields = completion(prompt, max_tokens=answer, ignore_eos=True)
                    client.post("/v1/completions", fields)
        except BaseException as error:  # noqa: BLE001 - raised below, on the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    before, start = Usage.of(engine), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failures:
        raise failures[0]
    return Round(len(prompts), len(prompts) / seconds, Usage.of(engine).since(before))


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Random prompts, none of which has a block in common with another."""
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and its 95 % confidence interval."""
    logs = [math.log(each) for each in values]
    mean = statistics.mean(logs)
    half = (
        _STUDENT.get(len(logs), 2.2) * statistics.stdev(logs) / math.sqrt(len(logs))
        if len(logs) > 1
        else math.inf
    )
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def measure(
    place: Place, rounds: int, requests: int, answer: int, extra: dict[str, Any], full: bool
) -> tuple[list[dict[str, Round]], dict[str, Usage]]:
    """What each engine did in each round, and what it used while idle."""
    no_op = {"kv_connector": NO_OP, "kv_connector_module_path": NO_OP_MODULE}
    omni = {"kv_connector": OURS, "kv_connector_extra_config": extra}
    core = cores()[1]
    engines = {
        NONE: place.engine("plain", None, core),
        NO_OP: place.engine("no-op", {**no_op, "kv_role": "kv_both"}, core),
        OURS: place.engine("ours", {**omni, "kv_role": "kv_both"}, core),
    }
    orders = list(itertools.permutations(engines))
    draw = random.Random(0)
    found = []
    with started(list(engines.values())), place.logs_on_failure():
        for engine in engines.values():
            load(engine, prompts(draw, 40), answer)
        while full and _full(engines[OURS]) < 0.99:
            load(engines[OURS], prompts(draw, requests), 1)
        for number in range(rounds):
            asked = prompts(draw, requests)
            order = orders[number % len(orders)]
            found.append({name: load(engines[name], asked, answer) for name in order})
            print(row(number + 1, found[-1]), flush=True)
        time.sleep(5.0)  # what ends a while after the last step has ended
        before = {name: Usage.of(engine) for name, engine in engines.items()}
        time.sleep(IDLE_S)
        idle = {name: Usage.of(engine).since(before[name]) for name, engine in engines.items()}
    return found, idle


def _full(engine: Engine) -> float:
    """The part of the arena that is in use."""
    total = engine.metric("vllm:omni_connector_slots_total")
    used = ("slots_in_use", "slots_cached")
    taken = sum(engine.metric(f"vllm:omni_connector_{name}") for name in used)
    return taken / total if total else 0.0


HEADING = (
    "| round | "
    + " | ".join(
        f"{kind} {name}"
        for kind in ("requests/s,", "main thread,", "other threads,", "other processes,")
        for name in (NONE, NO_OP, OURS)
    )
    + " |\n|---|"
    + 12 * "---:|"
)


def row(number: int | str, told: Mapping[str, Round]) -> str:
    """A line of the table."""
    each = [told[name] for name in (NONE, NO_OP, OURS)]
    cells = [f"{one.requests_per_s:.2f}" for one in each]
    for part in ("main", "others", "rest"):
        cells += [f"{1e6 * getattr(one.used, part) / one.requests:.0f}" for one in each]
    return f"| {number} | {' | '.join(cells)} |"


def speeds(found: Sequence[Mapping[str, Round]], engine: str, beside: str) -> list[float]:
    """Requests a second beside those of another engine, by round."""
    return [each[engine].requests_per_s / each[beside].requests_per_s for each in found]


def processors(found: Sequence[Mapping[str, Round]], engine: str, beside: str) -> list[float]:
    """Seconds of the other engine's main thread by those of this one's, in each round."""
    return [each[beside].used.main / each[engine].used.main for each in found]


def ratios(found: Sequence[Mapping[str, Round]], engine: str, beside: str) -> list[str]:
    """Sentences on an engine beside another."""
    speed = interval(speeds(found, engine, beside))
    main = interval(processors(found, engine, beside))
    return [
        f"- **{engine} beside {beside}**: requests a second {speed[0]:.4f}, 95 % of confidence "
        f"from {speed[1]:.4f} to {speed[2]:.4f}; processor of the main thread, inverted, "
        f"{main[0]:.4f}, from {main[1]:.4f} to {main[2]:.4f}.",
    ]


def plot(found: Sequence[Mapping[str, Round]], path: Path) -> None:
    """Each round's ratios, and their means with their intervals."""
    pairs = ((NO_OP, NONE), (OURS, NONE), (OURS, NO_OP))
    figure, panels = plt.subplots(1, 2, figsize=(10, 2.8), sharey=True, layout="constrained")
    told = (("requests/s", speeds), ("processor of the main thread, inverted", processors))
    for axes, (title, ratios_of) in zip(panels, told, strict=True):
        for height, (engine, beside) in enumerate(pairs):
            values = ratios_of(found, engine, beside)
            mean, low, high = interval(values)
            axes.plot(values, [height] * len(values), "|", color=f"C{height}", alpha=0.5)
            reach = [[mean - low], [high - mean]]
            axes.errorbar(mean, height, xerr=reach, fmt="o", color=f"C{height}", capsize=4)
        axes.axvline(TARGET, color="grey", linestyle=":", label=f"target: {TARGET}")
        axes.set(title=title, xlabel="ratio: rounds, mean, 95 % of confidence")
        axes.set_yticks(
            range(len(pairs)), [f"{engine}\nbeside {beside}" for engine, beside in pairs]
        )
        axes.set_ylim(-0.5, len(pairs) - 0.5)
        axes.grid(alpha=0.3, axis="x")
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def markdown(
    found: Sequence[Mapping[str, Round]],
    idle: Mapping[str, Usage],
    about: str,
    answer: int,
    page: str,
) -> str:
    """The tables; `page` is the name of the plot, too."""
    lines = [
        "# An engine that shares, and finds nothing",
        "",
        about,
        "",
        f"{found[0][NONE].requests} random prompts a round, {SHORTEST} to {LONGEST} tokens, "
        f"answers of {answer} tokens, {AT_ONCE} at a time, to an engine without a connector, to "
        "one with a connector whose methods do nothing, and to one with `kv_both`, which stand on "
        "one core, in turns. Requests a second; and microseconds of the processor for a request "
        "that the engine core's main thread, its other threads and the engine's other processes "
        "used.",
        "",
        "The model has 4 KiB of KV a token: its steps are short, so that the connector's part of "
        "them is large. [share_cost.md](share_cost.md) has prompts of 1,025 tokens and a model "
        "with 128 KiB a token.",
        "",
        HEADING,
        *(row(number, each) for number, each in enumerate(found, 1)),
        "",
        *ratios(found, OURS, NONE),
        *ratios(found, NO_OP, NONE),
        *ratios(found, OURS, NO_OP),
        "",
        f"Target beside no connector: {TARGET}, without {WORSE} in the interval.",
        "",
        f"![Requests a second, and the main thread's processor]({page}.png)",
        "",
        f"Idle, {IDLE_S:.0f} s: share of a core that the engine core uses, and how often its "
        f"threads wake in a second. Target: {100 * IDLE_TARGET:.2f} % more than without.",
        "",
        "| engine | % of a core | wakes |",
        "|---|---:|---:|",
    ]
    for name, used in idle.items():
        share = 100 * (used.main + used.others) / IDLE_S
        lines.append(f"| {name} | {share:.3f} | {used.wakes / IDLE_S:.1f} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens")
    parser.add_argument("--full", action="store_true", help="fill the arena first")
    parser.add_argument("--setting", action="append", default=[], help="KEY=JSON of the connector")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 40 prompts")
    given = parser.parse_args(arguments)
    rounds, requests = (2, 40) if given.quick else (given.rounds, given.requests)
    extra = {key: json.loads(value) for key, _, value in (s.partition("=") for s in given.setting)}
    command = " ".join(["python benchmarks/nothing_found.py", *arguments])
    about = f"`{command}`: {machine()}.{yields()}"
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        place = Place(Path(folder), family="llama", max_tokens=1024, kv_cache_bytes=256 << 20)
        print(HEADING, flush=True)
        found, idle = measure(place, rounds, requests, given.answer, extra, given.full)
    given.output.mkdir(parents=True, exist_ok=True)
    page = "nothing_found_full" if given.full else "nothing_found"
    if given.answer != ANSWER:
        page += f"_{given.answer}_tokens"
    text = markdown(found, idle, about, given.answer, page)
    (given.output / f"{page}.md").write_text(text)
    plot(found, given.output / f"{page}.png")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
