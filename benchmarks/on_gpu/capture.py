# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs are captured, and kernels launched, while the connector pins an arena, which it does
only after the capture in an engine."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.pinning import Pinning
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.runtime.turns import TurnThread
from on_gpu.accelerator import GIB, MIB, Accelerator, Report, Sizes, counted, spread

_OPERATIONS: Final = 200
"""Of each graph."""

_LOOKS_S: Final = 0.0005
"""Seconds between two looks whether an arena is pinned."""

_PINNED_S: Final = 10.0
"""Longest wait for that."""

_MOST_ERRORS: Final = 5
"""Captures that fail before the others are left out."""

_POPULATED_S: Final = 20.0
"""Longest wait for an arena's memory, before the rest of it is written to."""

_PIECES: Final = (64 * MIB, GIB)


class Asked:
    """The copier as `Pinning` uses it, with pieces of another size.

    Attributes:
        said: what the device has said, by CUDA's code; 0 for pieces that it has taken.
    """

    def __init__(self, copier: BlockCopier, piece: int) -> None:
        self.pinned_at_once = piece
        self.said: Counter[int] = Counter()
        self.unpin = copier.unpin
        self._copier = copier

    def pin(self, slots: NDArray[np.uint8]) -> int:
        """See `BlockCopier.pin`."""
        code = self._copier.pin(slots)
        self.said[code] += 1
        return code

    def pin_all(self, slots: NDArray[np.uint8], ended: threading.Event) -> float:
        """Have the connector pin an arena, until each piece was asked for, and let go of it; the
        seconds of the pinning."""
        lock = threading.Lock
        pinning = Pinning(cast(BlockCopier, self), time.monotonic, TurnThread, lock)
        pieces = self.said.total() + -(-slots.nbytes // self.pinned_at_once)
        began = time.perf_counter()
        pinning.follow(slots).populated(len(slots))
        pinning.begin()
        while self.said.total() < pieces and time.perf_counter() < began + _PINNED_S:
            if ended.wait(_LOOKS_S):
                break
        seconds = time.perf_counter() - began
        pinning.close()
        return seconds


@contextmanager
def _beside(asked: Asked, slots: NDArray[np.uint8]) -> Iterator[None]:
    """Have an arena pinned and let go of, again and again."""
    end = threading.Event()

    def go_on() -> None:
        while not end.is_set():
            asked.pin_all(slots, end)

    with ThreadPoolExecutor(1) as thread:
        pinned = thread.submit(go_on)
        began = time.perf_counter()
        while not asked.said and time.perf_counter() < began + _PINNED_S:
            time.sleep(_LOOKS_S)
        try:
            yield
        finally:
            end.set()
        pinned.result()


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
            copier = _copier(device, slot)
            stack.callback(copier.close)
            count = max(1, min(size // slot, len(arena.slots) // 2))
            asked = Asked(copier, count * slot)
            free = device.free()
            seconds = asked.pin_all(arena.slots, threading.Event())
            report(
                "pinning",
                piece_mib=count * slot / MIB,
                codes=counted(asked.said),
                ms_a_gib=round(seconds * 1e3 / (arena.slots.nbytes / GIB), 2),
                device_mib_taken=round((free - device.free()) / MIB, 1),
            )
            beside = f"pinning of {count * slot / MIB:g} MiB"
            both: list[tuple[str, Callable[[], Mapping[str, object]]]] = [
                ("launches", partial(_launches, device, sizes.launches)),
                ("captures", partial(_captures, device, work, sizes.graphs)),
            ]
            for step, figures in both:
                asked.said.clear()
                with _beside(asked, arena.slots):
                    found = figures()
                report(step, beside=beside, **found, codes=counted(asked.said))
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
