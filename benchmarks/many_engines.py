# SPDX-License-Identifier: Apache-2.0
"""64 prefill and 64 decode engines that all meet: in simulated time, and over real sockets.

In simulated time (`simulated_cluster`) a router sends requests at random times to random pairs of
engines, at the full rate. That shows connections, messages, queues, leases and what is held.

Over real sockets, processes of 32 or 64 engines open all connections, TCP with CURVE on loopback,
and hand off at a low rate. Descriptors, threads, memory and CPU are counted in /proc.

    python benchmarks/many_engines.py [--quick]

writes results/many_engines.md beside this file.
"""

import argparse
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from cluster import BLOCK, BLOCKS, ENDPOINT, ENGINES, HANDOFFS_A_S, RATE, REPLY, RESULTS, Child
from machine import machine
from simulated_cluster import LATENCY_S, LOAD_S, MESSAGE_S, Cluster, Engine

from omni_connector.handoff.channel import MAX_PEERS
from omni_connector.net.keys import write_new_key

SEED: Final = 0
SECONDS: Final = 10.0
SAMPLES: Final = 20
RESTART_AFTER_S: Final = 1.0
DOWN_S: Final = 2.0
MORE: Final = 500
SHOWN: Final = 8
ASKING_PROCESSES: Final = 2
REAL_RATE: Final = 100.0
REAL_SECONDS: Final = 10.0


def cluster_of(prefill: int, decode: int) -> Cluster:
    """Engines with the arenas and prompts of results/cluster.md."""
    return Cluster(
        prefill,
        decode,
        REPLY,
        slots=ENDPOINT.n_slots,
        blocks=BLOCKS,
        block_size=BLOCK,
        seed=SEED,
    )


def _ms(waits: Iterable[float]) -> str:
    values = 1e3 * np.fromiter(waits, float)
    p50, p99 = np.percentile(values, [50, 99])
    return f"{p50:.2f} / {p99:.2f} / {values.max():.1f}"


def _average(engines: Iterable[Engine], direction: str, kinds: Iterable[str]) -> float:
    each = [sum(engine.messages[direction, kind] for kind in kinds) for engine in engines]
    return float(np.mean(each))


HAND_OFF: Final = ("LeaseRequest", "LeaseGranted", "Release")


def meet(seconds: float) -> list[str]:
    """All engines start at once, and requests come at the full rate from then on."""
    cluster = cluster_of(ENGINES, ENGINES)
    held, leases = [], []
    for _ in range(SAMPLES):
        cluster.run(HANDOFFS_A_S, seconds / SAMPLES)
        usage = [each.directory.usage() for each in cluster.prefill]
        held.append([each.directory.num_handoffs for each in cluster.prefill])
        leases.append([of for _, _, of in usage])
    waits = cluster.outcome.waits
    met = sorted(cluster.outcome.met.values())
    P, D = cluster.prefill, cluster.decode
    pairs = ENGINES * ENGINES
    soon = [wait for began, wait in waits if began < 1.0]
    later = [wait for began, wait in waits if began >= 1.0]
    done = len(waits)

    def a_second(engines: Iterable[Engine], direction: str) -> str:
        return f"{_average(engines, direction, HAND_OFF) / seconds:.0f}"

    def once(engines: Iterable[Engine], direction: str, kind: str) -> str:
        return f"{_average(engines, direction, [kind]):.1f}"

    rows = [
        ("connections", f"{ENGINES}", f"{ENGINES}",
         f"{np.mean([each.connections for each in P]):.1f}",
         f"{np.mean([each.links_made for each in D]):.1f}"),
        ("handshakes that it gets, answers that it sends", f"{ENGINES}", "-",
         f"{once(P, 'in', 'Handshake')}, {once(P, 'out', 'HandshakeReply')}", "-"),
        ("handshakes that it sends, answers that it gets", "-", f"{ENGINES}",
         "-", f"{once(D, 'out', 'Handshake')}, {once(D, 'in', 'HandshakeReply')}"),
        ("messages of hand-offs a second, in", f"{2 * RATE:.0f}", f"{RATE:.0f}",
         a_second(P, "in"), a_second(D, "in")),
        ("messages of hand-offs a second, out", f"{RATE:.0f}", f"{2 * RATE:.0f}",
         a_second(P, "out"), a_second(D, "out")),
        ("control kB a second, out", "194", "29",
         f"{np.mean([each.sent for each in P]) / seconds / 1e3:.0f}",
         f"{np.mean([each.sent for each in D]) / seconds / 1e3:.0f}"),
        ("leases at a time", f"{RATE * LOAD_S:.1f}", "-",
         f"{np.mean(leases):.1f}, {np.max(leases)} at most", "-"),
        ("CPU of `omni-control` and of connecting, of one core",
         f"{100 * 3 * MESSAGE_S * RATE:.1f} %", f"{100 * 3 * MESSAGE_S * RATE:.1f} %",
         f"{100 * np.mean([each.thread.busy for each in P]) / seconds:.1f} %",
         f"{100 * np.mean([each.thread.busy for each in D]) / seconds:.1f} %"),
    ]  # fmt: skip
    return [
        f"| {ENGINES} prefill (P) and {ENGINES} decode engines (D), {HANDOFFS_A_S:,} hand-offs a "
        "second | P, the model | D, the model | P, simulated | D, simulated |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "Bytes of the model are those of slots and generations with large numbers, without "
        f"handshakes. In {seconds:.0f} s {done:,} hand-offs were leased, and "
        f"{_failed(cluster.outcome.failures)}. Of {pairs:,} pairs half had met after "
        f"{met[len(met) // 2]:.2f} s, 99 % after {met[int(0.99 * len(met))]:.2f} s, and "
        f"{len(met):,} in the end. At most {np.max(held)} hand-offs were held by one prefill "
        f"engine at a time, of {ENDPOINT.n_slots // BLOCKS} that its arena has room for.",
        "",
        "| from a lease request to its lease, ms | median / 99th percentile / longest |",
        "|---|---:|",
        f"| in the first second, while most pairs meet | {_ms(soon)} |",
        f"| after that | {_ms(later)} |",
        "",
    ]


def _failed(failures: Counter[str]) -> str:
    if not failures:
        return "none failed"
    return ", ".join(f"{number:,} failed ({why})" for why, number in failures.most_common())


def restart() -> list[str]:
    """A prefill engine is killed while most pairs have met, and starts again."""
    cluster = cluster_of(ENGINES, ENGINES)
    cluster.run(HANDOFFS_A_S, RESTART_AFTER_S)
    before = Counter(cluster.outcome.failures)
    killed = cluster.prefill[0].name
    served = {d for d, p in cluster.outcome.met if p == killed}
    cluster.restart(0, DOWN_S)
    began = cluster.agenda.now
    cluster.run(HANDOFFS_A_S, DOWN_S + 2.0)
    new = cluster.prefill[0]
    failures = cluster.outcome.failures - before
    routed = failures.pop("no prefill engine", 0)
    waits = [wait for when, wait in cluster.outcome.waits if when >= began]
    return [
        f"One of {ENGINES} prefill engines is killed, and serves again {DOWN_S:.0f} s later with "
        f"another epoch. {len(served)} decode engines had met it. The router stops to name it at "
        f"once: {routed} requests find none. Of those under way {_failed(failures)}. Two seconds "
        f"later {new.connections} decode engines are connected to it. From a lease request to its "
        f"lease took {_ms(waits)} ms (median / 99th percentile / longest) meanwhile.",
        "",
    ]


def more(seconds: float) -> list[str]:
    """Some of 500 decode engines, each of which asks 500 prefill engines; and cells of 64."""
    lines = [
        "| prefill engines that one D asks | connections of D | new connections a hand-off "
        "| messages a hand-off | to a lease, ms: median / 99th percentile / longest |",
        "|---:|---:|---:|---:|---:|",
    ]
    for prefill in (ENGINES, MAX_PEERS, MORE):
        cluster = cluster_of(prefill, SHOWN)
        warm = 4 * prefill / RATE  # each D has asked each P about four times
        cluster.run(RATE * SHOWN, warm)
        made = sum(each.links_made for each in cluster.decode)
        sent = sum(sum(each.messages.values()) for each in cluster.decode)
        done = len(cluster.outcome.waits)
        cluster.run(RATE * SHOWN, seconds)
        waits = [wait for _, wait in cluster.outcome.waits[done:]]
        number = len(waits)
        made = sum(each.links_made for each in cluster.decode) - made
        sent = sum(sum(each.messages.values()) for each in cluster.decode) - sent
        connections = sum(each.connections for each in cluster.prefill) / SHOWN
        lines.append(
            f"| {prefill} | {connections:.0f} | {made / number:.2f} | {sent / number:.2f} "
            f"| {_ms(waits)} |"
        )
        assert not cluster.outcome.failures
    return [*lines, ""]


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


def real_table(P: Side, D: Side, met: float) -> list[str]:
    """What was counted over real sockets, beside the model."""
    rows = [
        ("descriptors for peers", f"{ENGINES}", f"{P.descriptors:.1f}", f"{4 * ENGINES}",
         f"{D.descriptors:.1f}"),
        ("threads for peers", "0", f"{P.threads:.1f}", "0", f"{D.threads:.1f}"),
        ("resident MiB for peers", MODEL_MIB[0], f"{P.memory / (1 << 20):.1f}", MODEL_MIB[1],
         f"{D.memory / (1 << 20):.1f}"),
        ("CPU of a new connection and its first hand-off, ms", "-", f"{1e3 * P.meeting:.2f}", "-",
         f"{1e3 * D.meeting:.2f}"),
        ("idle, ms of CPU a second", MODEL_IDLE[0], f"{1e3 * P.idle:.1f}", MODEL_IDLE[1],
         f"{1e3 * D.idle:.1f}"),
        ("CPU of a hand-off, µs", "443 to 540", f"{1e6 * P.busy:.0f}", "312 to 519",
         f"{1e6 * D.busy:.0f}"),
    ]  # fmt: skip
    return [
        "| of one engine | P, the model | P, counted | D, the model | D, counted |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"All {ENGINES * ENGINES:,} pairs, asked one after the other, had met after {met:.0f} s.",
        "",
    ]


# Of results/cluster.md: a peer costs a prefill engine 45 kB, and a decode engine 65 kB beside what
# the Transfer Engine takes; heartbeats of 64 peers, by the line through 8 and 128.
MODEL_MIB: Final = ("2.8", "4.0")
MODEL_IDLE: Final = ("3.0", "2.3")


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    seconds = 2.0 if arguments.quick else SECONDS
    met = meet(seconds)
    restarted = restart()
    larger = more(seconds)
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "key")
        write_new_key(key_file)
        counted = real(key_file, REAL_RATE, 2.0 if arguments.quick else REAL_SECONDS)
    command = "python benchmarks/many_engines.py" + (" --quick" if arguments.quick else "")
    lines = [
        "# Many engines that meet",
        "",
        f"`{command}`: {machine()}.",
        "",
        "*The model* is that of [docs/internals/scale.md](../../docs/internals/scale.md), whose "
        "constants [results/cluster.md](cluster.md) has.",
        "",
        "## In simulated time",
        "",
        "The control channels, servers, sessions and slot directories are the connector's own. "
        "Clock, threads and network are simulated. A message takes each thread "
        f"{1e6 * MESSAGE_S:.0f} µs, by results/cluster.md, and {1e6 * LATENCY_S:.0f} µs on its "
        f"way; a load takes {1e3 * LOAD_S:.0f} ms. All engines start at once. Requests of "
        f"{BLOCKS} blocks come at random times to random pairs of engines.",
        "",
        *met,
        "### A restart",
        "",
        *restarted,
        "### More prefill engines",
        "",
        f"{SHOWN} decode engines at {RATE:.0f} hand-offs a second each, which go to random prefill "
        f"engines; counted once each pair has met about four times. A decode engine keeps "
        f"{MAX_PEERS} peers (`MAX_PEERS`).",
        "",
        *larger,
        "## Over real sockets",
        "",
        f"{ENGINES} prefill engines in one process and {ENGINES} decode engines in "
        f"{ASKING_PROCESSES}, TCP with CURVE on loopback. First each pair hands off once; then "
        "nothing happens for a while; then half of the decode engines hand off at "
        f"{REAL_RATE:.0f} a second in all, one at a time. Averages of an engine, beyond what it "
        "has without peers; CPU is that of all threads but the main one of a process.",
        "",
        *real_table(*counted),
    ]
    text = "\n".join(lines)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "many_engines.md").write_text(text)


if __name__ == "__main__":
    main()
