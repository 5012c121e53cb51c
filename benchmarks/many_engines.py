# SPDX-License-Identifier: Apache-2.0
"""64 prefill and 64 decode engines that all meet, over real sockets.

Processes of 32 or 64 engines' control channels open all connections, TCP with CURVE on loopback,
and hand off at a low rate. Descriptors, threads, memory and CPU are counted in /proc.

    python benchmarks/many_engines.py [--quick]

writes results/many_engines.md beside this file.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from machine import RESULTS, machine

from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import Lease, PendingLease
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import HandshakeReply
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.keys import load_key, write_new_key
from omni_connector.net.peers import HostPort
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.transports.base import Endpoint

BLOCK, BLOCKS = 16, 128
LAYERS = 32
ENGINES: Final = 64
ASKING_PROCESSES: Final = 2
RATE: Final = 100.0
SECONDS: Final = 10.0
LONG: Final = 60.0


def counted() -> tuple[int, int, int]:
    """Open descriptors, threads and resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task"))
    return descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds() -> float:
    """CPU time of all threads of this process but the main one."""
    tasks = (each for each in Path("/proc/self/task").iterdir() if int(each.name) != os.getpid())
    return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks) / 1e9


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
            return json.loads(line)
        raise RuntimeError("a child process has ended")


def tell(answer: object) -> None:
    """Answer the parent process."""
    print(json.dumps(answer), flush=True)


def child(role: str, number: int, key_file: str, handoffs: int) -> None:
    """Be a child process: `number` engines that serve or ask.

    Args:
        handoffs: how many each engine that serves has; for engines that ask, the number of the
            first that they lease of each peer.
    """
    done: dict[str, int] = defaultdict(lambda: handoffs)
    memory = counted()[2]
    if role == "serves":
        channels = [serving(key_file, handoffs) for _ in range(number)]
        tell([str(each.tcp_address) for each in channels])
    else:
        key = load_key(key_file)
        channels = [ControlChannel(compatibility=KEY, key=key) for _ in range(number)]
        tell(None)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = None
        if command == "count":
            descriptors, threads, now = counted()
            answer = [descriptors, threads, now - memory]
        elif command == "cpu":
            answer = cpu_seconds()
        elif command == "hand off":
            addresses, hand_offs, rate = arguments
            hand_off(channels, addresses, hand_offs, rate, done)
        tell(answer)


@dataclass(frozen=True)
class Side:
    """What one engine of a side has, on average.

    Attributes:
        descriptors, threads: beside those of a process without peers.
        memory: bytes that its peers take.
        meeting: CPU seconds for one new peer, its first hand-off included.
        idle: CPU seconds a second without hand-offs.
        busy: CPU seconds of a hand-off beyond that.
    """

    descriptors: float
    threads: float
    memory: float
    meeting: float
    idle: float
    busy: float


def _sum(children: list[Child], command: str) -> np.ndarray:
    found: np.ndarray = np.sum([np.atleast_1d(each.ask(command)) for each in children], axis=0)
    return found


def real(key_file: Path, rate: float, seconds: float) -> tuple[Side, Side, float]:
    """All engines of both sides with real sockets; returns P, D, and the seconds of meeting."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    number = int(rate * seconds)
    each = ENGINES // ASKING_PROCESSES
    pairs = each * ENGINES
    of_each = each + -(-number // each) + 1  # hand-offs of each P that one process asks for
    with ExitStack() as stack:
        server = stack.enter_context(Child("serves", ENGINES, key_file, ASKING_PROCESSES * of_each))
        askers = [
            stack.enter_context(Child("asks", each, key_file, at * of_each))
            for at in range(ASKING_PROCESSES)
        ]
        sides = [[server], askers]
        empty = [_sum(side, "count") for side in sides]
        cpu = [_sum(side, "cpu") for side in sides]
        began = time.monotonic()
        for asker in askers:
            asker.ask("hand off", server.ready, pairs, 1e6)
        met = time.monotonic() - began
        meeting = [_sum(side, "cpu") - before for side, before in zip(sides, cpu, strict=True)]
        full = [_sum(side, "count") for side in sides]
        cpu = [_sum(side, "cpu") for side in sides]
        began = time.monotonic()
        time.sleep(seconds)
        slept = time.monotonic() - began
        idle = [_sum(side, "cpu") - before for side, before in zip(sides, cpu, strict=True)]
        cpu = [_sum(side, "cpu") for side in sides]
        began = time.monotonic()
        askers[0].ask("hand off", server.ready, number, rate)
        took = time.monotonic() - began
        busy = [_sum(side, "cpu") - before for side, before in zip(sides, cpu, strict=True)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = []
    for side in range(2):
        descriptors, threads, memory = (full[side] - empty[side]) / ENGINES
        per_s = float(idle[side][0]) / slept
        found.append(
            Side(
                descriptors,
                threads,
                memory,
                float(meeting[side][0]) / (ENGINES * ENGINES),
                per_s / ENGINES,
                (float(busy[side][0]) - per_s * took) / number,
            )
        )
    return found[0], found[1], met


def markdown(P: Side, D: Side, met: float, command: str) -> str:
    """The page."""
    rows = (
        ("descriptors for peers", f"{P.descriptors:.1f}", f"{D.descriptors:.1f}"),
        ("threads for peers", f"{P.threads:.1f}", f"{D.threads:.1f}"),
        ("resident MiB for peers", f"{P.memory / (1 << 20):.1f}", f"{D.memory / (1 << 20):.1f}"),
        (
            "CPU of a new connection and its first hand-off, ms",
            f"{1e3 * P.meeting:.2f}",
            f"{1e3 * D.meeting:.2f}",
        ),
        ("idle, ms of CPU a second", f"{1e3 * P.idle:.1f}", f"{1e3 * D.idle:.1f}"),
        ("CPU of a hand-off, µs", f"{1e6 * P.busy:.0f}", f"{1e6 * D.busy:.0f}"),
    )
    lines = [
        "# Many engines that meet",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"{ENGINES} prefill engines (P) in one process and {ENGINES} decode engines (D) in "
        f"{ASKING_PROCESSES}, TCP with CURVE on loopback. First each pair hands off once; then "
        "nothing happens for a while; then half of the decode engines hand off at "
        f"{RATE:.0f} a second in all, one at a time. Averages of an engine, beyond what it "
        "has without peers; CPU is that of all threads but the main one of a process.",
        "",
        "| of one engine | P | D |",
        "|---|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"All {ENGINES * ENGINES:,} pairs, asked one after the other, had met after {met:.0f} s.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        role, number, key_file, handoffs = arguments.child
        child(role, int(number), key_file, int(handoffs))
        return
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "key")
        write_new_key(key_file)
        found = real(key_file, RATE, 2.0 if arguments.quick else SECONDS)
    command = "python benchmarks/many_engines.py" + (" --quick" if arguments.quick else "")
    text = markdown(*found, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "many_engines.md").write_text(text)


if __name__ == "__main__":
    main()
