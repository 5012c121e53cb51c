# SPDX-License-Identifier: Apache-2.0
"""A forward pass of matrix products that writes KV layer by layer, with copies beside it."""

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from omni_connector.copy.layered import Forward
from on_gpu.accelerator import Accelerator, Report, Sizes
from on_gpu.rank import LAYOUTS, DeviceRank

_LOOKS_S: Final = 0.0002
"""Seconds between two looks at what has ended."""

_WAITED_S: Final = 10.0
"""Longest wait for a pass and its copies."""

_CACHES: Final = 4
"""Bytes of the KV cache, in copies."""

_SEEN: Final = 16
"""Of so many slots that were saved, one is compared."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What goes on beside a pass.

    Attributes:
        saves: "" for nothing, "after" for a save of the whole pass, "layers" for one that follows
            its layers.
        loads: whether a load begins with the pass.
    """

    name: str
    saves: str = ""
    loads: bool = False


MODES: Final = (
    Mode("nothing"),
    Mode("a save after it", "after"),
    Mode("a save by layers", "layers"),
    Mode("a load", loads=True),
    Mode("a save after it, and a load", "after", loads=True),
    Mode("a save by layers, and a load", "layers", loads=True),
)


@dataclass
class Found:
    """Of one mode, a value for each pass."""

    launched: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)


class Pass:
    """Launches a pass.

    Args:
        side: of the square matrices.
        layer_s: seconds of a layer, about.
    """

    def __init__(self, device: Accelerator, rank: DeviceRank, side: int, layer_s: float) -> None:
        self._rank = rank
        wide = torch.float32 if device.device == "cpu" else torch.bfloat16
        self._matrices = [
            torch.randn((side, side), dtype=wide, device=device.device) / side for _ in range(2)
        ]
        self._result = torch.empty_like(self._matrices[0])
        self._blocks = torch.from_numpy(rank.saved).to(device.device)
        self._products = 1
        seconds = []
        for _ in range(4):
            device.synchronize()
            began = time.perf_counter()
            self._product()
            device.synchronize()
            seconds.append(time.perf_counter() - began)
        self._products = max(1, min(1000, round(layer_s / min(seconds))))

    def launch(self, value: int, forward: Forward | None, told: Callable[[], object]) -> None:
        """Launch all layers, which write `value` to the blocks; `told` is called after each."""
        copier = self._rank.rank.copier
        for layer, view in self._rank.views.items():
            for _ in range(self._products):
                self._product()
            view.index_fill_(0, self._blocks, value)
            if forward is not None:
                forward.computed(layer, copier.fence())
                told()

    def _product(self) -> None:
        torch.mm(*self._matrices, out=self._result)


def measure(device: Accelerator, sizes: Sizes, report: Report) -> None:
    """All modes in turns, in both layouts."""
    for layout in LAYOUTS:
        with ExitStack() as stack:
            rank = DeviceRank(
                *(device, stack),
                layers=sizes.layers[0],
                layout=layout,
                page=sizes.page,
                cache=_CACHES * sizes.moved,
                moved=sizes.moved,
            )
            rank.rank.load(rank.count)
            taken = {"own": rank.pinned, "other": rank.pin_other()}
            passes = Pass(device, rank, sizes.side, sizes.layer_s)
            found = {mode.name: Found() for mode in MODES}
            value = 0
            alone: list[float] = []
            for turn in range(sizes.repeats + 1):
                seconds = rank.rank.load(rank.count)
                for place in range(len(MODES)):
                    mode = MODES[(turn + place) % len(MODES)]
                    value = value % 100 + 1
                    _one(device, rank, passes, mode, value, found[mode.name] if turn else Found())
                if turn:
                    alone.append(seconds)
            base = statistics.median(found["nothing"].took)
            about = {"layout": layout, "arenas_pinned": taken}
            report("a load without a pass", **about, ms=_ms(alone))
            for name, each in found.items():
                report("pass", layout=layout, beside=name, **_row(each, base))
        del rank, passes


def _row(found: Found, base: float) -> dict[str, Any]:
    return {
        "pass_ms": _ms(found.took),
        "slowdown": round(statistics.median(found.took) / base - 1, 4),
        "launched_after_ms": _ms(found.launched),
        "save_ends_after_it_ms": _ms(found.saved),
        "load_ms": _ms(found.loaded),
        "saved_early": round(statistics.median(found.early), 3) if found.early else "",
        "cpu_ms_of_our_threads": _ms(found.cores),
    }


def _ms(seconds: list[float]) -> Any:
    """The median in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 3) if seconds else ""


def _one(
    device: Accelerator, rank: DeviceRank, passes: Pass, mode: Mode, value: int, found: Found
) -> None:
    """One pass, until it and all beside it have ended."""
    jobs = rank.rank
    device.synchronize()
    cores = _core_seconds()
    began = time.perf_counter()
    forward = Forward() if mode.saves else None
    if mode.loads:
        jobs.start_load(rank.count)
    started = False

    def told() -> None:
        nonlocal started
        if mode.saves == "layers" and started:
            jobs.follow()
        elif mode.saves == "layers":
            jobs.start_save(background=False, fence=forward)
            started = True

    passes.launch(value, forward, told)
    if forward is not None:
        fence = jobs.copier.fence()
        forward.end(fence)
        if mode.saves == "layers":
            jobs.follow()
        else:
            jobs.start_save(background=False, fence=fence)
    reached = device.mark()
    found.launched.append(time.perf_counter() - began)
    ends: dict[str, float] = {}
    wanted = {"pass", *(["save"] if mode.saves else []), *(["load"] if mode.loads else [])}
    while set(ends) != wanted:
        now = time.perf_counter()
        if "pass" not in ends and reached():
            ends["pass"] = now - began
        for outcome in jobs.ended():
            if outcome.failure is not None:
                raise RuntimeError(f"a copy failed: {outcome.failure}")
            ends["load" if outcome.job_id == 1 else "save"] = now - began
            if outcome.job_id != 1:
                found.early.append(outcome.early / rank.moved)
        if now - began > _WAITED_S:
            raise RuntimeError(f"not ended in {_WAITED_S:g} s: {sorted(wanted - set(ends))}")
        time.sleep(_LOOKS_S)
    found.took.append(ends["pass"])
    if mode.saves:
        found.saved.append(ends["save"] - ends["pass"])
        some = jobs.own.slots[: rank.count : _SEEN, : rank.block_bytes]
        if not (some == value).all():
            raise RuntimeError("a save has other bytes than its pass has written")
    if mode.loads:
        found.loaded.append(ends["load"])
    found.cores.append(_core_seconds() - cores)


def _core_seconds() -> float:
    """What the connector's threads have used of the cores."""
    clocks = [
        time.pthread_getcpuclockid(each.ident)
        for each in threading.enumerate()
        if each.name.startswith("omni-") and each.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))
