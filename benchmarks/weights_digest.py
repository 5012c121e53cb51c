# SPDX-License-Identifier: Apache-2.0
"""What the digest of the weights in memory costs, beside one read of their bytes.

In each round, in turns: all weights are read once (the exclusive or of their words), copied once,
and hashed as an engine hashes them. One thread each.

    python benchmarks/weights_digest.py [--quick] [--device cpu]

writes results/weights_digest.md beside this file.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import RESULTS, machine

from omni_connector.identity.loaded_weights import PIECE_BYTES, digest_of

LAYERS = 24
HIDDEN = 1024
MB = 1e6


def weights_of_a_model(layers: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights as a small model has them, in bfloat16."""
    shapes = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate_up": (8 * HIDDEN, HIDDEN),
        "down": (HIDDEN, 4 * HIDDEN),
        "norm": (HIDDEN,),
    }
    return {
        f"layers.{i}.{name}": torch.randn(shape, device=device).to(torch.bfloat16)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def read_once(weights: dict[str, torch.Tensor]) -> None:
    """Read every word, and do as little as can be done with it."""
    for tensor in weights.values():
        words = tensor.view(torch.int64)
        if tensor.device.type == "cpu":
            np.bitwise_xor.reduce(words.numpy(), axis=None)
        else:
            words.amax()


def copied(weights: dict[str, torch.Tensor], room: torch.Tensor) -> None:
    """Copy every tensor to the same place."""
    for tensor in weights.values():
        room[: tensor.numel()].copy_(tensor.view(-1))


def timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer layers and rounds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(1)
    layers, rounds = (4, 3) if given.quick else (LAYERS, 15)
    weights = weights_of_a_model(layers, device)
    size = sum(each.nbytes for each in weights.values())
    room = torch.zeros(max(each.numel() for each in weights.values()), dtype=torch.bfloat16)
    room = room.to(device)
    kinds: dict[str, Callable[[], object]] = {
        "one read": lambda: read_once(weights),
        "one copy": lambda: copied(weights, room),
        "digest": lambda: digest_of(weights),
    }
    for work in kinds.values():
        work()
    found = [[timed(work, device) for work in kinds.values()] for _ in range(rounds)]
    lines = []
    for i, kind in enumerate(kinds):
        seconds = statistics.median(each[i] for each in found)
        ratio = statistics.median(each[i] / each[0] for each in found)
        lines.append(
            f"| {kind} | {1000 * seconds:.1f} | {size / seconds / 1e9:.1f} | {ratio:.2f} |"
        )
    where = machine()
    if device.type != "cpu":
        where = f"{torch.cuda.get_device_name(device)}; {where}"
    text = "\n".join(
        [
            "# The digest of the weights in memory",
            "",
            f"`python benchmarks/weights_digest.py --device {given.device}`: {where}, "
            f"torch {torch.__version__}.",
            "",
            f"{size / MB:.0f} MB of bfloat16 in {len(weights)} tensors, one thread, pieces of "
            f"{PIECE_BYTES >> 20} MiB. Medians of {rounds} rounds; the ratio is the median over "
            "the rounds, to the read of the same round.",
            "",
            "| | ms | GB/s | x one read |",
            "|---|---:|---:|---:|",
            *lines,
            "",
        ]
    )
    print(text)
    if not given.quick:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "weights_digest.md").write_text(text)


if __name__ == "__main__":
    main()
