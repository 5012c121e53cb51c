# SPDX-License-Identifier: Apache-2.0
"""A million hostile inputs for each parser: a typed error or a clean refusal, and nothing else.

Each parser of `tests.hostile` is tried in a process of its own, which may map
half a GiB more than it has when it starts, and which is ended, with its stacks shown, where
thousand inputs take two minutes. The first inputs are traced for the memory that each takes.
An input that ends otherwise stops the parser's process, with seed, number and input. What follows
from messages through sockets and threads gets a twentieth of the inputs.

    python benchmarks/hostile_bytes.py [--quick] [--inputs N] [--seed N] [PARSER ...]

writes results/hostile_bytes.md beside this file, unless parsers are named.
"""

import argparse
import faulthandler
import json
import logging
import os
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from machine import machine

from tests.hostile import FOLLOWED, PARSERS, attack, opened

RESULTS = Path(__file__).parent / "results"
ROOM_BYTES = 512 << 20
HANGS_S = 120
TRACED = 20_000


def try_one(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """Attack one parser in this process."""
    logging.disable(logging.CRITICAL)
    with opened(name) as parser:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, size + ROOM_BYTES))
        alive = parser.alive

        def check() -> None:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            alive()

        parser.alive = check
        check()
        tally = attack(parser, inputs, seed, traced=min(TRACED, inputs))
        faulthandler.cancel_dump_traceback_later()
    told = {each.name: getattr(tally, each.name) for each in fields(tally)}
    return {**told, "accepted": tally.accepted}


def row(tally: dict[str, Any]) -> str:
    """A line of the table."""
    refused = sorted(tally["refused"].items(), key=lambda each: -each[1])
    shown = ", ".join(f"{kind} {count:,}" for kind, count in refused[:8])
    if len(refused) > 8:
        shown += f", {len(refused) - 8} kinds more"
    return (
        f"| {tally['name']} | {tally['inputs']:,} | {shown} | {tally['accepted']:,} | "
        f"{tally['peak_bytes'] / 1024:.0f} | {tally['grown_bytes'] / (1 << 20):.0f} | "
        f"{tally['slowest_s'] * 1000:.0f} | {tally['inputs'] / tally['seconds']:,.0f} |"
    )


HEAD = (
    "| parser | inputs | refused with | accepted | most KiB for one input | "
    "MiB that the process grew | slowest, ms | inputs a second |\n"
    "|---|---:|---|---:|---:|---:|---:|---:|"
)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("parsers", nargs="*", metavar="PARSER", choices=[*PARSERS, []])
    arguments.add_argument("--inputs", type=int, default=1_000_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--quick", action="store_true", help="20,000 inputs each")
    arguments.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    inputs = min(options.inputs, 20_000) if options.quick else options.inputs
    if options.child:
        [name] = options.parsers
        print(json.dumps(try_one(name, inputs, options.seed)))
        return 0
    rows, failed = [], []
    print(HEAD, flush=True)
    for name in options.parsers or PARSERS:
        count = inputs // 20 if name in FOLLOWED else inputs
        command = [sys.executable, __file__, "--child", f"--inputs={count}"]
        done = subprocess.run(
            [*command, f"--seed={options.seed}", name],
            # Else glibc maps 128 MiB for each new thread.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode != 0:
            failed.append(name)
            continue
        rows.append(row(json.loads(done.stdout)))
        print(rows[-1], flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
        return 1
    if not options.parsers:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "hostile_bytes.md").write_text(
            "# Hostile bytes\n\n"
            f"`python benchmarks/hostile_bytes.py`, seed {options.seed}: {machine()}.\n\n"
            "Valid inputs are changed by bytes and by structure. Each ends in a typed error or a "
            "clean refusal, or is still (or again) valid; anything else, a process that maps "
            f"{ROOM_BYTES >> 20} MiB more, a hang or a thread that has ended would have stopped "
            f"the run. Memory of one input: of the first {TRACED:,}, as Python counts it.\n\n"
            + "\n".join([HEAD, *rows])
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
