# SPDX-License-Identifier: Apache-2.0
"""How long a chunk takes from `put` to `get`, beside vLLM-Omni's own shared-memory connector.

Both connectors are made by vLLM-Omni's factory in two processes, and carry the payload of its chunk
pipelines: codec tokens and a tensor. They take turns, chunk by chunk. vLLM-Omni's published files
must be there: `python scripts/fetch_wheels.py`.

    python benchmarks/chunks.py [--quick]

writes results/chunks.md and results/chunks.png beside this file.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from machine import machine

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OURS, THEIRS = "OmniSharedMemoryConnector", "SharedMemoryConnector"
SIZES = {"4 KiB": 4 << 10, "4 MiB": 4 << 20}
WARM_UP = 20
END_S = 30.0


def made(stage: int) -> dict[str, Any]:
    """Both connectors, as a stage of a pipeline has them."""
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    return {
        name: OmniConnectorFactory.create_connector(ConnectorSpec(name, {"stage_id": stage}))
        for name in (OURS, THEIRS)
    }


def receive(orders: Any) -> None:
    """The receiving process: gets what it is told to, and says how long that took."""
    connectors = made(1)
    while (order := orders.recv()) is not None:
        name, key = order
        began = time.monotonic()
        found = connectors[name].get("0", "1", key)
        took = time.monotonic() - began
        orders.send((took, None if found is None else int(found[0]["hidden"].sum())))
    for each in connectors.values():
        each.close()


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each chunk from `put` to `get`, by size and connector."""
    from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct

    orders, theirs = Pipe()
    receiver = os.fork()
    if receiver == 0:
        orders.close()
        receive(theirs)
        os._exit(0)
    theirs.close()
    connectors = made(0)
    seconds: dict[str, dict[str, list[float]]] = {}
    for label, size in SIZES.items():
        hidden = torch.arange(size // 4, dtype=torch.int32)
        chunk = OmniPayloadStruct(codes=CodesStruct(audio=torch.arange(3)), hidden=hidden)
        want = int(hidden.sum())
        seconds[label] = {OURS: [], THEIRS: []}
        for i in range(rounds + WARM_UP):
            for name in (OURS, THEIRS) if i % 2 else (THEIRS, OURS):
                key = f"bench-{os.getpid()}-{size}_0_{i}"
                began = time.monotonic()
                done = connectors[name].put("0", "1", key, chunk)[0]
                put = time.monotonic() - began
                orders.send((name, key))
                if not orders.poll(END_S):
                    sys.exit("the receiver gives no answer")
                took, got = orders.recv()
                if not done or got != want:
                    sys.exit(f"{name} lost a chunk of {label}")
                if i >= WARM_UP:
                    seconds[label][name].append(put + took)
                connectors[name].reap_consumed()
    orders.send(None)
    os.waitpid(receiver, 0)
    for each in connectors.values():
        each.close()
    return seconds


def markdown(seconds: dict[str, dict[str, list[float]]], rounds: int, command: str) -> str:
    """The page."""
    lines = [
        "# Chunks beside vLLM-Omni's own connector",
        "",
        f"`{command}`: {machine()}, torch {torch.__version__}.",
        "",
        f"Microseconds from `put` to `get` between two processes, medians of {rounds} chunks, and "
        "in brackets the 99th percentile; both connectors in turns, behind vLLM-Omni's factory "
        "and with its chunk payload. *ratio*: ours / theirs, median of the pairs. Target: 1 at "
        "most.",
        "",
        f"| chunk | `{OURS}` | `{THEIRS}` of vLLM-Omni | ratio |",
        "|---|---:|---:|---:|",
    ]
    for label, by_name in seconds.items():
        cells = [
            f"{statistics.median(by_name[name]) * 1e6:.0f} "
            f"({np.percentile(by_name[name], 99) * 1e6:.0f})"
            for name in (OURS, THEIRS)
        ]
        pairs = zip(by_name[OURS], by_name[THEIRS], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        lines.append(f"| {label} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join([*lines, "", "![Time of a chunk](chunks.png)", ""])


def plot(seconds: dict[str, dict[str, list[float]]], path: Path) -> None:
    """The distribution of each size."""
    figure, panels = plt.subplots(1, len(seconds), figsize=(11, 4.2), layout="constrained")
    for axes, (label, by_name) in zip(panels, seconds.items(), strict=True):
        for name, values in by_name.items():
            sorted_us = np.sort(values) * 1e6
            axes.plot(sorted_us, np.linspace(0, 100, len(values)), label=name)
        axes.set(title=label, xlabel="µs from put to get", ylabel="percent within", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer chunks")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    rounds = 100 if arguments.quick else 500
    sys.path.insert(0, str(HERE.parent))
    from tests.stage.wheel import make_importable

    (wheel,) = (HERE.parent / ".fetched").glob("vllm-omni-*")
    make_importable(wheel)
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = folder
        torch.set_num_threads(1)
        from omni_connector.stage.vllm_omni import register

        register()
        seconds = measure(rounds)
    command = "python benchmarks/chunks.py" + (" --quick" if arguments.quick else "")
    text = markdown(seconds, rounds, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "chunks.md").write_text(text)
    plot(seconds, arguments.output / "chunks.png")


if __name__ == "__main__":
    main()
