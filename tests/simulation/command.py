# SPDX-License-Identifier: Apache-2.0
"""The command line: runs seeds, and tells of each that fails a story as short as can be had."""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

from tests.simulation.campaign import Verdict, campaign, replayed


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="from:to, or one number")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--only", help="numbers of the events that happen, of one seed, as a story names them"
    )
    parser.add_argument("--order", type=int, default=0, help="as a story names it")
    parser.add_argument("--story", action="store_true", help="also of a seed that does not fail")
    parser.add_argument("--whole", action="store_true", help="leave failing schedules as they are")
    parser.add_argument("--keep", type=Path, help="write the result to this file too")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if options.only is not None or options.story:
        only = None
        if options.only is not None:
            only = {int(number) for number in options.only.split(",") if number}
        return _tell([replayed(seed, only, options.order) for seed in seeds], story=True)
    started = time.monotonic()
    failures = []
    for verdict in _verdicts(seeds, options.jobs, shrink=not options.whole):
        failures.append(verdict)
        _tell([verdict], story=True)
    seconds = time.monotonic() - started
    result = (
        f"{len(seeds)} schedules, seeds {seeds.start}:{seeds.stop}: {len(failures)} failed; "
        f"{len(seeds) / seconds:.1f} a second with {options.jobs} process(es), "
        f"{seconds / 60:.1f} minutes"
    )
    print(result)
    if options.keep is not None:
        _keep(options.keep, result, failures)
    return 1 if failures else 0


def _verdicts(seeds: range, jobs: int, *, shrink: bool) -> Iterator[Verdict]:
    if jobs <= 1:
        yield from campaign(seeds, shrink=shrink)
        return
    # Parts small enough that all are busy to the end.
    size = max(1, min(200, len(seeds) // jobs))
    parts = [(seeds[at : at + size], shrink) for at in range(0, len(seeds), size)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for found in pool.imap_unordered(_part, parts):
            yield from found


def _part(part: tuple[range, bool]) -> list[Verdict]:
    seeds, shrink = part
    return list(campaign(seeds, shrink=shrink))


def _tell(verdicts: list[Verdict], *, story: bool) -> int:
    for verdict in verdicts:
        print("\n".join(verdict.lines(story=story)), flush=True)
    return 1 if any(verdict.failure is not None for verdict in verdicts) else 0


def _keep(path: Path, result: str, failures: list[Verdict]) -> None:
    lines = ["# The simulation", "", result, ""]
    for verdict in failures:
        assert verdict.failure is not None
        lines.append(f"- seed {verdict.seed}: {verdict.failure.text}")
    path.write_text("\n".join(lines).rstrip() + "\n")
