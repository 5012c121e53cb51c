# SPDX-License-Identifier: Apache-2.0
"""How loads, saves and fetches of one engine speed up with cores: a model, and this machine.

The model has a simulated clock. Its constants are measured here: what one core copies and hashes
in a second, what all cores copy in a second together, and what Python takes for a piece and
to hand parts of it to other threads. A thread that runs Python holds the GIL, so
two never do at once. A thread that copies takes a core, and has an equal share of the memory's
bandwidth. The threads, pieces and parts are the connector's: one thread loads, one saves, one
fetches, and `copy_threads` share each piece.

This machine does the same on one core, and on all it has, each with `copy_threads` of 1 and 2.

    python benchmarks/parallel_copies.py [--quick] [--bandwidth GB/S]

writes results/parallel_copies.md and results/parallel_copies.png beside this file.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import matplotlib as mpl
import numpy as np
from data_plane import RESULTS, timed
from load_beside_save import LAYERS, PAGE_BYTES, Rank
from machine import machine
from unlike_engines import InPlace

from omni_connector.copy import host
from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.jobs import BATCH_BYTES
from omni_connector.copy.native import native_copy
from omni_connector.runtime.shared_work import Helpers
from omni_connector.transports.base import Endpoint, Fetched
from omni_connector.transports.peer_arenas import OwnArena

mpl.use("Agg")
import matplotlib.pyplot as plt

CORES: Final = (1, 2, 4, 8, 16)
SLOT_BYTES: Final = LAYERS * PAGE_BYTES
BYTES: Final = 64 << 20
PART_BYTES: Final = 1 << 20  # `CpuCopier.shared_bytes`
MOST_THREADS: Final = 4  # of the default `copy_threads`
AHEAD: Final = 3
SERVER: Final = 100.0
LOAD, SAVE, FETCH, BOTH = KINDS = ("load", "save", "fetch", "load and save")


@dataclass(frozen=True)
class Constants:
    """What is measured of a machine.

    Attributes:
        load, save, fetch: bytes a second that one core copies for a load, for a save, and for a
            fetch; the first two with checksums.
        bandwidth: bytes a second that all cores copy.
        load_piece, save_piece: seconds of Python for a piece of a load, and of a save, on one
            thread.
        part: seconds of Python to take one part of a piece.
        wake: seconds of Python to hand parts to one more thread, and to hear that it has ended.
        late: seconds until such a thread begins.
    """

    load: float
    save: float
    fetch: float
    bandwidth: float
    load_piece: float
    save_piece: float
    part: float
    wake: float
    late: float


@dataclass
class _Thread:
    """A simulated thread, and what it does now.

    Attributes:
        acts: yields ("python", seconds), ("copy", bytes, bytes a second), ("sleep", seconds), or
            ("wait", condition).
    """

    acts: Iterator[tuple[Any, ...]]
    kind: str = ""
    left: float = 0.0
    rate: float = 0.0
    ready: Callable[[], bool] = field(default=lambda: True)


class Clock:
    """Simulated time of threads that share cores, the GIL and the memory's bandwidth.

    Args:
        cores: as many threads make progress at full speed; more of them share.
        bandwidth: bytes a second that all copies have.
    """

    def __init__(self, cores: int, bandwidth: float) -> None:
        self.now = 0.0
        self._cores = cores
        self._bandwidth = bandwidth
        self._threads: list[_Thread] = []
        self._python: deque[_Thread] = deque()  # the first has the GIL

    def start(self, acts: Iterator[tuple[Any, ...]]) -> None:
        """Start a thread."""
        thread = _Thread(acts)
        self._threads.append(thread)
        self._next(thread)

    def run(self) -> float:
        """Run until all threads have ended; returns the time."""
        while self._threads:
            progress = True
            while progress:  # an act may end the waits of others
                waiting = [t for t in self._threads if t.kind == "wait" and t.ready()]
                progress = bool(waiting)
                for thread in waiting:
                    self._next(thread)
            running = [t for t in self._threads if t.kind == "copy"]
            if self._python:
                running.append(self._python[0])
            asleep = [t for t in self._threads if t.kind == "sleep"]
            if not running and not asleep:
                if self._threads:
                    raise SystemExit("the model waits for ever")
                break
            share = min(1.0, self._cores / max(1, len(running)))
            wanted = sum(t.rate * share for t in running if t.kind == "copy")
            slower = min(1.0, self._bandwidth / wanted) if wanted else 1.0
            speeds = [share * (t.rate * slower if t.kind == "copy" else 1.0) for t in running]
            running += asleep
            speeds += [1.0] * len(asleep)
            step = min(t.left / speed for t, speed in zip(running, speeds, strict=True))
            self.now += step
            for thread, speed in zip(running, speeds, strict=True):
                thread.left -= step * speed
            for thread in running:
                if thread.left <= 1e-9 * max(1.0, thread.rate):
                    if thread.kind == "python":
                        self._python.popleft()
                    self._next(thread)
        return self.now

    def _next(self, thread: _Thread) -> None:
        act = next(thread.acts, None)
        if act is None:
            thread.kind = ""
            self._threads.remove(thread)
            return
        thread.kind = act[0]
        if thread.kind == "wait":
            thread.ready = act[1]
            return
        thread.left = act[1]
        thread.rate = act[2] if thread.kind == "copy" else 1.0
        if thread.kind == "python":
            self._python.append(thread)


class Engine:
    """The threads of one engine in the model.

    Args:
        clock: runs them.
        constants: of the machine.
        copy_threads: that share a piece, its own thread included.
    """

    def __init__(self, clock: Clock, constants: Constants, copy_threads: int) -> None:
        self._clock = clock
        self._constants = constants
        self._threads = copy_threads
        self._wanted: deque[dict[str, Any]] = deque()
        self._jobs = 0
        for _ in range(copy_threads - 1):
            clock.start(self._helper())

    def load(self, nbytes: int, *, fetches: bool = False) -> None:
        """Load from an arena that is mapped, or fetched."""
        fetched: deque[int] = deque()
        pieces = _pieces(nbytes, 1 if fetches else self._threads + 1)
        if fetches:
            self._clock.start(self._fetch(pieces, fetched))
        constants = self._constants
        waits = fetched if fetches else None
        self._clock.start(self._copy(pieces, constants.load_piece, constants.load, waits))
        self._jobs += 1

    def save(self, nbytes: int) -> None:
        """Save to the own arena."""
        constants = self._constants
        self._clock.start(self._copy(_pieces(nbytes, 1), constants.save_piece, constants.save))
        self._jobs += 1

    def _copy(
        self,
        pieces: list[int],
        python: float,
        rate: float,
        fetched: "deque[int] | None" = None,
    ) -> Iterator[tuple[Any, ...]]:
        for slots in pieces:
            if fetched is not None:
                yield "wait", lambda: bool(fetched)
            yield "python", python
            size = slots * SLOT_BYTES
            count = max(1, min(2 * (self._threads + 1), slots, size // PART_BYTES))
            call = {"parts": deque([size / count] * count), "rate": rate, "helping": 0}
            helpers = min(self._threads - 1, count - 1)
            if helpers:
                yield "python", helpers * self._constants.wake
                self._wanted.extend([call] * helpers)
            yield from self._parts(call)
            self._wanted = deque(each for each in self._wanted if each is not call)
            yield "wait", lambda call=call: not call["helping"]
            if fetched is not None:
                fetched.popleft()
        self._jobs -= 1

    def _parts(self, call: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        while call["parts"]:
            size = call["parts"].popleft()
            yield "python", self._constants.part
            yield "copy", size, call["rate"]

    def _helper(self) -> Iterator[tuple[Any, ...]]:
        while True:
            yield "wait", lambda: bool(self._wanted) or not self._jobs
            if not self._wanted:
                return
            call = self._wanted.popleft()
            call["helping"] += 1
            yield "sleep", self._constants.late
            yield from self._parts(call)
            call["helping"] -= 1

    def _fetch(self, pieces: list[int], fetched: deque[int]) -> Iterator[tuple[Any, ...]]:
        for slots in pieces:
            yield "wait", lambda: len(fetched) < AHEAD
            yield "python", self._constants.load_piece
            yield "copy", slots * SLOT_BYTES, self._constants.fetch
            fetched.append(slots)


def _pieces(nbytes: int, multiple: int) -> list[int]:
    """Slots of each piece."""
    slots = -(-nbytes // SLOT_BYTES)
    size = -(-(BATCH_BYTES // SLOT_BYTES) // multiple) * multiple
    return [min(size, slots - first) for first in range(0, slots, size)]


def modelled(kind: str, cores: int, constants: Constants, copy_threads: int) -> float:
    """Bytes a second of a kind of copies in the model."""
    clock = Clock(cores, constants.bandwidth)
    engine = Engine(clock, constants, copy_threads)
    if kind in (LOAD, BOTH, FETCH):
        engine.load(BYTES, fetches=kind == FETCH)
    if kind in (SAVE, BOTH):
        engine.save(BYTES)
    return BYTES * (2 if kind == BOTH else 1) / clock.run()


class FetchedArena(OwnArena):
    """An arena of this process that is not mapped: its slots are copied before they are loaded."""

    def __init__(self, endpoint: Endpoint, arena: Any) -> None:
        super().__init__(endpoint, arena)
        self._rows = self.buffers()
        self._turn = 0

    @staticmethod
    def buffers() -> "np.ndarray[Any, Any]":
        """Memory that is used again, as registered memory is."""
        return np.ones((AHEAD + 2, 2 * BATCH_BYTES), np.uint8)

    def fetch(
        self, slot_ids: Sequence[int], generations: Sequence[int], length: int, *, timeout: float
    ) -> Fetched:
        self._turn = (self._turn + 1) % len(self._rows)
        rows = self._rows[self._turn][: len(slot_ids) * length].reshape(len(slot_ids), length)
        for slot, generation in zip(slot_ids, generations, strict=True):
            self.verify(slot, generation)
        self.read_into(slot_ids, rows)
        headers = [self.verify(s, g) for s, g in zip(slot_ids, generations, strict=True)]
        return Fetched(rows, headers)


class Fetching(InPlace):
    """Attaches arenas of this process, whose slots are fetched."""

    supports_mapping = False

    def attach(self, endpoint: Endpoint, *, timeout: float) -> OwnArena:
        found = super().attach(endpoint, timeout=timeout)
        return FetchedArena(endpoint, found._view)


def run_on(cores: int, copy_threads: int, repeats: int) -> tuple[Constants, dict[str, float]]:
    """The constants, and the least seconds of each kind of copies, on the first cores of this
    machine, in a process of its own."""
    command = [sys.executable, __file__, "--real", str(cores), str(copy_threads), str(repeats)]
    constants, took = json.loads(subprocess.check_output(command, text=True))
    return Constants(**constants), took


def real(cores: int, copy_threads: int, repeats: int) -> tuple[Constants, dict[str, float]]:
    """See `run_on`. Kernels and whole copies are measured in turns."""
    copies = TimedCopy()
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, chosen)
    count = BYTES // SLOT_BYTES
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    apart: dict[str, list[tuple[float, float]]] = {LOAD: [], SAVE: []}
    fetches: list[float] = []
    together: list[float] = []
    part, wake, late = _hand_over(repeats)
    with ExitStack() as stack:
        fetching = Fetching()
        mapped, fetched = (
            Rank(count, saved, stack, copy_threads=copy_threads, transports=transports)
            for saved, transports in ((count, InPlace()), (1, fetching))
        )
        alone = [Rank(count, count, stack, copy_threads=1) for _ in chosen]
        rows = FetchedArena.buffers()
        slots = np.arange(count)

        def load(rank: Rank) -> None:
            ids = rank.blocks[:count]
            rank.copier.load(BlockCopy(0, ids, rank.theirs.slots, slots, checksum=True))

        def fetch() -> None:
            size = BATCH_BYTES // SLOT_BYTES
            for number, first in enumerate(range(0, count, size)):
                target = rows[number % len(rows)][:BATCH_BYTES].reshape(size, SLOT_BYTES)
                for slot in range(first, first + size):
                    np.copyto(target[slot - first], alone[0].theirs.slots[slot, :SLOT_BYTES])

        for turn in range(repeats + 1):
            whole: dict[str, Callable[[], float]] = {
                LOAD: lambda: mapped.load(count),
                SAVE: mapped.save,
                FETCH: lambda: fetched.load(count),
                BOTH: lambda: mapped.both(count),
            }
            seconds = {kind: each() for kind, each in whole.items()}
            inner = {
                LOAD: copies.within(lambda: alone[0].load(count)),
                SAVE: copies.within(alone[0].save),
            }
            fetched_in = timed(fetch)
            at_once = _at_once(chosen, lambda place: load(alone[place]))
            if turn:  # the first touches what no later one has to
                for kind in KINDS:
                    took[kind].append(seconds[kind])
                for kind, each in inner.items():
                    apart[kind].append(each)
                fetches.append(fetched_in)
                together.append(at_once)
    (load_s, load_copies), (save_s, save_copies) = (min(apart[kind]) for kind in (LOAD, SAVE))
    loaded, saved = BYTES / load_copies, BYTES / save_copies
    constants = Constants(
        load=loaded,
        save=saved,
        fetch=BYTES / min(fetches),
        bandwidth=max(loaded, saved, len(chosen) * BYTES / min(together)),
        load_piece=(load_s - load_copies) / len(_pieces(BYTES, 2)),
        save_piece=(save_s - save_copies) / len(_pieces(BYTES, 1)),
        part=part,
        wake=wake,
        late=late,
    )
    return constants, {kind: min(each) for kind, each in took.items()}


def _at_once(cores: Sequence[int], work: Callable[[int], None]) -> float:
    """Seconds from the first begin to the last end of threads, one on each core, that do their work
    at once."""
    gate = threading.Barrier(len(cores))
    times: list[float] = []

    def one(place: int) -> None:
        os.sched_setaffinity(0, {cores[place]})
        gate.wait()
        times.append(time.perf_counter())
        work(place)
        times.append(time.perf_counter())

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(times) - min(times)


class TimedCopy:
    """The copy of machine code, with the seconds that it takes.

    Attributes:
        seconds: of all calls since it was set to 0.
    """

    def __init__(self) -> None:
        copy = native_copy()
        if copy is None:
            raise SystemExit("machine code cannot be used here: there is nothing to be modelled")
        self._copy = copy
        self.seconds = 0.0

    def copying(self, *places: Any, **settings: Any) -> Callable[[slice], None]:
        """As `NativeCopy.copying`."""
        run = self._copy.copying(*places, **settings)

        def copy(slots: slice) -> None:
            self.seconds += timed(lambda: run(slots))

        return copy

    def within(self, work: Callable[[], float]) -> tuple[float, float]:
        """Seconds of some work, and of the copies in it, on one thread."""
        self.seconds = 0.0
        with patch.object(host, "native_copy", lambda: self):
            took = work()
        return took, self.seconds


def _hand_over(repeats: int) -> tuple[float, float, float]:
    """Seconds to take a part of a piece; to wake one more thread; and until the first begins."""
    usleep = ctypes.CDLL(None).usleep  # without the GIL, and without a core

    def shared(threads: int, items: int, microseconds: int) -> float:
        helpers = Helpers()
        helpers.threads = threads
        try:
            times = [
                timed(lambda: helpers.share(lambda _: usleep(microseconds), range(items)))
                for _ in range(10 + 2 * repeats)
            ]
        finally:
            helpers.close(5.0)
        return median(times[10:])

    part = (shared(1, 101, 0) - shared(1, 1, 0)) / 100 - timed(lambda: usleep(0))
    one, two, four = (shared(threads, threads - 1, 2000) for threads in (2, 3, 5))
    wake = max(0.0, (four - two) / 2)
    return max(part, 0.0), wake, max(0.0, two - one - wake)


def default_threads(cores: int) -> int:
    """`copy_threads` where the configuration does not say, and the engine computes on one core."""
    return max(1, min(MOST_THREADS, cores - 1))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, whose first column is text."""
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def speeds(constants: Constants, threads_of: Callable[[int], int]) -> dict[str, list[float]]:
    """GB/s in the model, by kind, for each of `CORES`."""
    return {
        kind: [modelled(kind, n, constants, threads_of(n)) / 1e9 for n in CORES] for kind in KINDS
    }


def plot(panels: dict[str, dict[str, list[float]]], path: Path) -> None:
    """GB/s over cores, a panel for each assumption."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.8), layout="constrained", sharey=True
    )
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        for kind, each in found.items():
            axis.plot(CORES, each, marker="o", label=kind)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(CORES, [str(n) for n in CORES])
        axis.set_xlabel("cores")
        axis.set_title(title, fontsize=9)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("GB/s of KV")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, model, and write the tables and the plot."""
    if sys.argv[1:2] == ["--real"]:
        constants, took = real(*map(int, sys.argv[2:]))
        print(json.dumps((asdict(constants), took)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--bandwidth", type=float, default=SERVER, help="GB/s of copies of a larger machine"
    )
    arguments = parser.parse_args()
    repeats = 10 if arguments.quick else 60
    command = " ".join(["python benchmarks/parallel_copies.py", *sys.argv[1:]])
    own = len(os.sched_getaffinity(0))
    compared = []
    for cores in sorted({1, own}):
        for copy_threads in (1, 2):
            constants, took = run_on(cores, copy_threads, repeats)
            row = [f"{cores} cores, `copy_threads` {copy_threads}".replace("1 cores", "1 core")]
            for kind in KINDS:
                found = BYTES * (2 if kind == BOTH else 1) / took[kind] / 1e9
                model = modelled(kind, cores, constants, copy_threads) / 1e9
                row.append(f"{found:.1f} ({model:.1f}, {model / found:.2f})")
            compared.append(row)
            print(row, flush=True)
    server = replace(constants, bandwidth=arguments.bandwidth * 1e9)
    endless = replace(constants, bandwidth=math.inf)
    panels = {
        "this machine's bandwidth, default threads": speeds(constants, default_threads),
        f"{arguments.bandwidth:g} GB/s, default threads": speeds(server, default_threads),
        f"{arguments.bandwidth:g} GB/s, a thread a core": speeds(server, lambda n: n),
        "no bound, a thread a core": speeds(endless, lambda n: n),
    }
    lines = [
        "# Copies of one engine on more cores",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"Loads from a mapped arena, saves, and loads of slots that are fetched, {BYTES >> 20} MiB "
        f"each in blocks of {SLOT_BYTES >> 20} MiB, with checksums. In *{BOTH}* both are waited "
        "for.",
        "",
        "## Constants",
        "",
        "Measured here in turns with whole copies, the best of all rounds, on all cores; each row "
        "of the next table has constants of its own:",
        "",
        *table(("constant", "value"), _constants(constants)),
        "## The model beside this machine",
        "",
        "GB/s of KV found here, the best of all rounds; in brackets the model's, and their ratio.",
        "The model knows no other programs. Where these use the cores (see the load average), "
        "copies of several threads are slower than in the model.",
        "",
        *table(("", *KINDS), compared),
        "## The model",
        "",
        "GB/s of KV, and in brackets times that of one core. The bandwidth is that of copies: a "
        "copy reads and writes each byte.",
        "",
    ]
    for title, by_kind in panels.items():
        rows = [
            [kind, *(f"{each:.1f} ({each / speed[0]:.1f})" for each in speed)]
            for kind, speed in by_kind.items()
        ]
        lines += [f"### {title[0].upper()}{title[1:]}", ""]
        lines += table(("", *(f"{n} cores" if n > 1 else "1 core" for n in CORES)), rows)
    lines += ["![GB/s over cores](parallel_copies.png)", ""]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "parallel_copies.md").write_text("\n".join(lines))
    plot(panels, arguments.output / "parallel_copies.png")
    return 0


def _constants(constants: Constants) -> list[list[str]]:
    rates = {
        "load, one core": constants.load,
        "save, one core": constants.save,
        "fetch (a copy without checksum), one core": constants.fetch,
        "loads on all cores at once": constants.bandwidth,
    }
    times = {
        "Python for a piece of a load (8 MiB)": constants.load_piece,
        "Python for a piece of a save (8 MiB)": constants.save_piece,
        "to take a part of a piece": constants.part,
        "to hand parts to one more thread": constants.wake,
        "until such a thread begins": constants.late,
    }
    return [
        *([name, f"{each / 1e9:.1f} GB/s"] for name, each in rates.items()),
        *([name, f"{each * 1e6:.0f} µs"] for name, each in times.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
