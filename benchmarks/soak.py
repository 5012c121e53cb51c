# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests to engines that share their prefixes, while they come and go and change.

One is killed, or drains and ends, and starts again; two are given other roles and other weights.
See `tests.soak`. Every answer is compared with that of an engine with the same weights and without
connector. In the end nothing may be left: no slot held, no file in the runtime folder or in
/dev/shm. The memory of the two engines that run throughout is looked at every second.

    python benchmarks/soak.py [--requests 10000] [--quick]

writes results/soak.md beside this file. The exit status is 1 if an answer was wrong or missing, or
if anything was left.
"""

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from machine import machine

from omni_connector.runtime.metric_names import COUNTERS
from omni_connector.testing.engines import Engine
from omni_connector.testing.models import make_model
from tests import soak

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.e2e.fork_server import ForkServer  # noqa: E402
from tests.e2e.pool import PooledEngine, engine_environment  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LEFT_S = 60.0
STATUS_S = 3.0
FLAT_BYTES = 8 << 20
SHOWN = (
    "tokens_kept",
    "tokens_from_host",
    "handoffs_offered",
    "handoffs_received",
    "handoffs_expired",
    "blocks_saved",
    "blocks_dropped",
)


def _is_free(engine: Engine) -> bool:
    return not soak.held(engine)


class Host:
    """Makes the engines, all in one runtime folder; forks of a process that has imported vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.weights = [make_model("llama", folder / f"model {n}", seed=n) for n in range(2)]
        self._numbers = itertools.count()
        self._environment = {**engine_environment(self.runtime), **soak.ENVIRONMENT}
        one_thread = {"OMP_NUM_THREADS": "1"}
        self._forks = ForkServer(folder / "forks.log", self._environment | one_thread)
        self.close = self._forks.close

    def engine(
        self, transfer: Mapping[str, Any] | None = None, weights: int = 0, **settings: Any
    ) -> Engine:
        """An engine that is not started yet; None of a transfer makes the reference."""
        number, cores = next(self._numbers), sorted(os.sched_getaffinity(0))
        return PooledEngine(
            self.weights[weights],
            self.folder / f"{number}.log",
            transfer,
            # vLLM computes float32 on every CPU alike.
            arguments=(
                *("--dtype", "float32", "--max-num-batched-tokens", "512"),
                *("--max-model-len", str(soak.MAX_MODEL_LEN)),
            ),
            environment=self._environment,
            fork_server=self._forks,
            core=cores[number % len(cores)],
            **settings,
        )

    def sharer(self) -> Engine:
        """One whose cache and arena are too small for the prompts."""
        transfer = {
            "kv_connector": "OmniKVConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": soak.SETTINGS,
        }
        return self.engine(transfer, kv_cache_bytes=soak.KV_CACHE_BYTES)


def run(host: Host, requests: int, seconds: float) -> tuple[soak.Report, list[str]]:
    """What came of so many requests, and what was left in the end."""
    prompts = soak.make_prompts(families=8, each=6)
    expected = []
    for number in range(len(host.weights)):
        with host.engine(weights=number) as engine:
            expected.append(soak.references(engine, prompts))
    left: list[str] = []
    pair = [host.sharer() for _ in range(2)]
    try:
        for engine in pair:
            engine.start()
        for engine in pair:
            engine.wait_ready()
        for engine in pair:
            soak.until(partial(_is_free, engine), LEFT_S, "still held")
        time.sleep(STATUS_S)  # they have written all files that they write
        ours = soak.files(host.runtime)
        work = soak.Soak(pair, host.sharer, prompts, expected, host.weights, host.runtime)
        report = work.run(requests, seconds=seconds)
        for number, engine in enumerate(pair):
            try:
                soak.until(partial(_is_free, engine), LEFT_S, "still held")
            except AssertionError:
                left.append(f"engine {number} holds {soak.held(engine)}")
        try:
            soak.until(lambda: soak.files(host.runtime) <= ours, LEFT_S, "still there")
        except AssertionError:
            left += [f"{name} of a killed engine" for name in soak.files(host.runtime) - ours]
        names = {name: f"vllm:omni_connector_{name}_total" for name in COUNTERS}
        names["preemptions"] = "vllm:num_preemptions_total"
        for name, metric in names.items():
            report.counts[name] = sum(engine.metric(metric) for engine in pair)
        for engine in pair:
            for labels, value in engine.samples("vllm:omni_connector_failures_total"):
                kind = f"failures: {labels['kind']}"
                report.counts[kind] = report.counts.get(kind, 0) + value
    finally:
        for engine in pair:
            engine.stop()
    soak.sweep(host.runtime)  # by default vLLM kills its engine core and workers
    left += soak.files(host.runtime)
    left += [str(path) for path in report.memory if path.exists()]
    return report, left


def happened(report: soak.Report) -> str:
    """What was done to the engines, in a sentence."""
    done = report.changes
    return (
        f"The third engine was killed {done['kill']} times, and drained {done['drain']} times; the "
        f"two others were given weights {done['refit']} times, and a role {done['role']} times."
    )


def markdown(report: soak.Report, left: list[str], seconds: float, command: str) -> str:
    """The results as a page."""
    answered = sum(report.answered.values())
    lines = [
        "# The soak",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"{answered} requests in {seconds / 60:.1f} minutes, {answered / seconds:.1f} a second: "
        f"{len(report.wrong)} wrong answers, {len(report.broken)} without an answer, "
        f"{len(left)} things left. " + happened(report),
        "",
        *("| requests | number |", "|:--|---:|"),
        *(f"| {kind} | {number} |" for kind, number in sorted(report.answered.items())),
        "",
        "Of the two engines that ran throughout, both together:",
        "",
        *("| counted | number |", "|:--|---:|"),
    ]
    counts = report.counts.items()
    lines += [
        f"| {name} | {value:.0f} |"
        for name, value in counts
        if name in SHOWN or (value and name not in COUNTERS)
    ]
    lines += [
        "",
        "By process, the median of the last quarter of the looks, and what it is more than that of "
        f"the second quarter. More than {FLAT_BYTES >> 20} MiB of memory is a leak.",
        "",
        "| process | own memory, MiB | growth | shared, MiB | growth | files, growth "
        "| threads, growth |",
        "|:--|---:|---:|---:|---:|---:|---:|",
    ]
    growths = {kind: report.growth(kind) for kind in soak.KINDS}
    for process, series in report.usage.items():
        own, shared, files, threads = (growths[kind][process] for kind in soak.KINDS)
        lines.append(
            f"| {process.rpartition(' ')[0]} "
            f"| {series['own'][-1] / 2**20:.1f} | {own / 2**20:+.1f} "
            f"| {series['shared'][-1] / 2**20:.1f} | {shared / 2**20:+.1f} "
            f"| {files:+.0f} | {threads:+.0f} |"
        )
    for title, items in (("Wrong", report.wrong), ("Broken", report.broken), ("Left", left)):
        if items:
            lines += ["", f"## {title}", "", *(f"- {item}" for item in items[:50])]
    return "\n".join([*lines, ""])


def main() -> int:
    """Run it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="300 requests")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="most that it takes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of the engines")
    arguments = parser.parse_args()
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    arguments.output.mkdir(parents=True, exist_ok=True)
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        host, began = Host(Path(folder)), time.monotonic()
        try:
            requests = 300 if arguments.quick else arguments.requests
            report, left = run(host, requests, 60 * arguments.minutes)
        finally:
            host.close()
            if arguments.logs is not None:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.log"):
                    shutil.move(log, arguments.logs / log.name)
    command = " ".join(["python benchmarks/soak.py", *sys.argv[1:]])
    page = markdown(report, left, time.monotonic() - began, command)
    (arguments.output / "soak.md").write_text(page)
    print(page)
    grown = max(report.growth("own").values(), default=0.0) > FLAT_BYTES
    return int(bool(report.wrong or report.broken or left or grown))


if __name__ == "__main__":
    sys.exit(main())
