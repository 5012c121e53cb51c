# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half costs in each step in which it has nothing to move.

vLLM's own scheduler runs 1, 64 and 256 decoding requests in this process. Every method of the
connector that it calls is timed; the sum over a step is compared with the same of a connector
that does nothing, and with the whole step of vLLM's scheduler.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the harness of the tests drives vLLM

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from omni_connector.plugin import CONNECTOR_NAME
from tests.vllm_v1.harness import InProcessEngine, write_model

RUNNING = (1, 64, 256)
RESULTS = Path(__file__).parent / "results"
METHODS = (
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished_all_groups",
    "on_new_request",
)


class Timed:
    """Adds up the time spent in a connector's methods."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        for name in METHODS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def measure(
    model: Path, connector: str, running: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds in the connector, and in schedule and update together, for each decoding step."""
    blocks = running * (2 + (steps + 40) // 16)
    engine = InProcessEngine(
        model,
        "kv_both",
        connector=connector,
        usable_blocks=blocks,
        max_num_seqs=running,
        max_tokens_a_step=max(4096, running * 16),
    )
    try:
        timed = Timed(engine.scheduler.connector)
        for number in range(running):
            engine.submit([2 + number % 500] * 16, max_tokens=steps + 20)
        for _ in range(10):
            engine.step()
        inside, whole = [], []
        for _ in range(steps):
            scheduler = engine.scheduler
            timed.seconds = 0.0
            started = time.perf_counter()
            scheduled = scheduler.schedule()
            middle = time.perf_counter()
            output = engine._execute(scheduled)
            resumed = time.perf_counter()
            scheduler.update_from_output(scheduled, output)
            whole.append(middle - started + time.perf_counter() - resumed)
            inside.append(timed.seconds)
            if len(scheduled.num_scheduled_tokens) != running:
                raise SystemExit("not every request was running")
        return inside, whole
    finally:
        engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    steps = 60 if arguments.quick else 300
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for running in RUNNING:
            row: dict[str, float] = {"running": running}
            for name in (CONNECTOR_NAME, "HollowConnector"):
                inside, whole = measure(model, name, running, steps)
                row[name] = statistics.median(inside) * 1e6
                row[f"{name} step"] = statistics.median(whole) * 1e6
            rows.append(row)
    lines = [
        "# Scheduler half: cost of a step with nothing to move",
        "",
        f"Medians over {steps} decoding steps, in microseconds. *connector*: in all methods that "
        "vLLM's scheduler calls. *empty*: the same of a connector without any state.",
        "",
        "| running | connector | empty | vLLM's scheduler in all | share |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ours, step = row[CONNECTOR_NAME], row[f"{CONNECTOR_NAME} step"]
        lines.append(
            f"| {row['running']:.0f} | {ours:.1f} | {row['HollowConnector']:.1f} "
            f"| {step:.0f} | {ours / step:.1%} |"
        )
    text = "\n".join([*lines, ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scheduler_step.md").write_text(text)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, label in ((CONNECTOR_NAME, CONNECTOR_NAME), ("HollowConnector", "empty connector")):
        axes.plot([r["running"] for r in rows], [r[name] for r in rows], "o-", label=label)
    axes.axhline(50, color="grey", linestyle=":", label="target at 64 running")
    axes.set(xlabel="running requests", ylabel="µs a step", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "scheduler_step.png", dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
