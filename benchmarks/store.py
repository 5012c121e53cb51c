# SPDX-License-Identifier: Apache-2.0
"""How fast objects and blocks go into a Mooncake Store and out again, beside Mooncake's own calls.

One process lends the store memory, this one puts and gets, over TCP on loopback. In each round our
call and Mooncake's move the same bytes one right after the other, in turns as to which is first;
the ratio is the median over the rounds of Mooncake's time by ours. Ours is the whole of it:
objects are encoded, put under a checksum, verified and decoded; entries of blocks are copied from
memory of the store's own.

Mooncake's calls for objects are `put_parts` of the array and `get_buffer`, copied into an array;
for blocks `batch_put_from` and `batch_get_into`, straight into registered memory.

    python benchmarks/store.py [--quick]

writes results/store.md and results/store.png beside this file.
"""

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from machine import machine

from omni_connector.config import StoreSettings
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
from omni_connector.stores.block_store import MooncakeBlockStore
from omni_connector.testing.ports import free_port
from omni_connector.transports.mooncake.library import store_module

mpl.use("Agg")
import matplotlib.pyplot as plt

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
RESULTS = Path(__file__).parent / "results"
EDGE = ("0", "1")
WHEEL = "mooncake-transfer-engine-non-cuda"
TARGET = 0.8
LENT_BYTES = 2 * GIB
WAIT_S = 60.0
OBJECTS = (1 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 128 * MIB)
# Entries of a call, and bytes of each.
BLOCKS = ((1, 64 * KIB), (16, 64 * KIB), (256, 64 * KIB), (64, 1 * MIB), (16, 8 * MIB))

Pair = tuple[float, float]
Timed = Callable[[], None]


def lend(master: str) -> None:
    """The process that lends the memory; until its stdin ends."""
    store = store_module().MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", LENT_BYTES, 0, "tcp", "", master)
    if code:
        raise SystemExit(f"Mooncake does not start ({code})")
    print("lent", flush=True)
    sys.stdin.read()
    store.close()


@contextmanager
def master() -> Iterator[str]:
    """A master with a lender, on loopback; its address."""
    program = shutil.which("mooncake_master", path=sysconfig.get_path("scripts"))
    if program is None:
        raise SystemExit("there is no mooncake_master; install the extra `mooncake`")
    port, metrics = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [
                program,
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            wait_for(port)
            lender = subprocess.Popen(
                [sys.executable, __file__, "--lender", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            assert lender.stdout is not None
            try:
                if lender.stdout.readline() != "lent\n":
                    raise SystemExit("nobody lends the store memory")
                yield address
            finally:
                lender.communicate(timeout=WAIT_S)
        finally:
            server.kill()
            server.wait(WAIT_S)


def wait_for(port: int) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit("the master does not start") from None
            time.sleep(0.05)


def timed(call: Callable[[], object], check: Callable[[Any], bool]) -> float:
    """Seconds that a call takes; what it returns has to be right."""
    began = time.monotonic()
    found = call()
    took = time.monotonic() - began
    if not check(found):
        raise SystemExit(f"a call did not work: {str(found)[:200]}")
    return took


def pairs(rounds: int, one: Callable[[int], Pair], other: Callable[[int], Pair]) -> dict[str, Any]:
    """Seconds of put and get, ours and Mooncake's, in turns."""
    seconds: dict[str, list[Pair]] = {"put": [], "get": []}
    for i in range(rounds + 2):
        first, second = (one, other) if i % 2 else (other, one)
        took = {first: first(i), second: second(i)}
        if i >= 2:  # the first ones find the memory
            for at, verb in enumerate(("put", "get")):
                seconds[verb].append((took[one][at], took[other][at]))
    return seconds


def objects(address: str, raw: Any, size: int, rounds: int) -> dict[str, Any]:
    """One array of so many bytes, put and got."""
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with MooncakeStoreConnector(master=address, segment_gib=0) as connector:

        def ours(i: int) -> Pair:
            put = timed(lambda: connector.put(*EDGE, f"r{i}", array), lambda done: done[0])
            get = timed(
                lambda: connector.get(*EDGE, f"r{i}"),
                lambda found: found is not None and found[0][-1] == array[-1],
            )
            connector.cleanup(f"r{i}")
            return put, get

        def theirs(i: int) -> Pair:
            name = f"raw{i}"
            put = timed(lambda: raw.put_parts(name, array), lambda code: code == 0)
            get = timed(
                lambda: np.array(raw.get_buffer(name)).view(np.uint8),
                lambda found: found[-1] == array[-1],
            )
            raw.remove(name, True)
            return put, get

        return pairs(rounds, ours, theirs)


def blocks(address: str, raw: Any, count: int, size: int, rounds: int) -> dict[str, Any]:
    """So many entries of so many bytes, put and got by one call."""
    store = MooncakeBlockStore(StoreSettings(master=address))
    store.wait(WAIT_S)
    own, back = store.buffer(count, size), store.buffer(count, size)
    own[:] = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    raw_rows, raw_back = own.copy(), own.copy()
    for memory in (raw_rows, raw_back):
        if raw.register_buffer(memory.ctypes.data, memory.nbytes):
            raise SystemExit("Mooncake does not register memory")
    lengths = [size] * count
    places = [raw_rows.ctypes.data + i * size for i in range(count)]
    targets = [raw_back.ctypes.data + i * size for i in range(count)]

    def ours(i: int) -> Pair:
        keys = [f"own/{i}/{j}" for j in range(count)]
        put = timed(lambda: store.put(keys, own, lengths, timeout=WAIT_S), all)
        get = timed(lambda: store.get(keys, back, lengths, timeout=WAIT_S), all)
        raw.batch_remove(keys, True)
        return put, get

    def theirs(i: int) -> Pair:
        keys = [f"raw/{i}/{j}" for j in range(count)]
        put = timed(lambda: raw.batch_put_from(keys, places, lengths), lambda codes: not any(codes))
        get = timed(
            lambda: raw.batch_get_into(keys, targets, lengths), lambda codes: codes == lengths
        )
        raw.batch_remove(keys, True)
        return put, get

    seconds = pairs(rounds, ours, theirs)
    if not (np.array_equal(back, own) and np.array_equal(raw_back, own)):
        raise SystemExit("what came back is not what was put")
    for memory in (raw_rows, raw_back):
        raw.unregister_buffer(memory.ctypes.data)
    store.close()
    return seconds


def ratio_of(seconds: list[Pair]) -> float:
    """Our speed as a part of Mooncake's: the median of the pairs."""
    return statistics.median(theirs / ours for ours, theirs in seconds)


def named(nbytes: int) -> str:
    """A size in words."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def rows_of(results: dict[str, dict[str, list[Pair]]]) -> list[str]:
    """Lines of a table."""
    lines = []
    for name, seconds in results.items():
        cells = []
        for verb in ("put", "get"):
            ours, theirs = (
                statistics.median(each) * 1e3 for each in zip(*seconds[verb], strict=True)
            )
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ratio_of(seconds[verb]):.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def markdown(results: dict[str, Any], command: str) -> str:
    """The tables."""
    head = [
        "| | put: ours | Mooncake | ratio | get: ours | Mooncake | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines = [
        "# Mooncake Store, beside Mooncake's own calls",
        "",
        f"`{command}`: {machine()}, {WHEEL} {version(WHEEL)}.",
        "",
        f"Milliseconds, medians of {results['rounds']} (large ones: of {results['few']}). *ratio*: "
        f"Mooncake's time by ours, paired; 1 is as fast. Target: {TARGET:g}. One master, one "
        "process that lends memory, TCP on loopback.",
        "",
        "## Objects: one array",
        "",
        "`put` and `get` with encoding, checksum and verification, beside `put_parts` and "
        "`get_buffer` copied into an array.",
        "",
        *head,
        *rows_of(results["objects"]),
        "",
        "## Blocks",
        "",
        "`BlockStore.put` and `get`, beside `batch_put_from` and `batch_get_into`.",
        "",
        *head,
        *rows_of(results["blocks"]),
    ]
    lines += ["", "![Ratios to Mooncake's own calls](store.png)"]
    return "\n".join([*lines, ""])


def plot(results: dict[str, Any], path: Path) -> None:
    """The ratios."""
    figure, both = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axes, kind in zip(both, ("objects", "blocks"), strict=True):
        names = list(results[kind])
        for shift, verb in ((-0.2, "put"), (0.2, "get")):
            ratios = [ratio_of(results[kind][name][verb]) for name in names]
            axes.bar(np.arange(len(names)) + shift, ratios, 0.4, label=verb)
        axes.axhline(1, color="black", linewidth=1, label="Mooncake's own calls")
        axes.axhline(TARGET, color="black", linestyle="--", linewidth=1, label="target")
        axes.set_xticks(range(len(names)), names)
        axes.set(title=kind, ylabel="speed / Mooncake's (median of pairs)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("Mooncake Store over TCP on loopback")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less data, fewer runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--lender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lender:
        lend(arguments.lender)
        return
    rounds, few = (30, 5) if arguments.quick else (200, 25)
    results: dict[str, Any] = {
        "rounds": rounds,
        "few": few,
        "objects": {},
        "blocks": {},
    }
    with master() as address:
        raw = store_module().MooncakeDistributedStore()
        code = raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, GIB, "tcp", "", address)
        if code:
            raise SystemExit(f"Mooncake does not start ({code})")
        for size in OBJECTS:
            often = rounds if size <= MIB else few
            results["objects"][named(size)] = objects(address, raw, size, often)
        for count, size in BLOCKS:
            often = rounds if count * size <= MIB else few
            results["blocks"][f"{count} x {named(size)}"] = blocks(address, raw, count, size, often)
        raw.close()
    command = "python benchmarks/store.py" + (" --quick" if arguments.quick else "")
    text = markdown(results, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "store.md").write_text(text)
    plot(results, arguments.output / "store.png")


if __name__ == "__main__":
    main()
