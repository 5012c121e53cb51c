# SPDX-License-Identifier: Apache-2.0
"""Measures which tests, and which seeds of the simulation, execute which line.

As a plugin of pytest (`-p benchmarks.mutants_sample.measuring`) it traces the tests of that run. As
a module (`python -m benchmarks.mutants_sample.measuring 0:200`) it traces seeds. Both write to the
folder that `FOLDER_VARIABLE` names: `*.coverage`, whose contexts are tests or seeds, and `*.json`
with the seconds that each took and whether it passed. `NAME_VARIABLE` gives files of tests another
name than `tests`, so that they stand beside those.
"""

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import coverage
import pytest

ROOT: Final = Path(__file__).parents[2]
FOLDER_VARIABLE: Final = "OMNI_MUTANTS_FOLDER"
NAME_VARIABLE: Final = "OMNI_MUTANTS_NAME"
SUBJECTS: Final = ("handoff", "prefix", "copy", "kv", "arena", "identity", "vllm_v1")


class Tracing:
    """Coverage with a context for each test or seed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._kept = folder / f"{name}.json"
        self._took: dict[str, float] = {}
        self._failed: set[str] = set()
        self._coverage = coverage.Coverage(
            data_file=str(folder / f"{name}.coverage"),
            config_file=False,
            include=[str(ROOT / "omni_connector" / subject / "*") for subject in SUBJECTS],
        )
        self._coverage.erase()
        self._coverage.start()

    def begin(self, name: str) -> None:
        """From here on it is this test or seed that executes lines."""
        self._coverage.switch_context(name)

    def took(self, name: str, seconds: float, *, passed: bool) -> None:
        """A test or seed, or a part of it, has ended."""
        self._took[name] = self._took.get(name, 0.0) + seconds
        if not passed:
            self._failed.add(name)

    def close(self) -> None:
        """Write what was measured."""
        self._coverage.stop()
        self._coverage.save()
        kept = {"took": self._took, "failed": sorted(self._failed)}
        self._kept.write_text(json.dumps(kept, indent=0))


def _traced_tests() -> Tracing | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or __name__ == "__main__":
        return None
    return Tracing(Path(folder), os.environ.get(NAME_VARIABLE, "tests"))


_tracing = _traced_tests()  # before anything of ours is imported


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """Trace a test with its fixtures."""
    if _tracing is not None:
        _tracing.begin(item.nodeid)
    yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a part of a test went."""
    if _tracing is not None and not report.skipped:
        _tracing.took(report.nodeid, report.duration, passed=report.passed)


def pytest_unconfigure() -> None:
    """Write what was measured."""
    if _tracing is not None:
        _tracing.close()


def main() -> int:
    """Trace seeds of the simulation."""
    first, _, end = sys.argv[1].partition(":")
    tracing = Tracing(Path(os.environ[FOLDER_VARIABLE]), "seeds")
    from tests.simulation.campaign import campaign

    for seed in range(int(first), int(end)):
        tracing.begin(str(seed))
        started = time.monotonic()
        failed = next(campaign([seed], shrink=False), None)
        tracing.took(str(seed), time.monotonic() - started, passed=failed is None)
    tracing.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
