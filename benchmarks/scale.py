# SPDX-License-Identifier: Apache-2.0
"""What the slot directory costs in arenas of a thousand to a million slots.

Peers lease hand-offs of a few blocks while others stay open. At first the arena has free slots,
and in the end every slot is held or cached, so that each new hand-off evicts cached blocks.

    python benchmarks/scale.py [--quick]

writes results/scale.md beside this file.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from machine import machine

from omni_connector.handoff.leases import Handoff, LeaseState, SlotDirectory
from omni_connector.handoff.prompt import Prompt
from omni_connector.runtime.context import PROCESS_CONTEXT

RESULTS = Path(__file__).parent / "results"
SLOTS = (1_000, 10_000, 100_000, 1_000_000)
OPEN = (10, 100, 1_000)
PEERS = 16
BLOCKS, BLOCK = 8, 16
FILL_BLOCKS = 8192
OPERATIONS = (
    "open, free slots",
    "open, cached prefix",
    "open, evicts",
    "copied",
    "lease",
    "release",
    "expire",
)

Result = TypeVar("Result")


class Bench:
    """A directory with hand-offs that stay open, and the times of its operations.

    Attributes:
        times: microseconds of each call, by operation.
    """

    def __init__(self, slots: int, stay_open: int) -> None:
        self.directory = SlotDirectory(slots, PROCESS_CONTEXT, 1e6)
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self._numbers = itertools.count(1)
        self._leases = itertools.count()
        for _ in range(stay_open):
            handoff = self.open(self.prompt(BLOCKS))
            self.copied(handoff)
            self.lease(handoff)

    def timed(self, operation: str, work: Callable[[], Result]) -> Result:
        start = time.perf_counter_ns()
        result = work()
        self.times[operation].append((time.perf_counter_ns() - start) / 1e3)
        return result

    def prompt(self, blocks: int) -> Prompt:
        """A prompt that has no block in common with another."""
        return Prompt(
            token_ids=range(blocks * BLOCK),
            num_tokens=blocks * BLOCK,
            block_hashes=[next(self._numbers).to_bytes(32, "big") for _ in range(blocks)],
            hash_block_size=BLOCK,
        )

    def open(self, prompt: Prompt, operation: str = "") -> Handoff:
        keys = [list(prompt.block_hashes)]
        handoff = self.timed(operation, lambda: self.directory.open(prompt, keys))
        assert handoff is not None, "there is room"
        return handoff

    def copied(self, handoff: Handoff) -> None:
        """Its blocks are copied, and it is finished."""
        blocks = [(0, i) for i in range(len(handoff.slots[0]))]

        def work() -> None:
            chosen = self.directory.copying(handoff, blocks)
            assert chosen is not None
            if chosen:
                self.directory.filled(handoff, chosen)
            self.directory.commit(handoff)

        self.timed("copied" if len(blocks) == BLOCKS else "", work)

    def lease(self, handoff: Handoff) -> tuple[int, int]:
        """Lease it to the next peer; returns the lease's name."""
        number = next(self._leases)
        name = number % PEERS, number
        prompt = handoff.prompt
        digest = prompt.digest("blocks")
        answer = self.timed(
            "lease",
            lambda: self.directory.lease(handoff.token, prompt.num_tokens, digest, "blocks", name),
        )
        assert answer.state is LeaseState.GRANTED
        return name

    def hand_off(self, prompt: Prompt, operation: str) -> None:
        """One hand-off from its beginning to its end."""
        handoff = self.open(prompt, operation)
        self.copied(handoff)
        name = self.lease(handoff)
        self.timed("expire", self.directory.expire)
        self.timed("release", lambda: self.directory.release(handoff.token, name))

    def fill(self) -> None:
        """Cache blocks in every slot that is free."""
        while free := self.directory.num_slots - sum(self.directory.usage()[:2]):
            handoff = self.open(self.prompt(min(free, FILL_BLOCKS)))
            self.copied(handoff)
            self.directory.close(handoff.token)


def measure(slots: int, stay_open: int, repeats: int) -> dict[str, float]:
    """Median microseconds of each operation."""
    bench = Bench(slots, stay_open)
    bench.times.clear()
    for _ in range(min(repeats, slots // BLOCKS - stay_open)):
        bench.hand_off(bench.prompt(BLOCKS), "open, free slots")
    bench.fill()
    for _ in range(repeats):
        prompt = bench.prompt(BLOCKS)
        bench.hand_off(prompt, "open, evicts")
        bench.hand_off(prompt, "open, cached prefix")
    return {name: statistics.median(bench.times[name]) for name in OPERATIONS}


def markdown(results: dict[tuple[int, int], dict[str, float]], command: str) -> str:
    lines = [
        "# The slot directory by size",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"Microseconds for one call, medians. Each hand-off has {BLOCKS} blocks and is leased by "
        f"one of {PEERS} peers; as many as the second column says stay open and leased. *open*: "
        "its slots are taken: free ones, those that hold the same blocks already, or, in an arena "
        "without free slots, those that were cached longest ago. *copied*: its copies begin and "
        "end. *release*: the lease ends, and with it the hand-off, whose blocks stay cached. "
        "*expire*: what is past its time is looked for; nothing is.",
        "",
        f"| slots | open hand-offs | {' | '.join(OPERATIONS)} |",
        f"|---:|---:|{'---:|' * len(OPERATIONS)}",
    ]
    for (slots, stay_open), times in results.items():
        figures = " | ".join(f"{times[name]:.1f}" for name in OPERATIONS)
        lines.append(f"| {slots:,} | {stay_open:,} | {figures} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    repeats = 100 if arguments.quick else 1000
    results = {}
    for slots, stay_open in itertools.product(SLOTS, OPEN):
        if stay_open * BLOCKS < slots:
            gc.collect()
            results[slots, stay_open] = measure(slots, stay_open, repeats)
    command = "python benchmarks/scale.py" + (" --quick" if arguments.quick else "")
    text = markdown(results, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "scale.md").write_text(text)


if __name__ == "__main__":
    main()
