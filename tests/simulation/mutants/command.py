# SPDX-License-Identifier: Apache-2.0
"""The simulation's negative control: small faults, each of which it has to find.

A mutant is a place in the source and what stands there instead. Those of a defect take out what
mended it. `python -m tests.simulation.mutants` runs the simulation on each and
says after how many seeds it was found. A seed that fails without the mutant too finds nothing.
"""

import argparse
import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.simulation import HASHES_VARIABLE
from tests.simulation.mutants.faults import Mutant
from tests.simulation.mutants.mutations import MUTANTS

MOST_SEEDS: Final = 1000

# Imported once, before processes are forked for the mutants: all that is large, nothing of ours.
_PRELOADED: Final = [
    "torch",
    "vllm.config",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.outputs",
    "vllm.v1.worker.utils",
]

_SAMPLE: Final = (
    "These were chosen. Of mutants that nobody chose, [another table](mutants_sample.md) has 300."
)
_HEAD: Final = "| mutant | what is wrong | seeds | found by |\n|---|---|---|---|"

_Failed = tuple[int, str]
"""A seed, and how it failed."""


@dataclass(frozen=True)
class Finding:
    """How a mutant fared.

    Attributes:
        seeds: how many schedules it took; None when it was not found.
        text: what gave it away.
    """

    mutant: Mutant
    seeds: int | None
    text: str

    def __str__(self) -> str:
        number = "**not found**" if self.seeds is None else str(self.seeds)
        text = self.text[:110].replace("|", "/").replace("\n", " ")
        return f"| {self.mutant.name} | {self.mutant.why} | {number} | {text} |"


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; 1 when one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, default=MOST_SEEDS, help="seeds for each")
    parser.add_argument("--only", help="a part of the names of those to run")
    parser.add_argument("--list", action="store_true", help="name them")
    parser.add_argument("--keep", type=Path, help="write the table to this file too")
    parser.add_argument(
        "--missing", action="store_true", help="run those that the kept table lacks; keep its rows"
    )
    options = parser.parse_args(arguments)
    kept: dict[str, str] = {}
    if options.missing and options.keep is not None:
        kept = _rows(options.keep.read_text())
    chosen = [
        each
        for each in MUTANTS
        if (options.only is None or options.only in each.name) and each.name not in kept
    ]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.why}")
        return 0
    os.environ[HASHES_VARIABLE] = "0"  # of the processes that are started
    started = time.monotonic()
    minutes = 0.0
    found_now: dict[str, str] = {}
    print(_HEAD, flush=True)
    for number, found in enumerate(_all(chosen, options.most, options.jobs), start=1):
        found_now[found.mutant.name] = str(found)
        print(found, flush=True)
        minutes = (time.monotonic() - started) / 60
        print(f"{number} of {len(chosen)}, {minutes:.1f} minutes", file=sys.stderr, flush=True)
    rows = kept | found_now
    rows = {each.name: rows[each.name] for each in MUTANTS if each.name in rows}
    result = _result(rows, options.most)
    if not kept:
        result += f" {minutes:.1f} minutes with {options.jobs} process(es)."
    print(result)
    if options.keep is not None:
        table = "\n".join(rows.values())
        options.keep.write_text(f"# Mutants\n\n{result}\n\n{_SAMPLE}\n\n{_HEAD}\n{table}\n")
    return 1 if any(_seeds_of(row) is None for row in rows.values()) else 0


def _rows(table: str) -> dict[str, str]:
    """The rows of a table that was kept, by the mutant's name."""
    _, _, rows = table.partition(_HEAD)
    return {row.split("|")[1].strip(): row for row in rows.strip().splitlines()}


def _seeds_of(row: str) -> int | None:
    seeds = row.split("|")[3].strip()
    return int(seeds) if seeds.isdigit() else None


def _result(rows: dict[str, str], most: int) -> str:
    seeds = sorted(found for row in rows.values() if (found := _seeds_of(row)) is not None)
    text = f"{len(seeds)} of {len(rows)} mutants found within {most} seeds each"
    if seeds:
        text += f", half of them within {seeds[(len(seeds) - 1) // 2]}, the last after {seeds[-1]}"
    return text + "."


def _all(chosen: list[Mutant], most: int, jobs: int) -> Iterator[Finding]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with context.Pool(1) as unchanged, ThreadPoolExecutor(jobs) as threads:

        @functools.cache
        def fails_anyway(seed: int) -> bool:
            return unchanged.apply(_first_failure, (None, seed, seed + 1)) is not None

        yield from threads.map(functools.partial(_find, context, fails_anyway, most), chosen)


def _find(
    context: ForkServerContext, fails_anyway: Callable[[int], bool], most: int, mutant: Mutant
) -> Finding:
    seed = 0
    while seed < most:
        failed = _apart(context, mutant.name, seed, most)
        if failed is None:
            break
        seed, text = failed
        if not fails_anyway(seed):
            return Finding(mutant, seed + 1, text)
        seed += 1
    return Finding(mutant, None, "")


def _apart(context: ForkServerContext, *work: Any) -> _Failed | None:
    """`_first_failure` in a process of its own: what is imported there is the mutant."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell_first_failure, args=(there, *work))
    process.start()
    there.close()
    try:
        failed: _Failed | None = here.recv()
    except EOFError:
        raise RuntimeError(f"the process of the mutant {work[0]!r} has ended") from None
    finally:
        process.join()
        here.close()
    return failed


def _tell_first_failure(there: Connection, *work: Any) -> None:
    there.send(_first_failure(*work))
    there.close()


def _first_failure(name: str | None, first: int, most: int) -> _Failed | None:
    """The first of these seeds that fails, with this mutant or with none, and how."""
    if name is not None:
        infect(next(each for each in MUTANTS if each.name == name))
    from tests.simulation.campaign import campaign

    verdict = next(campaign(range(first, most), shrink=False), None)
    if verdict is None or verdict.failure is None:
        return None
    return verdict.seed, verdict.failure.text


def infect(mutant: Mutant) -> None:
    """Have a module imported with the mutant's source; nothing of it may be imported yet.

    Raises:
        ValueError: the source has changed, so that the mutant does not fit any more.
        RuntimeError: the module is there already.
    """
    for change in mutant.changes:
        if change.module in sys.modules:
            raise RuntimeError(f"{change.module} is imported already")
    sources: dict[str, str] = {}
    for change in mutant.changes:
        spec = importlib.util.find_spec(change.module)
        assert spec is not None
        assert spec.origin is not None
        source = sources.get(change.module)
        if source is None:
            with open(spec.origin, encoding="utf-8") as file:
                source = file.read()
        sources[change.module] = change.applied(source)
    sys.meta_path.insert(0, _Finder(sources))


class _Finder:
    """Finds the modules that are changed, and runs their changed source."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._sources:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._origin = spec.origin
                    loader: Any = self
                    return importlib.util.spec_from_loader(name, loader, origin=spec.origin)
        return None

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self._sources[module.__name__], str(self._origin), "exec")
        exec(code, module.__dict__)
