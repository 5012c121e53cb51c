# SPDX-License-Identifier: Apache-2.0
"""Asks the tests and the simulation about a mutant, in processes that are forked for it.

The process that forks has imported torch, vLLM and pytest, and nothing of omni_connector: what a
fork imports is the mutant, whose source an import hook gives it. Nothing is written to the tree.
Processes that a test starts find the mutant through a `sitecustomize` on their PYTHONPATH.
"""

import faulthandler
import gc
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import coverage
import pytest

from benchmarks.mutants_sample.making import Mutation
from benchmarks.mutants_sample.measuring import ROOT

FIRST_TESTS: Final = 40
FIRST_FILES: Final = 5
FIRST_S: Final = 8.0
"""What the first round asks: the nearest tests, of so many files, and the seconds that they take
unchanged."""

_SLOWNESS: Final = 12.0
_START_S: Final = 90.0
"""A round ends after `_START_S` and this many times what it takes unchanged."""

_MOST_BYTES: Final = 6 << 30
_SURE_S: Final = 0.3
"""Tests that take longer are asked again without the mutant: they may fail for want of time."""

_NOT_FOR_WANT_OF_TIME: Final = (
    "AttributeError",
    "IndexError",
    "KeyError",
    "NameError",
    "TypeError",
    "UnboundLocalError",
    "ZeroDivisionError",
)

_PRELOADED: Final = (
    "torch",
    "vllm.config",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.outputs",
    "vllm.v1.worker.utils",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "hypothesis",
    "hypothesis.strategies",
    "_hypothesis_pytestplugin",
    "numpy.testing",
    "llvmlite.binding",
    "msgspec",
    "xxhash",
    "zmq",
)

_SITE: Final = """\
import importlib.util, sys
_NAME, _ORIGIN, _SOURCE = {name!r}, {origin!r}, {source!r}
class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != _NAME:
            return None
        package = [_ORIGIN.rpartition("/")[0]] if _ORIGIN.endswith("/__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, _ORIGIN, loader=self, submodule_search_locations=package
        )
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        with open(_SOURCE, encoding="utf-8") as file:
            code = compile(file.read(), _ORIGIN, "exec")
        exec(code, module.__dict__)
sys.meta_path.insert(0, _Finder())
"""


@dataclass(frozen=True)
class Answer:
    """What a round has found.

    Attributes:
        by: the test that failed, or `seed 12`; None when nothing did.
        how: in its words.
        asked: how many tests or seeds passed.
    """

    by: str | None
    how: str
    asked: int


class Measured:
    """Which tests and seeds execute which line, as `measuring` has written it."""

    def __init__(self, folder: Path) -> None:
        self._took: dict[str, float] = {}
        self._by_line: dict[str, dict[str, dict[int, list[str]]]] = {}
        self.failed: list[str] = []
        for path in (*sorted(folder.glob("tests*.json")), folder / "seeds.json"):
            kept = json.loads(path.read_text())
            self.failed += kept["failed"]
            self._took |= {
                each: took for each, took in kept["took"].items() if each not in kept["failed"]
            }
            data = coverage.CoverageData(str(path.with_suffix(".coverage")))
            data.read()
            files = self._by_line.setdefault(path.stem.partition("-")[0], {})
            for file in data.measured_files():
                lines = files.setdefault(str(Path(file).relative_to(ROOT / "omni_connector")), {})
                for line, names in data.contexts_by_lineno(file).items():
                    lines.setdefault(line, []).extend(names)

    def tests(self, mutation: Mutation) -> list[str]:
        """Those that execute it, the nearest first, of these the quickest first."""
        subject = mutation.path.partition("/")[0]
        stem = Path(mutation.path).stem

        def place(test: str) -> tuple[bool, bool, float]:
            path = test.partition("::")[0]
            return stem not in path, f"tests/{subject}/" not in path, self._took[test]

        found = self._executing("tests", mutation)
        if mutation.names or not found:  # tests may look at it, or start processes that execute it
            found |= {test for test in self._took if stem in test.partition("::")[0]}
        return sorted(found, key=place)

    def seeds(self, mutation: Mutation) -> list[int]:
        """Those that execute it."""
        return sorted(map(int, self._executing("seeds", mutation)))

    def known(self, name: str) -> bool:
        """Whether this test or seed was measured, and passed."""
        return name in self._took

    def seconds(self, names: Sequence[str]) -> float:
        """What these take, unchanged."""
        return sum(self._took[name] for name in names)

    def _executing(self, kind: str, mutation: Mutation) -> set[str]:
        lines = self._by_line[kind].get(mutation.path, {})
        first, last = mutation.lines
        within = range(first, last + 1)
        if mutation.names:
            source = (ROOT / "omni_connector" / mutation.path).read_text().splitlines()
            read = re.compile(rf"\b({'|'.join(mutation.names)})\b")
            within = [at for at, text in enumerate(source, 1) if read.search(text)]
        found = {each for at in within for each in lines.get(at, ())}
        imported = "" in found or not mutation.in_function
        found &= self._took.keys()
        if imported and not found:  # all that use the module may see it
            found = {each for names in lines.values() for each in names} & self._took.keys()
        return found


def preload() -> None:
    """Import what is large, and nothing of omni_connector."""
    for name in _PRELOADED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] == "omni_connector"]
    if ours:
        raise RuntimeError(f"imported too early: {ours}")
    gc.freeze()


class Round:
    """One process that asks about a mutant, or about the unchanged code."""

    def __init__(
        self,
        mutation: Mutation | None,
        ask: Callable[["_Notes"], None],
        seconds: float,
        log: Path,
    ) -> None:
        self.mutation = mutation
        self._folder = Path(tempfile.mkdtemp(prefix="mu-", dir="/tmp"))
        self._notes = self._folder / "notes.json"
        self._log = log
        self._end = time.monotonic() + _START_S + _SLOWNESS * seconds
        self._pid = os.fork()
        if self._pid == 0:
            _in_the_fork(mutation, ask, self._folder, log)
        self._hung = ""

    def poll(self) -> Answer | None:
        """What was found, once the process has ended."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > self._end:
                self._hung = "hangs"
            elif _resident(self._pid) > _MOST_BYTES:
                self._hung = "takes all memory"
            if self._hung:
                self._kill()
            return None
        self._kill()
        answer = self._answer(status)
        shutil.rmtree(self._folder, ignore_errors=True)
        return answer

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._kill()
        os.waitpid(self._pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _answer(self, status: int) -> Answer:
        try:
            notes = json.loads(self._notes.read_text())
        except FileNotFoundError:
            notes = {"at": None, "by": None, "how": "", "asked": 0, "ended": False}
        if notes["by"] is None and not notes["ended"]:
            how = self._hung or f"the process ends with {os.waitstatus_to_exitcode(status)}"
            return Answer(notes["at"] or "the import", how, notes["asked"])
        return Answer(notes["by"], notes["how"], notes["asked"])


class _Notes:
    """What a fork writes down as it goes, so that its end says what it was at."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = {"at": None, "by": None, "how": "", "asked": 0, "ended": False}

    def begins(self, name: str) -> None:
        self._kept["at"] = name
        self._write()

    def passes(self) -> None:
        self._kept["asked"] += 1

    def fails(self, name: str, how: str) -> None:
        if self._kept["by"] is None:
            self._kept |= {"by": name, "how": how}
            self._write()

    def ends(self) -> None:
        self._kept["ended"] = True
        self._write()

    @property
    def failed(self) -> bool:
        return self._kept["by"] is not None

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._kept))
        new.rename(self._path)


def asking_tests(tests: Sequence[str]) -> Callable[[_Notes], None]:
    """A round that runs these tests in this order, until one fails."""

    def ask(notes: _Notes) -> None:
        files = sorted({test.partition("::")[0] for test in tests})
        words = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--timeout=150"]
        status = pytest.main([*words, *files], plugins=[_Chosen(tests, notes)])
        if status not in (0, 1, 5) and not notes.failed:
            notes.fails("the collection of tests", f"pytest ends with {int(status)}")
        if status == 5 and not notes.failed:
            raise RuntimeError("no test was found")

    return ask


def asking_seeds(seeds: Sequence[int]) -> Callable[[_Notes], None]:
    """A round that runs these seeds, until one fails."""

    def ask(notes: _Notes) -> None:
        try:
            from tests.simulation.campaign import campaign

            for at, seed in enumerate(seeds):
                notes.begins(f"seed {seed}")
                if at % 25 == 0:
                    gc.collect()
                verdict = next(campaign([seed], shrink=False), None)
                if verdict is not None:
                    notes.fails(f"seed {seed}", verdict.failure.text)
                    return
                notes.passes()
        except Exception as error:  # noqa: BLE001 - whatever the mutant raises
            notes.fails("the simulation", f"{type(error).__name__}: {error}")

    return ask


class _Chosen:
    """Has pytest run the chosen tests in their order, and tells how they go."""

    def __init__(self, tests: Sequence[str], notes: _Notes) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self._notes = notes

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._places]
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._notes.fails(report.nodeid, _last_line(report.longreprtext))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._notes.begins(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            how = crash.message if crash else _last_line(report.longreprtext)
            self._notes.fails(report.nodeid, how)
        elif report.when == "call":
            self._notes.passes()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _in_the_fork(
    mutation: Mutation | None, ask: Callable[[_Notes], None], folder: Path, log: Path
) -> None:
    status = 1
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable()
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
        os.environ["OMNI_MUTANT"] = "1"
        if mutation is not None:
            _infect(mutation, folder)
        notes = _Notes(folder / "notes.json")
        ask(notes)
        notes.ends()
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must end here
        traceback.print_exc()
    finally:
        os._exit(status)


def _infect(mutation: Mutation, folder: Path) -> None:
    source = folder / "mutant.py"
    source.write_text(mutation.source, encoding="utf-8")
    site = folder / "site"
    site.mkdir()
    origin = str(ROOT / "omni_connector" / mutation.path)
    text = _SITE.format(name=mutation.module, origin=origin, source=str(source))
    (site / "sitecustomize.py").write_text(text, encoding="utf-8")
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), path)))
    exec(compile(text, "sitecustomize", "exec"), {})


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def unsure(answer: Answer, measured: Measured) -> bool:
    """Whether what failed is to be asked about the unchanged code, as it may have failed for want
    of time.
    """
    by = answer.by or ""
    if answer.how.startswith(_NOT_FOR_WANT_OF_TIME):
        return False
    return by.startswith("tests/") and measured.known(by) and measured.seconds([by]) > _SURE_S
