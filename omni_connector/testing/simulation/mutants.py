# SPDX-License-Identifier: Apache-2.0
"""The simulation's negative control: small faults, each of which it has to find.

A mutant is a place in the source and what stands there instead. Those of a defect take out what
mended it. `python -m omni_connector.testing.simulation.mutants` runs the simulation on each and
says after how many seeds it was found.
"""

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from omni_connector.testing.simulation import HASHES_VARIABLE
from omni_connector.testing.simulation.mutations import MUTANTS, Mutant

MOST_SEEDS: Final = 1000


@dataclass(frozen=True)
class Found:
    """How a mutant fared.

    Attributes:
        seeds: how many schedules it took; None when it was not found.
        text: what gave it away.
    """

    mutant: Mutant
    seeds: int | None
    text: str
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; 1 when one was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_connector.testing.simulation.mutants", description=__doc__
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, default=MOST_SEEDS, help="seeds for each")
    parser.add_argument("--only", help="a part of the names of those to run")
    parser.add_argument("--list", action="store_true", help="name them")
    options = parser.parse_args(arguments)
    chosen = [each for each in MUTANTS if options.only is None or options.only in each.name]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.why}")
        return 0
    work = [(mutant.name, options.most) for mutant in chosen]
    missed = 0
    print("| mutant | what is wrong | seeds | found by |\n|---|---|---|---|", flush=True)
    os.environ[HASHES_VARIABLE] = "0"  # of the processes that are started
    # Each in a process of its own: what is imported there is the mutant.
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for found in pool.imap(_try, work, chunksize=1):
            missed += found.seeds is None
            number = "**not found**" if found.seeds is None else str(found.seeds)
            text = found.text[:90].replace("|", "/")
            print(f"| {found.mutant.name} | {found.mutant.why} | {number} | {text} |", flush=True)
    return 1 if missed else 0


def _try(work: tuple[str, int]) -> Found:
    name, most = work
    mutant = next(each for each in MUTANTS if each.name == name)
    infect(mutant)
    from omni_connector.testing.simulation.campaign import campaign

    started = time.monotonic()
    verdict = next(campaign(range(most), shrink=False), None)
    seconds = time.monotonic() - started
    if verdict is None or verdict.failure is None:
        return Found(mutant, None, "", seconds)
    return Found(mutant, verdict.seed + 1, verdict.failure.text, seconds)


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
        if source.count(change.old) != 1:
            raise ValueError(
                f"mutant {mutant.name} fits {source.count(change.old)} places of {change.module}"
            )
        sources[change.module] = source.replace(change.old, change.new)
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


if __name__ == "__main__":
    sys.exit(main())
