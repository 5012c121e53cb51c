# SPDX-License-Identifier: Apache-2.0
"""Where the time of one hand-off goes, drawn from the spans that the connector traces.

A prefill and a decode engine (those of handoff.py) hand some prompts off, so that every page has
been used; then one more is drawn, of the median time to its first token.

    python benchmarks/timeline.py [--quick]

writes results/timeline.png beside this file.
"""

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
from handoff import ARENA_GIB, HANDOFF_TTL_S, PAUSE_S, RESULTS, TOKEN_BYTES, engines, random_prompt

from omni_connector.runtime.trace import FileTrace, Span, now, spans
from omni_connector.testing.engines import completion, prefill
from omni_connector.testing.models import make_model

mpl.use("Agg")
import matplotlib.pyplot as plt

TOKENS = 2048
WARM_UPS = 6

# For each lane: its name, the names of its spans, and their colour.
LANES = (
    ("client", ("prefill request", "first token"), "tab:gray"),
    ("prefill", ("prefill",), "tab:blue"),
    ("save", ("save",), "tab:cyan"),
    ("save, by layer", ("save part",), "tab:green"),
    ("answer", ("answer",), "tab:red"),
    ("lease", ("lease",), "tab:purple"),
    ("load, scheduler", ("room", "load phase"), "tab:olive"),
    ("load, worker", ("load",), "tab:orange"),
    ("load, by step", ("load part", "attach"), "tab:brown"),
    ("first token", ("scheduling", "decode"), "tab:pink"),
)
LEAST = 0.0015  # of the whole width: shorter spans are drawn as long


def record(model: Path, folder: Path, repeats: int) -> list[list[Span]]:
    """The spans of so many hand-offs, each in a list of its own."""
    extra = {"arena_gib": ARENA_GIB, "handoff_ttl_s": HANDOFF_TTL_S, "trace": str(folder / "spans")}
    config = {"kv_connector_extra_config": extra}
    draw = random.Random(0)
    frames = []
    with engines("OmniKVConnector", config, model, folder) as (first, second):
        client = FileTrace(str(folder / "spans"), "client", "client")
        with contextlib.closing(client), first.client() as prefiller, second.client() as decoder:
            for _ in range(WARM_UPS + repeats):
                prompt = random_prompt(draw, TOKENS + 1)
                began = now()
                params = prefill(prefiller, prompt)
                client.span("prefill request", began)
                body = completion(prompt, max_tokens=1, kv_transfer_params=params)
                sent = now()
                for number, _ in enumerate(decoder.stream("/v1/completions", body)):
                    if number == 0:
                        client.span("first token", sent)
                time.sleep(PAUSE_S)
                frames.append((began / 1000, now() / 1000))
            time.sleep(1.0)  # the engines write what they have
    told = [span for _, span in spans(folder / "spans") if span.ph == "X"]
    return [[s for s in told if begin <= s.ts < end] for begin, end in frames[WARM_UPS:]]


def first_token(handoff: list[Span]) -> Span:
    """The client's span from the request to the decode engine until its first token."""
    return next(span for span in handoff if span.name == "first token")


def lane_of(span: Span) -> str:
    """What the lane is told by: both halves call something a load."""
    return "load phase" if (span.name, span.cat) == ("load", "scheduler") else span.name


def plot(handoff: list[Span], path: Path) -> None:
    """Draw one hand-off, in milliseconds from its beginning, and from its request to decode."""
    start = min(span.ts for span in handoff)
    asked = first_token(handoff)
    saved = [span for span in handoff if span.name in ("save", "save part")]
    whole = start, max(span.ts + span.dur for span in handoff)
    near = asked.ts - 20_000, asked.ts + asked.dur + 3_000
    figure, views = plt.subplots(2, 1, figsize=(13, 9), layout="constrained")
    for axes, (begin, end) in zip(views, (whole, near), strict=True):
        least = LEAST * (end - begin)
        for row, (_, names, colour) in enumerate(LANES):
            shown = [span for span in handoff if lane_of(span) in names]
            bars = [((s.ts - start) / 1e3, max(s.dur, least) / 1e3) for s in shown]
            axes.broken_barh(
                bars, (row - 0.35, 0.7), color=colour, edgecolor="white", linewidth=0.2
            )
        axes.set_yticks(range(len(LANES)), [name for name, _, _ in LANES])
        axes.set_xlim((begin - start) / 1e3, (end - start) / 1e3)
        axes.axvline((asked.ts - start) / 1e3, color="black", linestyle=":", linewidth=1)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("ms since the prefill request was sent")
    views[0].set_title(
        f"One hand-off of {TOKENS:,} tokens ({TOKENS * TOKEN_BYTES >> 20} MiB); "
        f"{sum(span.name == 'save part' for span in saved)} copies saved it"
    )
    views[1].set_title(
        "From the prefill's answer on; dotted: the request to the decode engine, whose first token "
        f"came after {asked.dur / 1e3:.1f} ms"
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    """Record hand-offs, and draw that of the median."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer hand-offs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    arguments.output.mkdir(parents=True, exist_ok=True)
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        model = make_model("llama-wide", Path(folder) / "model")
        handoffs = record(model, Path(folder), 3 if arguments.quick else 9)
    handoffs.sort(key=lambda handoff: first_token(handoff).dur)
    handoff = handoffs[len(handoffs) // 2]
    plot(handoff, arguments.output / "timeline.png")
    for span in sorted(handoff, key=lambda span: span.ts):
        if "part" not in span.name:
            print(f"{span.cat:10} {span.name:16} {span.dur / 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
