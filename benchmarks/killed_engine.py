# SPDX-License-Identifier: Apache-2.0
"""What kill -9 of one of two engines costs the conversations that go on.

The conversations of `conversations.py` go through two `kv_both` engines behind a round-robin
router. Between the first half of all turns and the second, one engine is killed and started again,
or not. In the second half counts how many tokens of the prompts did not have to be computed:

- nobody is killed;
- one is killed, and the other engine keeps what it had.

    python benchmarks/killed_engine.py [--sessions 20] [--turns 10] [--shared-tokens 8192] [--quick]

writes results/killed_engine.md beside this file. The exit status is 1 if an answer was wrong.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from conversations import (
    CONCURRENT,
    FAMILY,
    HOST_GIB,
    OURS,
    TOKEN_BYTES,
    VOCABULARY,
    RoundRobin,
    Workload,
    replay,
    sources,
)
from machine import machine, yields
from serving import RESULTS, Place, cores
from traces import Turn, dialogues

from omni_connector.testing.reference import Answer

NOBODY, KEPT = "nobody is killed", "one is killed"
BLOCK = 128
START_S = 240.0


@dataclass(frozen=True, slots=True)
class Half:
    """What came of the second half of the turns.

    Attributes:
        tokens: of the prompts, by where their KV came from.
        answers: of all turns, also of the first half.
        restart_s: seconds from the kill until the engine served again.
        wrong: what was wrong with answers that were.
    """

    tokens: Mapping[str, float]
    answers: list[Answer]
    restart_s: float
    wrong: list[str]

    @property
    def hits(self) -> float:
        """Tokens that were not computed."""
        return self.tokens["all"] - self.tokens["computed"]


def measure(place: Place, name: str, workload: Workload, expected: Sequence[Answer] | None) -> Half:
    """One configuration, with engines of its own."""
    extra = {"arena_gib": HOST_GIB / 2}
    config = {"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    pair = [place.engine(f"{number}", config, core) for number, core in enumerate(cores())]
    middle = len(workload.turns) // 2
    halves = workload.turns[:middle], workload.turns[middle:]
    answers: list[Answer] = []
    wrong: list[str] = []
    restart_s = 0.0
    said = {turn.session: list(workload.shared) for turn in workload.turns}
    try:
        for engine in pair:
            engine.start()
        for engine in pair:
            engine.wait_ready(START_S)
        for number, turns in enumerate(halves):
            if number == 1 and name != NOBODY:
                begun = time.monotonic()
                pair[0].kill()
                port = pair[0].port
                pair[0] = place.engine("again", config, cores()[0])
                pair[0].port = port
                pair[0].start()
                pair[0].wait_ready(START_S)
                restart_s = time.monotonic() - begun
            router = RoundRobin(pair[0].port, pair[1].port, place.folder / "router.log")
            try:
                router.start()
                router.wait_ready(60.0)
                before = sources(pair)
                part = expected[len(answers) : len(answers) + len(turns)] if expected else None
                replies, mistakes = replay(
                    router.port, Workload(workload.shared, turns, workload.concurrent), part, said
                )
                after = sources(pair)
            finally:
                router.stop()
            wrong += mistakes
            answers += [reply.answer for reply in replies]
    finally:
        for engine in pair:
            engine.stop()
    tokens = {source: after[source] - before[source] for source in after}
    return Half(tokens, answers, restart_s, wrong)


def row(name: str, half: Half, undisturbed: Half) -> str:
    """A line of the table."""
    parts = [
        f"{100 * half.tokens[source] / half.tokens['all']:.1f}"
        for source in ("KV cache", "connector", "another engine", "computed")
    ]
    lost = 100 * (1 - half.hits / undisturbed.hits)
    restart = f"{half.restart_s:.0f}" if half.restart_s else "-"
    return f"| {name} | {' | '.join(parts)} | {lost:.2f} | {restart} | {len(half.wrong)} |"


def markdown(results: Mapping[str, Half], workload: Workload, about: str) -> str:
    """The table."""
    sessions = len({turn.session for turn in workload.turns})
    lines = [
        "# Conversations while an engine is killed",
        "",
        about,
        "",
        f"{sessions} conversations of {len(workload.turns) // sessions} turns after a shared "
        f"prompt of {len(workload.shared):,} tokens, {workload.concurrent} turns at a time, on two "
        f"engines: {workload.distinct():,} tokens, {workload.distinct() * TOKEN_BYTES >> 20} MiB "
        f"of KV. The KV cache of each engine holds {workload.cache_tokens():,} tokens. After half "
        "of the turns one engine is killed by SIGKILL and started again.",
        "",
        "Of the prompts' tokens of the second half, in percent, as in "
        "[conversations](conversations.md). *lost*: how many percent fewer tokens were found than "
        "where nobody is killed; target: less than 5. *restart*: seconds until the engine served "
        "again.",
        "",
        "| | cache | connector | another engine | computed | lost | restart | wrong |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(row(name, half, results[NOBODY]) for name, half in results.items()),
    ]
    wrong = [f"- {name}: {each}" for name, half in results.items() for each in half.wrong]
    return "\n".join([*lines, *(["", *wrong[:50]] if wrong else []), ""])


def main() -> int:
    """Replay, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10, help="of each session")
    parser.add_argument("--shared-tokens", type=int, default=8192, help="with which all begin")
    parser.add_argument("--quick", action="store_true", help="4 short sessions")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    sessions, count, shared = (
        (4, 4, 1024)
        if arguments.quick
        else (arguments.sessions, arguments.turns, arguments.shared_tokens)
    )
    turns: list[Turn] = dialogues(sessions, count, VOCABULARY, 1)
    draw = np.random.default_rng(0)
    prompt = draw.integers(VOCABULARY.start, VOCABULARY.stop, shared).tolist()
    workload = Workload(prompt, turns, CONCURRENT)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as in conversations.py
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = " ".join(["python benchmarks/killed_engine.py", *sys.argv[1:]])
    about = f"`{command}`: {machine()}.{yields()}"
    results: dict[str, Half] = {}
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        cache_bytes = workload.cache_tokens() * TOKEN_BYTES
        place = Place(Path(folder), FAMILY, workload.longest() + BLOCK, cache_bytes)
        with place.logs_on_failure():
            for name in (NOBODY, KEPT):
                expected = results[NOBODY].answers if results else None
                results[name] = measure(place, name, workload, expected)
                print(row(name, results[name], results[NOBODY]), flush=True)
    text = markdown(results, workload, about)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "killed_engine.md").write_text(text)
    print(text)
    return int(any(half.wrong for half in results.values()))


if __name__ == "__main__":
    sys.exit(main())
