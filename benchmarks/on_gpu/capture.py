# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs are captured, and kernels launched, while a thread of the connector pins an arena."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.copy.copier import BlockCopier
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from on_gpu.accelerator import GIB, MIB, Accelerator, Report, Sizes, counted, pin, spread

_OPERATIONS: Final = 200
"""Of each graph."""

_AGAIN_S: Final = 0.05
"""Seconds after which an arena is tried again of which pieces were refused."""

_STARTED_S: Final = 10.0
"""Longest wait for a thread's first piece, and for its end."""

_MOST_ERRORS: Final = 5
"""Captures that fail before the others are left out."""

_POPULATED_S: Final = 20.0
"""Longest wait for an arena's memory, before the rest of it is written to."""

_PIECES: Final = (64 * MIB, GIB)


class Pinning:
    """Pins an arena piece by piece on a thread of its own, lets go of it, and begins anew, until
    it is ended.

    Args:
        copier: pins.
        slots: of the arena.
        count: slots of a piece.

    Attributes:
        taken: pieces, by what the device said.
    """

    def __init__(self, copier: BlockCopier, slots: NDArray[np.uint8], count: int) -> None:
        self.taken: Counter[str] = Counter()
        self._copier = copier
        self._pieces = [slots[at : at + count] for at in range(0, len(slots), count)]
        self._end = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-pin", daemon=True)

    def __enter__(self) -> "Pinning":
        self._thread.start()
        self._begun.wait(_STARTED_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(_STARTED_S)

    def _run(self) -> None:
        while not self._end.is_set():
            _, taken = pin_all(self._copier, self._pieces, self._end.is_set, self._begun.set)
            self.taken += taken
            if taken["refused"]:
                self._end.wait(_AGAIN_S)


def pin_all(
    copier: BlockCopier,
    pieces: list[NDArray[np.uint8]],
    ended: Callable[[], bool] = lambda: False,
    begun: Callable[[], object] = lambda: None,
) -> tuple[float, Counter[str]]:
    """Pin pieces until `ended`, and let go of them: the seconds of the pinning, and how many pieces
    were taken."""
    taken: Counter[str] = Counter()
    held = []
    began = time.perf_counter()
    for piece in pieces:
        if ended():
            break
        took = pin(copier, piece)
        begun()
        taken["taken" if took else "refused"] += 1
        if took:
            held.append(piece)
    seconds = time.perf_counter() - began
    for piece in held:
        copier.unpin(piece)
    return seconds, taken


def measure(device: Accelerator, sizes: Sizes, report: Report) -> None:
    """First each alone, then captures and launches beside the pinning."""
    with ExitStack() as stack:
        slot = min(4 * MIB, sizes.arena // 4)
        before = device.free()
        arena = stack.enter_context(_populated(slot, sizes, report))
        work = _work(device)
        report("captures", beside="nothing", **_captures(device, work, sizes.graphs))
        report("launches", beside="nothing", **_launches(device, sizes.launches))
        for size in _PIECES:
            copier = _copier(device, slot)  # anew, as one that was refused may ask for nothing more
            stack.callback(copier.close)
            count = max(1, min(size // slot, len(arena.slots) // 2))
            pieces = [arena.slots[at : at + count] for at in range(0, len(arena.slots), count)]
            free = device.free()
            seconds, taken = pin_all(copier, pieces)
            report(
                "pinning",
                piece_mib=count * slot / MIB,
                pieces=counted(taken),
                ms_a_gib=round(seconds * 1e3 / (arena.slots.nbytes / GIB), 2),
                device_mib_taken=round((free - device.free()) / MIB, 1),
            )
            beside = f"pinning of {count * slot / MIB:g} MiB"
            both: list[tuple[str, Callable[[], Mapping[str, object]]]] = [
                ("launches", partial(_launches, device, sizes.launches)),
                ("captures", partial(_captures, device, work, sizes.graphs)),
            ]
            for step, figures in both:
                with Pinning(copier, arena.slots, count) as pinning:
                    found = figures()
                report(step, beside=beside, **found, pieces=counted(pinning.taken))
        device.synchronize()
        report("memory", free_mib_less=round((before - device.free()) / MIB, 1))


def _copier(device: Accelerator, slot: int) -> BlockCopier:
    """The copier of a KV cache of a few blocks with slots of that size."""
    cache = torch.zeros((4, 1, 1, slot), dtype=torch.int8, device=device.device)
    group = GroupSpec("full_attention", 1, (LayerSpec("layer", slot, slot),))
    canonical = canonicalize([group], {"layer": cache}, 4)
    return device.copier(canonical, SlotLayout.of(canonical))


def _populated(slot: int, sizes: Sizes, report: Report) -> Arena:
    """An arena all of whose memory is there, as the connector populates it."""
    there = 0

    def populated(slots: NDArray[np.uint8], end: int) -> None:
        nonlocal there
        there = end

    began = time.perf_counter()
    arena = Arena.create(sizes.arena // slot, slot, prefault=True, populated=populated)
    while there < arena.n_slots and time.perf_counter() - began < _POPULATED_S:
        time.sleep(0.01)
    by_itself = there
    arena.slots[there:] = 1
    seconds = round(time.perf_counter() - began, 2)
    report("arena", gib=sizes.arena / GIB, populated_s=seconds, slots_by_itself=by_itself)
    return arena


def _work(device: Accelerator) -> Callable[[], object]:
    """What is captured and launched."""
    values = torch.ones(1 << 16, device=device.device)

    def work() -> None:
        for _ in range(_OPERATIONS):
            values.mul_(1.0)

    work()
    device.synchronize()
    return work


def _captures(device: Accelerator, work: Callable[[], object], count: int) -> dict[str, object]:
    errors: Counter[str] = Counter()
    seconds: list[float] = []
    replay = None
    for _ in range(count):
        began = time.perf_counter()
        try:
            replay = device.capture(work)
        except RuntimeError as error:
            errors[str(error).partition("\n")[0][:120]] += 1
            if errors.total() == _MOST_ERRORS:
                break
        seconds.append(time.perf_counter() - began)
    if replay is not None:
        replay()
    device.synchronize()
    return {"captures": len(seconds), "errors": counted(errors), **spread(seconds)}


def _launches(device: Accelerator, count: int) -> dict[str, float]:
    """How long the host takes for one launch, of many that the device keeps up with."""
    values = torch.ones(256, device=device.device)
    seconds = []
    for number in range(count):
        if number % 256 == 0:
            device.synchronize()
        began = time.perf_counter()
        values.mul_(1.0)
        seconds.append(time.perf_counter() - began)
    device.synchronize()
    return spread(seconds)
