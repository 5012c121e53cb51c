# SPDX-License-Identifier: Apache-2.0
"""What reading a peer through Mooncake costs, beside Mooncake's own plain read, on loopback TCP.

Slots: an owner in another process exports an arena; here the same slots are fetched, which is
generations checked, read, and generations checked again, and, in turns, read with one
`transfer_sync_read` of as many bytes of registered memory into registered memory.

Hand-off: two vLLM engines with `transport: mooncake`, as in benchmarks/handoff.py, whose cost (time
to the first token, above that with the KV in the decode engine already) is divided by the time of
one plain read of the bytes: right after, and undisturbed, before the engines start and after they
have ended.

    python benchmarks/transfer_engine.py [--quick]

writes results/transfer_engine.md and results/transfer_engine.png beside this file.
"""

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
from handoff import TOKEN_BYTES, Sample, measure, median
from machine import machine

from omni_connector.arena.arena import Arena
from omni_connector.testing.models import make_model
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mooncake.library import engine_module
from omni_connector.transports.mooncake.transport import MooncakeTransport

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
HOST = "127.0.0.1"
MIB = 1 << 20
ARENA_BYTES = 128 * MIB
SLOT_MIB = (1, 2, 4, 8, 16)
LENGTHS = (256, 1024, 2048)
READ_TARGET, HANDOFF_TARGET = 0.9, 1.5
TIMEOUT_S = 60.0
END_S = 30.0
CONFIG: dict[str, Any] = {
    "kv_connector_extra_config": {"arena_gib": 1.25, "handoff_ttl_s": 30, "transport": "mooncake"}
}


def own_an_arena(slot_bytes: int, slots: int) -> None:
    """The other process: it exports an arena until its standard input ends."""
    with (
        MooncakeTransport(host=HOST) as connector,
        Arena.create(slots, slot_bytes, prefault=True) as arena,
    ):
        for slot in range(arena.n_slots):
            arena.begin_write(slot, 1)
            arena.slots[slot] = (slot + 1) % 256
            arena.publish(slot, 1, b"", slot_bytes, 0)
        print(msgspec.json.encode(connector.export(arena, "arena")).decode(), flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def owner(slot_bytes: int, slots: int) -> Iterator[Endpoint]:
    """That process, and where its arena is."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--owner", str(slot_bytes), str(slots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # What it imports may print as well.
        line = next(line for line in process.stdout if line.startswith(b"{"))
        yield msgspec.json.decode(line, type=Endpoint)
    finally:
        process.stdin.close()
        process.wait(END_S)


class PlainRead:
    """Mooncake's own read of a peer's registered memory into registered memory."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._peer, _, base = endpoint.address.removeprefix("tcp://").partition("/")
        self._base = int(base, 16)
        size = endpoint.n_slots * endpoint.slot_bytes
        self._target = np.ones(size, np.uint8)
        self._engine = engine_module().TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        if self._engine.register_memory(self._target.ctypes.data, size):
            raise RuntimeError("Mooncake does not register memory")

    def seconds(self, size: int) -> float:
        start = time.perf_counter()
        code = self._engine.transfer_sync_read(
            self._peer, self._target.ctypes.data, self._base, size
        )
        took = time.perf_counter() - start
        if code:
            raise RuntimeError(f"the plain read failed: {code}")
        return took


def read_slots(slot_mib: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of (fetch, plain read) of all slots of an arena, in turns."""
    samples = []
    slot_bytes = slot_mib * MIB
    arena = owner(slot_bytes, ARENA_BYTES // slot_bytes)
    with arena as endpoint, MooncakeTransport(host=HOST) as reader:
        plain = PlainRead(endpoint)
        slots = np.random.default_rng(1).permutation(endpoint.n_slots).tolist()
        generations = [1] * len(slots)
        with reader.attach(endpoint, timeout=TIMEOUT_S) as remote:
            for turn in range(repeats + 2):
                start = time.perf_counter()
                fetched = remote.fetch(slots, generations, slot_bytes, timeout=TIMEOUT_S)
                took = time.perf_counter() - start
                for slot, row in zip(slots, fetched.rows, strict=True):
                    if row[0] != (slot + 1) % 256 or row[-1] != (slot + 1) % 256:
                        raise RuntimeError(f"slot {slot} came with other bytes")
                fetched.release()
                other = plain.seconds(ARENA_BYTES)
                if turn >= 2:  # connections, and memory that was never touched
                    samples.append((took, other))
    return samples


def hand_offs(
    lengths: tuple[int, ...], repeats: int
) -> tuple[dict[int, list[Sample]], dict[int, float]]:
    """Hand-offs of each length between two engines, and seconds of an undisturbed plain read."""
    longest = max(lengths) * TOKEN_BYTES
    # Short, because the paths of Unix sockets are.
    folder = tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp")
    with folder as name, owner(MIB, longest // MIB) as endpoint:
        model = make_model("llama-wide", Path(name) / "model")
        plain = PlainRead(endpoint)
        plain.seconds(longest)  # connections
        alone: dict[int, list[float]] = {tokens: [] for tokens in lengths}

        def undisturbed() -> None:
            for tokens in lengths:
                alone[tokens] += [plain.seconds(tokens * TOKEN_BYTES) for _ in range(repeats)]

        undisturbed()
        handed = measure("OmniKVConnector", CONFIG, model, Path(name), lengths, repeats, plain)
        undisturbed()
        return handed, {tokens: statistics.median(each) for tokens, each in alone.items()}


def speed(seconds: float) -> float:
    return ARENA_BYTES / seconds / 1e9


def markdown(
    reads: dict[int, list[tuple[float, float]]],
    handed: dict[int, list[Sample]],
    alone: dict[int, float],
    command: str,
) -> str:
    lines = [
        "# Mooncake's Transfer Engine, TCP on loopback",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"## {ARENA_BYTES // MIB} MiB in slots",
        "",
        "GB/s, medians; *fetch*: all slots, in any order, verified; *plain*: one "
        f"`transfer_sync_read` of the bytes; *ratio*: of pairs. Asked for: {READ_TARGET} or more.",
        "",
        "| MiB a slot | fetch | plain | ratio | pairs |",
        "|---:|---:|---:|---:|---:|",
    ]
    for slot_mib, samples in reads.items():
        fetch, plain = (speed(statistics.median(each)) for each in zip(*samples, strict=True))
        ratio = statistics.median(plain / fetch for fetch, plain in samples)
        lines.append(f"| {slot_mib} | {fetch:.2f} | {plain:.2f} | {ratio:.2f} | {len(samples)} |")
    lines += [
        "",
        f"## Hand-off between two vLLM engines, {TOKEN_BYTES >> 10} KiB of KV a token",
        "",
        "Milliseconds at a client, medians; *cost*: time to the first token, less that with the KV "
        "on the decode engine, paired; *plain*: one `transfer_sync_read` of the bytes right after, "
        "beside the two idle engines; *ratio*: cost / plain, paired; *alone*: the same read before "
        "the engines start and after they have ended; *to alone*: cost / alone. Asked for at 2,048 "
        f"tokens: {HANDOFF_TARGET} or less to alone.",
        "",
        "| tokens | MiB | cost | plain | ratio | alone | to alone | pairs |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for tokens, each in handed.items():
        cost, plain = (1e3 * median([getattr(s, name) for s in each]) for name in ("cost", "plain"))
        ratio, undisturbed = median([s.ratio for s in each]), 1e3 * alone[tokens]
        size = tokens * TOKEN_BYTES // MIB
        lines.append(
            f"| {tokens} | {size} | {cost:.1f} | {plain:.1f} | {ratio:.2f} | {undisturbed:.1f} "
            f"| {cost / undisturbed:.2f} | {len(each)} |"
        )
    lines += ["", "![Fetches beside plain reads](transfer_engine.png)"]
    return "\n".join([*lines, ""])


def plot(
    reads: dict[int, list[tuple[float, float]]], handed: dict[int, list[Sample]], path: Path
) -> None:
    """Both ratios."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    ratios = [[plain / fetch for fetch, plain in samples] for samples in reads.values()]
    left.boxplot(ratios, tick_labels=[str(each) for each in reads])
    left.axhline(READ_TARGET, color="tab:red", linestyle=":", label="asked for, at least")
    left.set(
        title="Speed of a fetch over a plain read", xlabel="MiB a slot", ylabel="ratio of pairs"
    )
    right.boxplot(
        [[s.ratio for s in each] for each in handed.values()],
        tick_labels=[str(each) for each in handed],
    )
    right.axhline(
        HANDOFF_TARGET, color="tab:red", linestyle=":", label="asked for at 2,048, at most"
    )
    right.set(
        title="Cost of a hand-off over a plain read", xlabel="tokens", ylabel="ratio of pairs"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--owner", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.owner:
        return own_an_arena(*arguments.owner)
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sizes, lengths = ((1, 8), (2048,)) if arguments.quick else (SLOT_MIB, LENGTHS)
    repeats = 7 if arguments.quick else 15
    reads = {slot_mib: read_slots(slot_mib, repeats) for slot_mib in sizes}
    handed, alone = hand_offs(lengths, repeats)
    command = " ".join(["python benchmarks/transfer_engine.py", *sys.argv[1:]])
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = markdown(reads, handed, alone, command)
    print(text)
    (arguments.output / "transfer_engine.md").write_text(text)
    plot(reads, handed, arguments.output / "transfer_engine.png")
    return None


if __name__ == "__main__":
    main()
