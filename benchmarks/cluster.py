# SPDX-License-Identifier: Apache-2.0
"""What the engines of a cluster cost each other: measured, and computed for more engines.

One child process has one engine's control channel, and another one those of all its peers, over
TCP with CURVE on loopback. Descriptors, threads and resident memory of the first are counted in
/proc, and so is the CPU time of its threads while hand-offs are leased and released. The counts at
8 and 32 peers give the cost of a peer, which predicts the count at 128 peers. Transfer Engines are
counted in the same way, and a `mooncake_master` counts its calls itself.

    python benchmarks/cluster.py [--quick]

writes results/cluster.md beside this file.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from machine import machine

from omni_connector.config import MooncakeSettings, StoreSettings
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import Lease, PendingLease
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import (
    Handshake,
    HandshakeReply,
    LeaseGranted,
    LeaseRequest,
    Release,
    encode,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.keys import load_key, write_new_key
from omni_connector.net.peers import HostPort
from omni_connector.net.zeromq import HEARTBEAT_MS
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.stores.block_store import MooncakeBlockStore
from omni_connector.testing.ports import free_port
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mooncake.engine import MemoryRange, TransferEngine

RESULTS = Path(__file__).parent / "results"
PEERS = (8, 32, 128)
BLOCK, BLOCKS = 16, 128
LAYERS = 32
ENGINES = 64
HANDOFFS_A_S = 10_000
RATE = HANDOFFS_A_S / ENGINES
SECONDS = 4.0
BUFFER_BYTES = 32 << 20
LONG = 60.0
FETCHED = (2, 8, 16)


@dataclass(frozen=True)
class Count:
    """What one process has, and how much CPU time its threads use besides the main one.

    Attributes:
        descriptors: open ones.
        threads: all.
        memory: resident bytes.
        idle: CPU seconds a second without any hand-off.
        busy: CPU seconds of one hand-off beyond that.
    """

    descriptors: float
    threads: float
    memory: float
    idle: float = 0.0
    busy: float = 0.0


def counted() -> Count:
    """This process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Count(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def cpu_seconds(pid: int, *, main: bool = True) -> float:
    """CPU time of all threads of a process, or of all but the main one."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        if main or int(task) != pid:
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


# Of Llama-3.1-8B: one group of 32 layers of 8 heads of 128, one rank.
SHAPE = GroupShape(
    kind="full_attention",
    block_size=BLOCK,
    attention_type="all",
    layers="0-31",
    pages=("H8.N16.C256",) * LAYERS,
)
KEY = CompatibilityKey(
    model="meta-llama/Llama-3.1-8B-Instruct@0e9e39f249a16976918f6564b8830bc894c89659",
    dtype="bfloat16",
    kv_dtype="auto",
    integrity="full",
    kv_heads=8,
    ranks=1,
    groups=(SHAPE,),
    weights="blake2b:" + 64 * "0",
)
EPOCH = b"e" * 16
ENDPOINT = Endpoint(
    transport="mooncake",
    address="10.0.0.1:15000",
    epoch=b"a" * 16,
    n_slots=8192,
    slot_bytes=2 << 20,
)
REPLY = HandshakeReply(EPOCH, "sha256:16:seed", KEY, ((ENDPOINT,),))
PROMPT = Prompt(
    token_ids=range(BLOCKS * BLOCK),
    num_tokens=BLOCKS * BLOCK,
    block_hashes=[n.to_bytes(32, "big") for n in range(BLOCKS)],
    hash_block_size=BLOCK,
)


def token_of(number: int) -> bytes:
    """The token of a peer's hand-off."""
    return number.to_bytes(16, "big")


def serving(key_file: str, handoffs: int) -> ControlChannel:
    """A channel at a port of its own, with hand-offs that can be leased."""
    numbers = itertools.count()
    context = replace(PROCESS_CONTEXT, randbytes=lambda _: token_of(next(numbers)))
    directory = SlotDirectory(BLOCKS, context, 600.0)
    blocks = [(0, i) for i in range(BLOCKS)]
    for _ in range(handoffs):
        handoff = directory.open(PROMPT, [list(PROMPT.block_hashes)])
        assert handoff is not None
        if directory.copying(handoff, blocks):
            directory.filled(handoff, blocks)
        directory.commit(handoff)
    server = ControlServer(
        compatibility=KEY,
        handshake_reply=REPLY,
        directory=directory,
        clock=time.monotonic,
        pending_timeout=LONG,
        count=lambda name: None,
    )
    return ControlChannel(
        compatibility=KEY,
        server=server,
        listen_tcp=HostPort("127.0.0.1", 0),
        key=load_key(key_file),
    )


def lease(channel: ControlChannel, address: str, number: int) -> Lease:
    """Ask for the hand-off of this number."""
    pending = PendingLease(
        token_of(number), PROMPT, EPOCH, "sha256:16:seed", time.monotonic() + LONG
    )
    channel.request_lease(f"tcp://{address}", pending)
    return pending.future.result(LONG)


def hand_off(
    channels: list[ControlChannel],
    addresses: list[str],
    number: int,
    rate: float,
    done: dict[str, int],
) -> None:
    """Lease and release so many hand-offs, `rate` a second; channels and peers take turns, so that
    as many hand-offs as there are pairs are one of each pair.

    Args:
        done: of each peer, how many of its hand-offs have been leased; they are counted on.
    """
    begin = time.monotonic()
    for each in range(number):
        time.sleep(max(0.0, begin + each / rate - time.monotonic()))
        round_number, at = divmod(each, len(channels))
        address = addresses[(at + round_number) % len(addresses)]
        channel = channels[at]
        channel.release(lease(channel, address, done[address]))
        done[address] += 1


class Child:
    """A child process, which obeys one command a line."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, __file__, "--child", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready: Any = self._answer()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str, *arguments: object) -> Any:
        """The answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("="):  # Mooncake writes lines of its own
                return json.loads(line[1:])
        raise RuntimeError("a child process has ended")


def tell(answer: object) -> None:
    """Answer the parent process."""
    print(f"={json.dumps(answer)}", flush=True)


def child(role: str, number: int, key_file: str, handoffs: int) -> None:
    """Be a child process: `number` engines that serve, ask or fetch.

    Args:
        handoffs: how many each engine that serves has; for engines that ask, the number of the
            first that they lease of each peer.
    """
    channels: list[ControlChannel] = []
    engines: list[TransferEngine] = []
    done: dict[str, int] = defaultdict(lambda: handoffs)
    before = counted()
    if role == "serves":
        channels = [serving(key_file, handoffs) for _ in range(number)]
        tell([str(each.tcp_address) for each in channels])
    elif role == "asks":
        key = load_key(key_file)
        channels = [ControlChannel(compatibility=KEY, key=key) for _ in range(number)]
        tell(None)
    else:
        engines = [TransferEngine(MooncakeSettings(), "127.0.0.1") for _ in range(number)]
        memory = np.ones(BUFFER_BYTES, np.uint8)
        at = int(memory.ctypes.data)
        for each in engines:
            each.register(at, memory.nbytes)
        tell([[each.address, at] for each in engines])
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = None
        if command == "count":
            now = counted()
            answer = [now.descriptors, now.threads, now.memory - before.memory]
        elif command == "cpu":
            answer = cpu_seconds(os.getpid(), main=False)
        elif command == "hand off":
            addresses, number, rate = arguments
            hand_off(channels, addresses, number, rate, done)
        elif command == "fetch":
            for address, at in arguments[0]:
                ranges = [MemoryRange(at, 4 << 20)]
                buffer = engines[0].fetch(address, ranges, time.monotonic() + LONG)
                engines[0].pool.give_back(buffer)
        tell(answer)


def channel_count(side: str, peers: int, key_file: Path, seconds: float) -> Count:
    """One channel that asks (or serves) so many peers."""
    serves, asks = (peers, 1) if side == "asks" else (1, peers)
    number = int(RATE * seconds)
    handoffs = -(-(number + peers) // serves) + 1
    with (
        Child("serves", serves, key_file, handoffs) as server,
        Child("asks", asks, key_file, 0) as asker,
    ):
        measured = asker if side == "asks" else server
        asker.ask("hand off", server.ready, peers, RATE)
        count = measured.ask("count")
        began = time.monotonic()
        before = measured.ask("cpu")
        time.sleep(seconds)
        idle = (measured.ask("cpu") - before) / (time.monotonic() - began)
        began = time.monotonic()
        before = measured.ask("cpu")
        asker.ask("hand off", server.ready, number, RATE)
        used = measured.ask("cpu") - before - idle * (time.monotonic() - began)
        return Count(count[0], count[1], count[2], idle=idle, busy=used / number)


def fetching_count(peers: int, key_file: Path) -> Count:
    """One Transfer Engine that reads from so many others."""
    with (
        Child("fetches", peers, key_file, 0) as owners,
        Child("fetches", 1, key_file, 0) as reader,
    ):
        for _ in range(3):
            reader.ask("fetch", owners.ready)
        return Count(*reader.ask("count"))


def lease_bytes(handoffs: int = 2000) -> float:
    """Memory of the directory for one more hand-off that is leased, with `BLOCKS` blocks."""
    directory = SlotDirectory((handoffs + 1) * BLOCKS, PROCESS_CONTEXT, 600.0)
    blocks = [(0, i) for i in range(BLOCKS)]

    def leased(number: int) -> None:
        hashes = [(number * BLOCKS + i).to_bytes(32, "big") for i in range(BLOCKS)]
        prompt = msgspec.structs.replace(PROMPT, block_hashes=hashes)
        handoff = directory.open(prompt, [hashes])
        assert handoff is not None
        directory.copying(handoff, blocks)
        directory.filled(handoff, blocks)
        directory.commit(handoff)
        digest = prompt.digest("blocks")
        directory.lease(handoff.token, prompt.num_tokens, digest, "blocks", number)

    leased(0)
    tracemalloc.start()
    for number in range(1, handoffs + 1):
        leased(number)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / handoffs


def message_bytes() -> dict[str, int]:
    """The messages of a session and of a hand-off of `BLOCKS` blocks, before encryption."""
    digest = PROMPT.digest("blocks")
    slots = tuple((8000 + i, 1_000_000 + i) for i in range(BLOCKS))
    return {
        "handshake": len(encode(Handshake.of(KEY))),
        "answer to it": len(encode(REPLY)),
        "lease request": len(
            encode(LeaseRequest(100_000, EPOCH, PROMPT.num_tokens, digest, "blocks"))
        ),
        "lease": len(encode(LeaseGranted(100_000, PROMPT.num_tokens, (0,), (slots,), 120.0))),
        "release": len(encode(Release(EPOCH, 100_000))),
    }


class Master:
    """A `mooncake_master` that tells how many calls it had."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._metrics = free_port()
        program = Path(sys.executable).with_name("mooncake_master")
        self._log = (folder / "master.log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.address.rpartition(':')[2]}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._metrics}",
                "--enable_metric_reporting=false",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + LONG
        while True:
            try:
                self.calls()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def calls(self) -> dict[str, float]:
        """How many calls of each kind it has answered."""
        url = f"http://127.0.0.1:{self._metrics}/metrics"
        found = {}
        with urllib.request.urlopen(url, timeout=LONG) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("master_") and name.endswith("_requests_total"):
                    kind = name.removeprefix("master_").removesuffix("_requests_total")
                    found[kind] = float(value)
        return found

    def cpu(self) -> float:
        """CPU seconds that it has used."""
        return cpu_seconds(self._process.pid)


@contextmanager
def started_master() -> Iterator[Master]:
    """A master, which ends afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        master = Master(Path(folder))
        try:
            yield master
        finally:
            master.close()


@dataclass(frozen=True)
class MasterCost:
    """What one call of `BlockStore` costs the master.

    Attributes:
        calls: calls to the master, by kind.
        cpu: CPU seconds of the master.
    """

    calls: dict[str, float]
    cpu: float


def master_costs(repeats: int) -> dict[tuple[str, int], MasterCost]:
    """Of each operation, with so many blocks a call."""
    costs = {}
    with started_master() as master:
        store = MooncakeBlockStore(StoreSettings(master=master.address), lends=1 << 28)
        store.wait(LONG)
        rows = store.buffer(BLOCKS, 4096)
        for blocks in (1, BLOCKS):
            lengths = [4096] * blocks
            keys = [
                [f"{'k' * 64}-{blocks}-{each}-{i}" for i in range(blocks)]
                for each in range(repeats)
            ]
            operations: dict[str, Callable[[list[str]], list[bool]]] = {
                "look up, missing": lambda part: store.exists(part, timeout=LONG),
                "put": partial(store.put, rows=rows[:blocks], lengths=lengths, timeout=LONG),
                "look up, there": lambda part: store.exists(part, timeout=LONG),
                "get": partial(store.get, rows=rows[:blocks], lengths=lengths, timeout=LONG),
            }
            for name, operation in operations.items():
                before = master.calls()
                cpu = master.cpu()
                for part in keys:
                    operation(part)
                cpu = master.cpu() - cpu
                calls = {
                    kind: (number - before.get(kind, 0.0)) / repeats
                    for kind, number in master.calls().items()
                    if number - before.get(kind, 0.0) >= repeats
                }
                costs[name, blocks] = MasterCost(calls, cpu / repeats)
        store.close()
    return costs


FIGURES = ("descriptors", "threads", "memory", "idle", "busy")


def predicted(counts: dict[int, Count], peers: int) -> Count:
    """What so many peers cost, by the counts at the two smallest numbers of peers.

    Each peer adds as much as another one. A hand-off costs the same beside any number.
    """
    few, more = sorted(counts)[:2]

    def line(name: str) -> float:
        first = getattr(counts[few], name)
        return float(first + (getattr(counts[more], name) - first) * (peers - few) / (more - few))

    return replace(Count(*map(line, FIGURES)), busy=(counts[few].busy + counts[more].busy) / 2)


@dataclass(frozen=True)
class Measured:
    """All that is measured; the counts are by the number of peers."""

    asks: dict[int, Count]
    serves: dict[int, Count]
    fetches: dict[int, Count]
    messages: dict[str, int]
    lease: float
    master: dict[tuple[str, int], MasterCost]


def check_table(title: str, counts: dict[int, Count]) -> list[str]:
    """The counts of one side, and beside the last one what the first two predict."""
    largest = max(counts)
    lines = [
        f"| {title} | descriptors | threads | resident MiB | idle, ms of CPU a second "
        "| one hand-off, µs of CPU |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = [(f"{peers} peers, counted", count) for peers, count in counts.items()]
    rows.append((f"{largest} peers, predicted", predicted(counts, largest)))
    for name, count in rows:
        lines.append(
            f"| {name} | {count.descriptors:.0f} | {count.threads:.0f} "
            f"| {count.memory / (1 << 20):.1f} | {1e3 * count.idle:.1f} | {1e6 * count.busy:.0f} |"
        )
    return [*lines, ""]


def per_peer(counts: dict[int, Count]) -> Count:
    """The cost of one more peer, by the smallest and the largest number of peers."""
    few, more = min(counts), max(counts)
    cost = [
        (getattr(counts[more], name) - getattr(counts[few], name)) / (more - few)
        for name in FIGURES
    ]
    return Count(*cost)


def model(measured: Measured, engines: int, rate: float) -> list[tuple[str, str, str]]:
    """What each prefill and each decode engine has, of `engines` of each, at `rate` hand-offs a
    second in all."""
    handoffs = rate / engines
    asks = per_peer(measured.asks)
    serves = per_peer(measured.serves)
    fetches = per_peer(measured.fetches)
    # Each side of a connection sends a heartbeat, and answers that of the other.
    heartbeats = 4 * engines * 1000 / HEARTBEAT_MS
    sizes = measured.messages
    sent = sizes["lease request"] + sizes["release"]
    small = min(measured.asks)

    def cpu(counts: dict[int, Count], one: Count) -> str:
        idle = counts[small].idle + one.idle * (engines - small)
        busy = max(count.busy for count in counts.values())
        return f"{100 * (idle + busy * handoffs):.1f} %"

    def resident(one: Count, other: Count | None = None) -> str:
        total = one.memory + (0 if other is None else other.memory)
        return f"{total * engines / (1 << 20):.1f} MiB"

    open_handoffs = handoffs * 120
    return [
        ("hand-offs a second", f"{handoffs:.0f}", f"{handoffs:.0f}"),
        ("control connections", f"{engines}", f"{engines}"),
        (
            "control messages a second",
            f"{2 * handoffs:.0f} in, {handoffs:.0f} out",
            f"{handoffs:.0f} in, {2 * handoffs:.0f} out",
        ),
        ("heartbeats and their answers a second", f"{heartbeats:.0f}", f"{heartbeats:.0f}"),
        (
            "control bytes a second",
            f"{sent * handoffs / 1e3:.0f} kB in, {sizes['lease'] * handoffs / 1e3:.0f} kB out",
            f"{sizes['lease'] * handoffs / 1e3:.0f} kB in, {sent * handoffs / 1e3:.0f} kB out",
        ),
        (
            "CPU of the control channel, of one core",
            cpu(measured.serves, serves),
            cpu(measured.asks, asks),
        ),
        (
            "descriptors: control + Transfer Engine",
            f"{serves.descriptors * engines:.0f} + {fetches.descriptors * engines:.0f}",
            f"{asks.descriptors * engines:.0f} + {fetches.descriptors * engines:.0f}",
        ),
        (
            "threads for peers",
            "0",
            f"{min(64, 4 * engines)} at most (`omni-fetch`), whatever the number of peers",
        ),
        ("resident memory for peers", resident(serves), resident(asks, fetches)),
        (
            "leases, if each lasts 1 s",
            f"{handoffs:.0f}, {measured.lease * handoffs / (1 << 20):.1f} MiB",
            "-",
        ),
        (
            "hand-offs, if nobody fetches for 120 s (`handoff_ttl_s`)",
            f"{open_handoffs:.0f}, {measured.lease * open_handoffs / (1 << 20):.0f} MiB",
            "-",
        ),
    ]


def model_table(measured: Measured, engines: int, rate: float) -> list[str]:
    lines = [
        f"| {engines} prefill and {engines} decode engines, {rate:,.0f} hand-offs a second "
        "| a prefill engine | a decode engine |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {name} | {ours} | {theirs} |" for name, ours, theirs in model(measured, engines, rate)
    ]
    return [*lines, ""]


def master_table(measured: Measured) -> list[str]:
    """The calls to the master, and what a core of it can answer."""
    lines = [
        "| operation | blocks a call | calls to the master | CPU of the master, µs a call "
        "| µs a block | blocks a second and core |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for (name, blocks), cost in measured.master.items():
        calls = ", ".join(
            f"{number:.0f} {kind.replace('_', ' ')}" for kind, number in cost.calls.items()
        )
        lines.append(
            f"| {name} | {blocks} | {calls} | {1e6 * cost.cpu:.0f} | {1e6 * cost.cpu / blocks:.2f} "
            f"| {blocks / cost.cpu:,.0f} |"
        )
    return [*lines, ""]


def markdown(measured: Measured, command: str) -> str:
    """The page of results."""
    sizes = ", ".join(f"{name} {size}" for name, size in measured.messages.items())
    lines = [
        "# Engines of a cluster",
        "",
        f"`{command}`: {machine()}.",
        "",
        "What the figures mean is in [docs/internals/scale.md](../../docs/internals/scale.md).",
        "",
        "## Counted and predicted",
        "",
        f"One engine's control channel over TCP with CURVE, at {RATE:.0f} hand-offs a second of "
        f"{BLOCKS} blocks, which its peers share evenly. *Predicted* is the line through the first "
        "two counts; for a hand-off their mean. Resident memory and CPU are those of the channel's "
        "process beyond what it had before its hand-offs were made, and without its "
        "main thread.",
        "",
        *check_table("asks", measured.asks),
        *check_table("serves", measured.serves),
        "One Transfer Engine over TCP that has read 4 MiB three times from each peer:",
        "",
        "| peers | descriptors | threads | resident MiB |",
        "|---:|---:|---:|---:|",
        *(
            f"| {peers} | {count.descriptors:.0f} | {count.threads:.0f} "
            f"| {count.memory / (1 << 20):.1f} |"
            for peers, count in measured.fetches.items()
        ),
        "",
        f"Bytes of a message before encryption, for a model of {LAYERS} layers: {sizes}. A leased "
        f"hand-off of {BLOCKS} blocks takes {measured.lease / 1e3:.1f} kB of the directory.",
        "",
        "## The model",
        "",
        *model_table(measured, ENGINES, HANDOFFS_A_S),
        *model_table(measured, 500, HANDOFFS_A_S * 500 / ENGINES),
        "## Mooncake's master",
        "",
        "Its own counters, and its CPU time, in blocks of 4 KiB with one client on the same host.",
        "",
        *master_table(measured),
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    seconds = 1.0 if arguments.quick else SECONDS
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "key")
        write_new_key(key_file)
        measured = Measured(
            asks={n: channel_count("asks", n, key_file, seconds) for n in PEERS},
            serves={n: channel_count("serves", n, key_file, seconds) for n in PEERS},
            fetches={n: fetching_count(n, key_file) for n in FETCHED},
            messages=message_bytes(),
            lease=lease_bytes(),
            master=master_costs(20 if arguments.quick else 200),
        )
    command = "python benchmarks/cluster.py" + (" --quick" if arguments.quick else "")
    text = markdown(measured, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "cluster.md").write_text(text)
    sys.stdout.flush()
    os._exit(0)  # Mooncake's threads may crash at the end of a process


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        main()
