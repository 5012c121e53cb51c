# SPDX-License-Identifier: Apache-2.0
"""What requests a second an engine loses to sharing where no prompt ever comes again.

An engine without a connector and one with `kv_both` and defaults stand on the same core. They get
the same random prompts of 100 to 400 tokens, with answers of 24 tokens, 8 at a time, in turns, and
the order of the two changes with each round. Beside requests a second, which a busy machine
scatters, stand the processor's seconds of the engine core's main thread, of its other threads, and
of the other processes of the engine. In the end both engines get nothing for a while, and the
processor's time of the idle engine core is measured.

    python benchmarks/nothing_found.py [--rounds 12] [--answer 24] [--full] [--setting KEY=JSON ...]

writes results/nothing_found.md beside this file. `--full` fills the arena first. At 0.99 the
interval of twelve quiet rounds excludes 0.98; a busy machine needs more.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving import OURS, RESULTS, Place, cores, machine, started

from omni_connector.testing.engines import Engine, completion
from omni_connector.testing.models import VOCAB_SIZE

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
) -> tuple[list[tuple[Round, Round]], tuple[Usage, Usage]]:
    """Rounds without and with the connector, and what both used while idle."""
    config = {"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    core = cores()[1]
    plain, ours = place.engine("plain", None, core), place.engine("ours", config, core)
    draw = random.Random(0)
    found = []
    with started([plain, ours]), place.logs_on_failure():
        for engine in (plain, ours):
            load(engine, prompts(draw, 40), answer)
        while full and _full(ours) < 0.99:
            load(ours, prompts(draw, requests), 1)
        for number in range(rounds):
            asked = prompts(draw, requests)
            order = (plain, ours) if number % 2 else (ours, plain)
            told = {engine.port: load(engine, asked, answer) for engine in order}
            found.append((told[plain.port], told[ours.port]))
            print(row(number + 1, *found[-1]), flush=True)
        time.sleep(5.0)  # what ends a while after the last step has ended
        before = Usage.of(plain), Usage.of(ours)
        time.sleep(IDLE_S)
        idle = Usage.of(plain).since(before[0]), Usage.of(ours).since(before[1])
    return found, idle


def _full(engine: Engine) -> float:
    """The part of the arena that is in use."""
    total = engine.metric("vllm:omni_connector_slots_total")
    used = ("slots_in_use", "slots_cached")
    taken = sum(engine.metric(f"vllm:omni_connector_{name}") for name in used)
    return taken / total if total else 0.0


HEADING = (
    "| round | no connector | kv_both | ratio | main thread, µs a request | with it | ratio "
    "| other threads | with it | other processes | with it |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def row(number: int | str, plain: Round, ours: Round) -> str:
    """A line of the table."""
    cells = [f"{plain.requests_per_s:.2f}", f"{ours.requests_per_s:.2f}"]
    cells.append(f"{ours.requests_per_s / plain.requests_per_s:.4f}")
    main = [1e6 * each.used.main / each.requests for each in (plain, ours)]
    cells += [f"{main[0]:.0f}", f"{main[1]:.0f}", f"{main[0] / main[1]:.4f}"]
    for part in ("others", "rest"):
        seconds = [getattr(each.used, part) / each.requests for each in (plain, ours)]
        cells += [f"{1e6 * each:.0f}" for each in seconds]
    return f"| {number} | {' | '.join(cells)} |"


def markdown(
    found: Sequence[tuple[Round, Round]], idle: tuple[Usage, Usage], about: str, answer: int
) -> str:
    """The tables."""
    speed = interval([b.requests_per_s / a.requests_per_s for a, b in found])
    main = interval([a.used.main / b.used.main for a, b in found])
    cores = [100 * (each.main + each.others) / IDLE_S for each in idle]
    lines = [
        "# An engine that shares, and finds nothing",
        "",
        about,
        "",
        f"{found[0][0].requests} random prompts a round, {SHORTEST} to {LONGEST} tokens, answers "
        f"of {answer}, "
        f"{AT_ONCE} at a time, to an engine without a connector and to one with `kv_both`, which "
        "stand on one core, in turns. Requests a second, and what the engine core's main thread, "
        "its other threads and the engine's other processes used of the processor.",
        "",
        HEADING,
        *(row(number, *pair) for number, pair in enumerate(found, 1)),
        "",
        f"Requests a second, beside no connector: {speed[0]:.4f}, 95 % of confidence from "
        f"{speed[1]:.4f} to {speed[2]:.4f}. Target: {TARGET}, without {WORSE} in the interval.",
        "",
        f"Processor of the main thread, no connector by with it: {main[0]:.4f}, from {main[1]:.4f} "
        f"to {main[2]:.4f}.",
        "",
        f"Idle, {IDLE_S:.0f} s: the engine core uses {cores[0]:.3f} % of a core without a "
        f"connector and wakes {idle[0].wakes / IDLE_S:.1f} times a second; with it "
        f"{cores[1]:.3f} % and "
        f"{idle[1].wakes / IDLE_S:.1f} times. Target: {100 * IDLE_TARGET:.2f} % more.",
    ]
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
    given = parser.parse_args(arguments)
    extra = {key: json.loads(value) for key, _, value in (s.partition("=") for s in given.setting)}
    command = " ".join(["python benchmarks/nothing_found.py", *arguments])
    about = machine(command, os.getloadavg()[0])
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        place = Place(Path(folder), family="llama", max_tokens=1024, kv_cache_bytes=256 << 20)
        print(HEADING, flush=True)
        found, idle = measure(place, given.rounds, given.requests, given.answer, extra, given.full)
    given.output.mkdir(parents=True, exist_ok=True)
    text = markdown(found, idle, about, given.answer)
    (given.output / "nothing_found.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
