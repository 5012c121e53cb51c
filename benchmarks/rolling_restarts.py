# SPDX-License-Identifier: Apache-2.0
"""Rolling restarts behind vllm-router under load: what is lost, computed twice, or wrong.

Two engines prefill and two decode. In each round every engine gets SIGTERM, ends, and is started
anew, one after the other, while clients send requests to the router without a pause. A request
counts as lost if it gets no answer or a short one; nobody sends it again. A prefill counts as
wasted if it was finished and handed off, and no decode engine has loaded it. See `tests.rolling`.

    python benchmarks/rolling_restarts.py [--requests 1000] [--rounds 6] [--without-drain] [--quick]

writes results/rolling_restarts.md beside this file. With --without-drain the servers shut down by
vLLM's own means alone, as a negative control; its figures are only printed. The exit status is 1
if anything was lost, wasted or wrong.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import machine

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine
from omni_connector.testing.models import make_model
from tests import rolling, soak
from tests.rolling import Outcome, Rolling

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.e2e.fork_server import ForkServer  # noqa: E402
from tests.e2e.pool import PooledEngine, engine_environment  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CLIENTS = 4
KV_CACHE_BYTES = 64 << 20
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
SETTINGS = {"arena_gib": 0.25, "share": False, "drain_quiet_s": rolling.QUIET_S}
KINDS = ("handoffs_offered", "handoffs_received", "handoffs_expired")


class Host:
    """Makes the engines; forks of a process that has imported vLLM.

    Args:
        folder: takes the model and the logs.
        drains: whether the servers run with the middleware.
    """

    def __init__(self, folder: Path, *, drains: bool) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self._drains = drains
        self._model = make_model("llama", folder / "model")
        self._count = 0
        self._environment = engine_environment(self.runtime)
        one_thread = {"OMP_NUM_THREADS": "1"}
        self._forks = ForkServer(folder / "forks.log", self._environment | one_thread)
        self.close = self._forks.close

    def reference(self) -> Engine:
        """An engine without connector, which is told the last token of each prompt."""
        return self._engine(None, "--logits-processors", reference.PROCESSOR)

    def make(self, side: str, port: int | None) -> Engine:
        """An engine of a side; at a port if one is given."""
        transfer: dict[str, object] = {
            "kv_connector": "OmniKVConnector",
            "kv_role": ROLES[side],
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": SETTINGS,
        }
        arguments = rolling.ARGUMENTS if self._drains else rolling.ARGUMENTS[:2]
        engine = self._engine(transfer, *arguments)
        engine.port = port or engine.port
        return engine

    def _engine(self, transfer: dict[str, object] | None, *arguments: str) -> Engine:
        cores = sorted(os.sched_getaffinity(0))
        self._count += 1
        return PooledEngine(
            self._model,
            self.folder / f"{self._count}.log",
            transfer,
            # vLLM computes float32 on every CPU alike.
            arguments=(
                *("--dtype", "float32", "--max-num-batched-tokens", "512"),
                *("--max-model-len", str(soak.MAX_MODEL_LEN), *arguments),
            ),
            environment=self._environment,
            fork_server=self._forks,
            core=cores[self._count % len(cores)],
            kv_cache_bytes=KV_CACHE_BYTES,
        )


def run(host: Host, requests: int, rounds: int) -> Outcome:
    """What came of so many requests and rounds."""
    prompts = soak.make_prompts(families=4, each=4)
    with host.reference() as engine, engine.client() as client:
        expected = [
            reference.same_path(client, each, max_tokens=rolling.MOST_TOKENS) for each in prompts
        ]
    work = Rolling(host.make, host.runtime, host.folder / "router.log", prompts, expected)

    def restarts() -> None:
        for number in range(rounds):
            for side in rolling.SIDES:
                for engine in range(2):
                    work.restart(side, engine)
            outcome = work.outcome
            print(
                f"round {number + 1} of {rounds}: {outcome.answered} answered, "
                f"{len(outcome.lost)} lost, {len(outcome.wrong)} wrong, {outcome.wasted} under way",
                flush=True,
            )

    try:
        work.start()
        return work.run(restarts, CLIENTS, requests)
    finally:
        work.stop()


def markdown(outcome: Outcome, seconds: float, command: str) -> str:
    """The results as a page."""
    lines = [
        "# Rolling restarts",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"{outcome.answered} requests were answered in {seconds / 60:.1f} minutes, through "
        f"{outcome.restarts['prefill']} restarts of prefill engines and "
        f"{outcome.restarts['decode']} of decode engines (two of each, one after the other, by "
        "SIGTERM), behind vllm-router.",
        "",
        "| | number |",
        "|:--|---:|",
        f"| lost requests | {len(outcome.lost)} |",
        f"| finished prefills that nobody loaded | {outcome.wasted} |",
        f"| wrong answers | {len(outcome.wrong)} |",
        f"| engines that did not end by themselves | {outcome.killed} |",
        "",
        "An engine took "
        f"{statistics.median(outcome.exits):.1f} s (median) and {max(outcome.exits):.1f} s (at "
        f"most) from SIGTERM to its end; for {rolling.QUIET_S:g} s of them it waited for requests "
        "that might still come (`drain_quiet_s`).",
        "",
        "Counted by all engines, those that have ended included:",
        "",
        "| | number |",
        "|:--|---:|",
        *(f"| {kind} | {outcome.count(kind)} |" for kind in KINDS),
        *(f"| failures: {kind} | {number} |" for kind, number in outcome.failures().items()),
        "",
        "`draining` counts prefill requests that the router sent to an engine before it noticed "
        "that it drains: they were answered at once, and the decode engine computed the prompt.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6, help="restarts of each engine")
    parser.add_argument("--without-drain", action="store_true", help="the negative control")
    parser.add_argument("--quick", action="store_true", help="40 requests, 1 round")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    requests, rounds = (40, 1) if options.quick else (options.requests, options.rounds)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="omni-rolling-") as folder:
        host = Host(Path(folder), drains=not options.without_drain)
        host.runtime.mkdir(mode=0o700)
        try:
            outcome = run(host, requests, rounds)
        finally:
            host.close()
    command = " ".join(["python", "benchmarks/rolling_restarts.py", *sys.argv[1:]])
    page = markdown(outcome, time.monotonic() - began, command)
    print(page, *outcome.lost[:20], *outcome.wrong[:20], sep="\n")
    if not (options.without_drain or options.quick):
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "rolling_restarts.md").write_text(page, encoding="utf-8")
    return 1 if outcome.lost or outcome.wrong or outcome.wasted or outcome.killed else 0


if __name__ == "__main__":
    sys.exit(main())
