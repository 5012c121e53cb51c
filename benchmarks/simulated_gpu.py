# SPDX-License-Identifier: Apache-2.0
"""What the connector's copies take on a simulated GPU: its clock, the connector's own jobs.

All bytes are copied, by this host. How long that takes is reckoned: a launch takes the host's
thread a moment, and the device does its work in the order of each stream, one transfer at a time in
each direction, at the rates that `device.py` has measured on an H100. No GPU is used, so that
nothing of a real one is shown: not what copies cost the model, and no core's time.

    python benchmarks/simulated_gpu.py

writes results/simulated_gpu.md beside this file.
"""

import argparse
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from copying_rank import Rank
from machine import RESULTS
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.layered import Forward
from omni_connector.copy.pinning import Pinning
from omni_connector.copy.staged import StagedCopier
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.testing import FakeClock
from tests.kv.conftest import HostStream

BUS: Final = 55e9
"""Bytes a second of a plain copy, either way (results/device.md)."""

GATHER: Final = 267e9
"""Bytes a second of gathering and scattering: what copies of pages of 64 KiB without checksums took
beside the plain copy, at 0.83 of its speed (results/device.md)."""

HASH: Final = 300e9
"""Bytes a second of checksums. They took no time that shows beside copies of 64 KiB pages."""

LAUNCH_S: Final = 8e-6
WAKE_S: Final = 20e-6
"""Seconds of the host for a launch, and until a thread wakes that waits for the device."""

PIECE_S: Final = {"save": 115e-6, "load": 175e-6, "layer": 70e-6}
"""Seconds of the host, in which the device has nothing to do, from the end of one piece of a job to
the first launch of the next: the shortest of 140 and more, on the host of this page's last run."""

PIN_S: Final = 0.0025 / (64 << 20)
"""Seconds in which the driver registers a byte, while launches wait."""

STEP_S: Final = 0.01
STEP_LAUNCH_S: Final = 0.002
"""Seconds from one step to the next, and those of its launches."""

_SCALE: Final = 1024

LAYERS: Final = 32
PAGE_BYTES: Final = 64 << 10
LAYER_S: Final = 0.008
"""Seconds of the device for a layer of a long prompt, all of which are launched long before."""


class At(NamedTuple):
    """A fence that is reached at a moment, in seconds."""

    seconds: float


class Clock:
    """The times of a device and of the host's threads, in seconds since `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: nothing is under way."""
        self.hosts: dict[str, float] = {}  # by thread
        self._bus: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self.streams: list[TimedStream] = getattr(self, "streams", [])
        for stream in self.streams:
            stream.ends = 0.0, 0.0

    @property
    def now(self) -> float:
        """Of the calling thread."""
        return self.hosts.get(threading.current_thread().name, 0.0)

    def spend(self, seconds: float) -> None:
        """Have the calling thread work."""
        self.hosts[threading.current_thread().name] = self.now + seconds

    def wait(self, moment: float) -> None:
        """Have it wait until a moment."""
        if moment > self.now:
            self.hosts[threading.current_thread().name] = moment + WAKE_S

    def cross(self, ready: float, nbytes: int, *, to_host: bool) -> float:
        """Transfer bytes when the bus is free, from a moment on; when that is done."""
        seconds = nbytes / BUS
        taken = self._bus[to_host]
        for begins, ends in taken:
            if ready + seconds <= begins:
                break
            ready = max(ready, ends)
        taken.append((ready, ready + seconds))
        taken.sort()
        return ready + seconds


class TimedStream(HostStream):
    """A stream whose work is done at once, and takes its time on a clock.

    Attributes:
        ends: when its work is done, and the hashing beside it.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(pins=True, hashes=True, moves=True)
        self._clock = clock
        self.ends = 0.0, 0.0
        clock.streams.append(self)

    def beside(self) -> "TimedStream":
        return TimedStream(self._clock)

    def launch(
        self,
        work: Callable[[], object],
        *,
        host: torch.Tensor | None = None,
        lands: bool = False,
    ) -> None:
        work()
        if host is not None:
            self._cross(host.nbytes, to_host=lands)
            return
        assert isinstance(work, partial)
        moved = work.keywords.get("out", work.args[-1])
        ready, hashed = self._ready()
        nbytes = moved.nbytes if isinstance(moved, torch.Tensor) else 0  # else it only fills
        self.ends = ready + nbytes / GATHER, hashed

    def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        super().move(staged, rows, to_host=to_host)
        self._cross(staged.nbytes, to_host=to_host)

    def _cross(self, nbytes: int, *, to_host: bool) -> None:
        ready, hashed = self._ready()
        self.ends = self._clock.cross(ready, nbytes, to_host=to_host), hashed

    def _ready(self) -> tuple[float, float]:
        """When work can begin that is launched now."""
        self._clock.spend(LAUNCH_S)
        return max(self.ends[0], self._clock.now), self.ends[1]

    def fence(self) -> object:
        return At(self._clock.now)

    def reached(self, fence: object) -> bool:
        assert isinstance(fence, At)
        return fence.seconds <= self._clock.now

    def wait(self, fence: object) -> None:
        moment = fence.seconds if isinstance(fence, At) else max(cast(Any, fence))
        self.ends = max(self.ends[0], moment), self.ends[1]

    def mark(self) -> object:
        return self.ends

    def finish(self, mark: object | None) -> None:
        moments = self.ends if mark is None else mark
        assert isinstance(moments, tuple)
        self._clock.wait(max(moments))

    def hash(self, rows: torch.Tensor, *, there: object, **options: Any) -> None:
        assert isinstance(there, tuple)
        super().hash(rows, there=there, **options)
        self._clock.spend(LAUNCH_S)
        begins = max(self.ends[1], there[0], self._clock.now)
        self.ends = self.ends[0], begins + rows.nbytes / HASH


class TimedCopier(StagedCopier):
    """A copier each of whose copies takes the host its time, too."""

    def __init__(self, clock: Clock, canonical: CanonicalKVCaches, layout: SlotLayout) -> None:
        super().__init__(canonical, layout, TimedStream(clock))
        self._clock = clock

    def _copy(self, copy: BlockCopy, saving: bool, *told: Any) -> NDArray[np.uint64] | None:
        kind = "layer" if copy.states is not None else "save" if saving else "load"
        self._clock.spend(PIECE_S[kind])
        return super()._copy(copy, saving, *told)


class Pass(Forward):
    """A forward pass whose layers take so many seconds each, and were all launched at once. The
    save that follows it has begun before the last of these launches."""

    def __init__(self, layer_s: float) -> None:
        super().__init__()
        self._last = LAYERS * layer_s
        for number in range(LAYERS):
            self.computed(f"layer.{number}", At((number + 1) * layer_s))

    def fence_of(self, layers: frozenset[str]) -> object:
        fence = super().fence_of(layers)
        if fence == At(self._last):
            self.end(fence)
        return fence


AIMS: Final = {
    "a save, of one plain copy's speed": "0.9 or more",
    "a load, of one plain copy's speed": "0.9 or more",
    "a save layer by layer, of one plain copy's speed": "0.7 or more",
    "milliseconds from a forward pass's end to that of its save": "3 or less",
    "a load beside that save, of its speed alone": "0.9 or more",
}
"""The figures, and what they are to be."""


def figures(moved: int) -> list[float]:
    """Those of `AIMS`, of jobs of so many bytes."""
    clock = Clock()
    block = LAYERS * PAGE_BYTES
    count = moved // block
    plain = LAUNCH_S + count * block / BUS + WAKE_S
    with ExitStack() as stack:
        buffer = torch.ones(LAYERS * (1 + 2 * count) * PAGE_BYTES, dtype=torch.int8)
        pages = buffer.view(LAYERS, 1 + 2 * count, 1, 1, PAGE_BYTES)
        rank = Rank(
            *(count, count, stack),
            page_bytes=PAGE_BYTES,
            views={f"layer.{number}": page for number, page in enumerate(pages)},
            make=lambda canonical, layout, _: TimedCopier(clock, canonical, layout),
        )
        rank.copier.pin(rank.theirs.slots)

        def save(fence: object) -> float:
            clock.reset()
            rank.start_save(background=False, fence=fence)
            rank.end_save()
            return clock.hosts["omni-save"]

        def load() -> float:
            rank.load(count)
            return clock.hosts["omni-load"]

        saved = save(At(0.0))
        clock.reset()
        loaded = load()
        behind = save(Pass(LAYER_S)) - LAYERS * LAYER_S
        beside = load()  # the save that follows the pass is under way all the while
        # Each layer is there when the one before is copied: only then is anything followed.
        by_layer = save(Pass(count * PAGE_BYTES / BUS))
    return [plain / saved, plain / loaded, plain / by_layer, behind * 1e3, loaded / beside]


class _Pinned:
    """A copier whose device takes all memory, of which a byte stands for `_SCALE`."""

    pinned_at_once = StagedCopier.pinned_at_once // _SCALE

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def pin(self, slots: NDArray[np.uint8]) -> int:
        """See `BlockCopier.pin`."""
        self._clock.advance(slots.nbytes * _SCALE * PIN_S)
        return 0


def pinning(*, neighbour: bool) -> tuple[float, float, float]:
    """Milliseconds by which the pinning of 64 GiB beside steps delays launches, at most and in all,
    and the seconds that it takes.

    Args:
        neighbour: whether it is the arena of a neighbour, else the own one.
    """
    clock = FakeClock()
    turns: list[Callable[[], float]] = []

    def start(name: str, turn: Callable[[], float]) -> object:
        turns.append(turn)
        return SimpleNamespace(wake=lambda: None)

    copier = _Pinned(clock)
    pins = Pinning(cast(Any, copier), clock, cast(Any, start), threading.Lock)
    slots = np.zeros((4096, (64 << 30) // _SCALE // 4096), np.uint8)
    slots.flags.writeable = not neighbour
    pins.begin()
    pins.follow(slots).populated(len(slots))
    (turn,) = turns
    delays = []
    began = due = clock()
    while pins.bytes.pinned < slots.nbytes:
        delays.append(clock() - due)
        pins.step_begins()
        clock.advance(STEP_LAUNCH_S)
        pins.step_launched()
        due = max(due + STEP_S, clock())
        while clock() < due and turn() == 0:
            pass
        clock.advance(max(0.0, due - clock()))
    return max(delays) * 1e3, sum(delays) * 1e3, clock() - began


def main() -> int:
    """Reckon, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller jobs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    moved = (128 if arguments.quick else 1024) << 20
    rows = zip(AIMS, figures(moved), strict=True)
    pinned = [
        ("in pieces of 1 GiB at once, as the own one at the start", pinning(neighbour=False)),
        ("a neighbour's, in pieces of 128 MiB between steps", pinning(neighbour=True)),
    ]
    lines = [
        "# Copies on a simulated GPU",
        "",
        "`python benchmarks/simulated_gpu.py`. **No GPU was lent for this page.** The connector's",
        "jobs ran on a simulated device. Its clock reckons with:",
        "",
        f"- {BUS / 1e9:g} GB/s for a plain copy, each way, and {GATHER / 1e9:g} GB/s for gathering",
        "  and scattering: rates of [an H100](device.md);",
        f"- {HASH / 1e9:g} GB/s for checksums;",
        f"- {LAUNCH_S * 1e6:g} µs of the host for a launch, and {WAKE_S * 1e6:g} µs until a thread",
        "  wakes;",
        f"- {PIECE_S['save'] * 1e6:g} µs of Python between two pieces of a save, "
        f"{PIECE_S['load'] * 1e6:g} of a load,",
        f"  {PIECE_S['layer'] * 1e6:g} of layers: as long as a core of this page's host takes.",
        "",
        f"Jobs of {moved >> 20} MiB with checksums, in blocks of {LAYERS} layers of",
        f"{PAGE_BYTES >> 10} KiB. Each layer of the forward pass takes {LAYER_S * 1e3:g} ms.",
        "",
        "| | figure | to be |",
        "|---|---:|---|",
        *(f"| {name} | {each:.2f} | {AIMS[name]} |" for name, each in rows),
        "",
        "A job is copied in pieces of 256 MiB. A plain copy takes 4,880 µs for one. Its first",
        "staging buffer is gathered before the bus has work, 63 µs. With the host's time, two",
        "launches and one waking of the thread that makes 0.95 to 0.96. Blocks that need no",
        "staging could gain 1 %, pieces that begin before the one before has ended 4 %. Layers of",
        "32 MiB, 610 µs, are pieces of their own: of these it makes 0.78.",
        "",
        "## Arenas that are pinned while an engine serves",
        "",
        f"64 GiB, beside steps of {STEP_S * 1e3:g} ms, of which launches take",
        f"{STEP_LAUNCH_S * 1e3:g} ms. The driver takes 2.5 ms for 64 MiB. Launches wait for it.",
        "",
        "| | longest delay of a step, ms | all delays, ms | seconds in all |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {' | '.join(f'{each:.1f}' for each in row)} |" for name, row in pinned),
        "",
        "Not simulated: what copies cost the model, the time of cores, and how much later",
        "engines start.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if not arguments.quick:
        (arguments.output / "simulated_gpu.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
