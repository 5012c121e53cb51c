# SPDX-License-Identifier: Apache-2.0
"""How fast objects pass from one process to another through shared memory, beside memcpy.

A sender puts, a receiver in another process gets. First small objects, one after the other; then
the KV cache of a request as a dict of tensors: 32 layers of keys and values, 8 heads of 128, in
bfloat16. That is timed from the start of `put` until the receiver has the tensors, beside one
numpy copy of as many bytes in the sender, just before and after. Each payload is cleaned up before
the next one is put, so that its memory is used again; what the very first one costs, and the
memory that it takes, is measured in processes of their own.

    python benchmarks/objects.py [--quick]

writes results/objects.md and results/objects.png beside this file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from machine import machine

from omni_connector.objects.shm import SharedMemoryConnector

mpl.use("Agg")
import matplotlib.pyplot as plt

LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
MIB, GIB = 1 << 20, 1 << 30
RESULTS = Path(__file__).parent / "results"
EDGE = ("0", "1")
SMALL_BYTES = 1024
LATENCY_TARGET_US, RATIO_TARGET, MEMORY_TARGET = 250, 1.3, 1.2
END_S = 30.0


def payload(tokens: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a request, and all their bytes as one."""
    numbers = LAYERS * 2 * tokens * HEADS * HEAD_SIZE
    whole = torch.arange(numbers, dtype=torch.int16)
    parts = whole.view(torch.bfloat16).view(2 * LAYERS, tokens, HEADS, HEAD_SIZE)
    names = [f"{kind}_cache_{i}" for kind in ("key", "value") for i in range(LAYERS)]
    return dict(zip(names, parts, strict=True)), whole.view(torch.uint8)


class MemoryPeak:
    """Growth of this process's memory while it is entered: (own, shared) bytes at their peaks."""

    def __enter__(self) -> "MemoryPeak":
        self.own, self.shared = 0, 0
        self._start = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._note()

    def _note(self) -> None:
        own, shared = self._now()
        self.own = max(self.own, own - self._start[0])
        self.shared = max(self.shared, shared - self._start[1])

    @staticmethod
    def _now() -> tuple[int, int]:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        own, shared = (int(fields[each].split()[0]) * 1024 for each in ("RssAnon", "RssShmem"))
        return own, shared


def receive() -> None:
    """The receiver: for each line on stdin it gets an object and says how that went."""
    settings = json.loads(sys.stdin.readline())
    with SharedMemoryConnector(folder=Path(settings["folder"])) as connector:
        for line in sys.stdin:
            job = json.loads(line)
            watch = MemoryPeak()
            if job["watch"]:
                watch.__enter__()
            cpu = time.process_time()
            began = time.monotonic()
            found = connector.get(*EDGE, job["key"], job["metadata"])
            ended = time.monotonic()
            cpu = time.process_time() - cpu
            if job["watch"]:
                watch.__exit__()
            if found is None:
                raise SystemExit(f"there is no object {job['key']}")
            answer = {"took": ended - began, "ended": ended, "cpu": cpu, "check": check(found[0])}
            if job["watch"]:
                answer |= {"own": watch.own, "shared": watch.shared}
            # The tensors go before the next ones come, as those of a served request do.
            del found
            print(json.dumps(answer), flush=True)


def check(found: Any) -> int:
    """A number that tells whether an object arrived."""
    if isinstance(found, bytes):
        return len(found)
    return sum(int(tensor.view(torch.int16).reshape(-1)[-1]) for tensor in found.values())


class Receiver:
    """The receiving process."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--receiver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(json.dumps({"folder": str(folder)}), file=self.process.stdin, flush=True)

    def get(self, key: str, metadata: dict[str, Any] | None, watch: bool = False) -> dict[str, Any]:
        job = {"key": key, "metadata": metadata, "watch": watch}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the receiver ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if self.process.wait(END_S):
            raise SystemExit("the receiver failed")
        self.process.stdout.close()


def latency(rounds: int) -> dict[bool, dict[str, list[float]]]:
    """Seconds of each put and get of a small object, without and with metadata, in turns."""
    seconds: dict[bool, dict[str, list[float]]] = {
        hinted: {"put": [], "get": [], "both": []} for hinted in (False, True)
    }
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        receiver = Receiver(Path(folder))
        with SharedMemoryConnector(folder=Path(folder)) as sender:
            content = os.urandom(SMALL_BYTES)
            for i in range(2 * rounds + 20):
                hinted = bool(i % 2)
                began = time.monotonic()
                ok, _, metadata = sender.put(*EDGE, f"r{i}", content)
                put = time.monotonic() - began
                answer = receiver.get(f"r{i}", metadata if hinted else None)
                if not ok or answer["check"] != SMALL_BYTES:
                    raise SystemExit("an object did not arrive")
                sender.cleanup(f"r{i}")
                if i >= 20:
                    each = seconds[hinted]
                    each["put"].append(put)
                    each["get"].append(answer["took"])
                    each["both"].append(put + answer["took"])
            receiver.close()
    return seconds


def first(tokens: int) -> dict[str, float]:
    """Seconds and peak memory of the first payload between two new processes."""
    tensors, whole = payload(tokens)
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        receiver = Receiver(Path(folder))
        gib = (whole.nbytes + 16 * MIB) / GIB
        with SharedMemoryConnector(folder=Path(folder), object_gib=gib) as sender:
            with MemoryPeak() as peak:
                began = time.monotonic()
                ok, _, metadata = sender.put(*EDGE, "r", tensors)
                put = time.monotonic() - began
            if not ok:
                raise SystemExit("put failed")
            answer = receiver.get("r", metadata, watch=True)
            receiver.close()
    return {
        "put": put,
        "get": answer["took"],
        "sender_own": peak.own / whole.nbytes,
        "sender_shared": peak.shared / whole.nbytes,
        "receiver_own": answer["own"] / whole.nbytes,
        "receiver_mapped": answer["shared"] / whole.nbytes,
    }


def sustained(tokens: int, repeats: int) -> list[dict[str, float]]:
    """Seconds of each payload after the first, and of a copy of its bytes beside it."""
    tensors, whole = payload(tokens)
    wanted = check(tensors)
    source, target = whole.numpy(), torch.ones(whole.nbytes, dtype=torch.uint8).numpy()

    def memcpy() -> tuple[float, float]:
        cpu, began = time.process_time(), time.monotonic()
        np.copyto(target, source)
        return time.monotonic() - began, time.process_time() - cpu

    rows = []
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        receiver = Receiver(Path(folder))
        gib = (whole.nbytes + 16 * MIB) / GIB
        with SharedMemoryConnector(folder=Path(folder), object_gib=gib) as sender:
            for i in range(repeats + 1):
                before = memcpy()
                cpu, began = time.process_time(), time.monotonic()
                ok, _, metadata = sender.put(*EDGE, f"r{i}", tensors)
                put, put_cpu = time.monotonic() - began, time.process_time() - cpu
                if not ok:
                    raise SystemExit("put failed")
                answer = receiver.get(f"r{i}", metadata)
                after = memcpy()
                sender.cleanup(f"r{i}")
                if answer["check"] != wanted:
                    raise SystemExit("what arrived is not what was sent")
                rows.append(
                    {
                        "memcpy": (before[0] + after[0]) / 2,
                        "memcpy_cpu": (before[1] + after[1]) / 2,
                        "put": put,
                        "get": answer["took"],
                        "total": answer["ended"] - began,
                        "cpu": put_cpu + answer["cpu"],
                    }
                )
            receiver.close()
    return rows[1:]


def median_of(rows: list[dict[str, float]], field: str) -> float:
    return statistics.median(row[field] for row in rows)


def ratio_of(rows: list[dict[str, float]], field: str, beside: str) -> float:
    """Median of the paired ratios."""
    return statistics.median(row[field] / row[beside] for row in rows)


def markdown(results: dict[str, Any], command: str) -> str:
    """The tables."""
    lines = [
        "# Objects from one process to another",
        "",
        f"`{command}`: {machine()}, numpy {np.__version__}, torch {torch.__version__}.",
        "",
        f"## {SMALL_BYTES} bytes",
        "",
        f"Microseconds, medians of {results['rounds']}, and in brackets the 99th percentile. "
        f"Target: put and get together in {LATENCY_TARGET_US}.",
        "",
        "| | put | get | both |",
        "|---|---:|---:|---:|",
    ]
    for hinted, seconds in results["latency"].items():
        cells = [
            f"{statistics.median(seconds[verb]) * 1e6:.0f} "
            f"({np.percentile(seconds[verb], 99) * 1e6:.0f})"
            for verb in ("put", "get", "both")
        ]
        name = "with metadata" if hinted else "without metadata"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"## KV cache: {LAYERS} layers, {HEADS} heads of {HEAD_SIZE}, bfloat16, a dict of "
        f"{2 * LAYERS} tensors",
        "",
        f"Milliseconds, medians of {results['repeats']}. *total*: from the start of `put` until "
        "the receiver has the tensors; *memcpy*: one numpy copy of the bytes in the sender, before "
        "and after; *ratio*: total / memcpy, paired. *CPU*: the same ratio of processor time, both "
        "processes together: what is left when the machine does other work too. Target at 2048 "
        f"tokens: a ratio of {RATIO_TARGET:g}; put and get each copy the bytes. *first*: total "
        "of the first payload between two new processes, whose memory the kernel has to find "
        "first; once.",
        "",
        "| tokens | MiB | memcpy | put | get | total | ratio | CPU | first |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for tokens, rows in results["sustained"].items():
        size = LAYERS * 2 * tokens * HEADS * HEAD_SIZE * 2
        start = results["first"][tokens]
        cells = [f"{median_of(rows, each) * 1e3:.1f}" for each in ("memcpy", "put", "get", "total")]
        lines.append(
            f"| {tokens} | {size // MIB} | {' | '.join(cells)} "
            f"| {ratio_of(rows, 'total', 'memcpy'):.2f} "
            f"| {ratio_of(rows, 'cpu', 'memcpy_cpu'):.2f} "
            f"| {(start['put'] + start['get']) * 1e3:.0f} |"
        )
    lines += [
        "",
        "Peak growth of memory in those two new processes, in payloads. *own*: that of the process "
        "alone; *arena*: shared memory that it took; *mapped*: the sender's arena as the receiver "
        f"sees it, which is no memory more. Target: {MEMORY_TARGET} on each side.",
        "",
        "| tokens | sender: own | arena | receiver: own | mapped |",
        "|---:|---:|---:|---:|---:|",
    ]
    for tokens, start in results["first"].items():
        fields = ("sender_own", "sender_shared", "receiver_own", "receiver_mapped")
        lines.append(f"| {tokens} | {' | '.join(f'{start[each]:.2f}' for each in fields)} |")
    lines += ["", "![Time of an object](objects.png)"]
    return "\n".join([*lines, ""])


def plot(results: dict[str, Any], path: Path) -> None:
    """Latency as a distribution; time of each payload over that of memcpy."""
    figure, (small, large) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for hinted, seconds in results["latency"].items():
        values = np.sort(seconds["both"]) * 1e6
        name = "with metadata" if hinted else "without metadata"
        small.plot(values, np.linspace(0, 100, len(values)), label=name)
    small.axvline(LATENCY_TARGET_US, color="black", linestyle="--", linewidth=1, label="target")
    small.set(
        title=f"{SMALL_BYTES} bytes: put and get",
        xlabel="microseconds",
        ylabel="percent of the objects within",
        xscale="log",
    )
    names = [f"{tokens} tokens" for tokens in results["sustained"]]
    bottom = np.zeros(len(names))
    for verb in ("put", "get"):
        ratios = [ratio_of(rows, verb, "memcpy") for rows in results["sustained"].values()]
        large.bar(names, ratios, 0.5, bottom=bottom, label=verb)
        bottom += ratios
    large.axhline(1, color="black", linewidth=1, label="memcpy")
    large.axhline(RATIO_TARGET, color="black", linestyle="--", linewidth=1, label="target")
    large.set(title="KV cache beside memcpy", ylabel="time / memcpy (median of pairs)")
    for axes in (small, large):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("Objects through shared memory, from process to process")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less data, fewer runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receiver:
        receive()
        return
    rounds, repeats = (200, 5) if arguments.quick else (1000, 15)
    sizes = (256, 2048) if arguments.quick else (1024, 2048, 8192)
    results: dict[str, Any] = {
        "rounds": rounds,
        "repeats": repeats,
        "latency": latency(rounds),
        "first": {},
        "sustained": {},
    }
    for tokens in sizes:
        results["first"][tokens] = first(tokens)
        results["sustained"][tokens] = sustained(tokens, repeats)
    command = "python benchmarks/objects.py" + (" --quick" if arguments.quick else "")
    text = markdown(results, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "objects.md").write_text(text)
    plot(results, arguments.output / "objects.png")


if __name__ == "__main__":
    main()
