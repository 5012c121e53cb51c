# SPDX-License-Identifier: Apache-2.0
"""Scattered pages: one call of the driver for all of them, one kernel, and the product's kernel."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from device import Device
from numpy.typing import NDArray

from omni_connector.copy.stream import Stream
from on_gpu.accelerator import KIB, Accelerator, Report, Sizes, gb_s

_MOST_PAGES: Final = 32_768
"""Of one copy. The driver takes about a microsecond for each."""

_PROGRAMS: Final = (12, 32, 132)
"""Of the kernel. vLLM's has 12; the last is one for each core of an H100."""


def measure(device: Accelerator, sizes: Sizes, report: Report) -> None:
    """Each way at each page size, both ways."""
    for page in sizes.pages:
        count = max(2, min(_MOST_PAGES, sizes.moved // 2 // page))
        moved = count * page
        there = torch.zeros(2 * moved, dtype=torch.int8, device=device.device)
        here = device.host(2 * moved)
        plain = Device(device.device, moved)
        draw = np.random.default_rng(page)
        places = draw.permutation(2 * count)[:count], draw.permutation(2 * count)[:count]
        stream = device.stream()
        try:
            for to_host in (True, False):
                pages = Pages(device, stream, (there, here), places, page, to_host)
                for name, work, packed in pages.ways():
                    try:
                        row = _one(plain, pages, work, packed, sizes.repeats)
                    except Exception as error:  # noqa: BLE001 - the other ways are measured
                        row = {"failure": f"{type(error).__name__}: {error}"[:200]}
                    about = {"page_kib": page // KIB, "pages": count, "to_host": to_host}
                    report("rate", **about, way=name, **row)
        finally:
            stream.close()


class Pages:
    """Scattered pages of two memories.

    Args:
        there, here: the device's memory and the host's.
        places: which pages of each are copied `(n,)`, in order.
        page: bytes of each.
        to_host: which way.

    Attributes:
        packed: the device's pages one after the other, as the product's kernel has them.
    """

    def __init__(
        self,
        device: Accelerator,
        stream: Stream,
        memories: tuple[torch.Tensor, torch.Tensor],
        places: tuple[NDArray[np.int64], NDArray[np.int64]],
        page: int,
        to_host: bool,
    ) -> None:
        self._device = device
        self._stream = stream
        self.page = page
        self.to_host = to_host
        order = slice(None) if to_host else slice(None, None, -1)
        # The source, and then the target.
        self._memories = memories[order]
        self._places = places[order]
        self._addresses = [
            (each.data_ptr() + at * page).astype(np.uint64)
            for each, at in zip(self._memories, self._places, strict=True)
        ]
        self._tables = [
            torch.from_numpy(each.view(np.int64)).to(device.device) for each in self._addresses
        ]
        self.packed = torch.zeros((len(places[0]), page), dtype=torch.int8, device=device.device)

    def ways(self) -> list[tuple[str, Callable[[], object], bool]]:
        """Each way, with its name, and whether it has the device's pages packed."""
        sources, targets = self._addresses
        on_sources, on_targets = self._tables
        batch, kernel = self._device.copy_batch, self._device.copy_pages
        stream_order = partial(batch, targets, sources, self.page, any_order=False)
        any_order = partial(batch, targets, sources, self.page, any_order=True)
        return [
            ("cuMemcpyBatchAsync, stream order", stream_order, False),
            ("cuMemcpyBatchAsync, any order", any_order, False),
            *(
                (
                    f"kernel of {programs} programs",
                    partial(kernel, on_targets, on_sources, self.page, programs),
                    False,
                )
                for programs in _PROGRAMS
            ),
            ("the product's kernel, packed on the device", self._move, True),
        ]

    def _move(self) -> None:
        if not self._stream.can_move(self.page):
            raise RuntimeError("it does not move such rows")
        host = self._tables[1 if self.to_host else 0]
        with self._stream.active():
            self._stream.move(self.packed, host, to_host=self.to_host)
        self._stream.finish(None)

    def begin(self) -> None:
        """Random bytes in the source, and zeros in the target."""
        source, target = self._memories
        draw = torch.randint(-128, 128, (1 << 20,), dtype=torch.int8)
        for part in source.split(len(draw)):
            part.copy_(draw[: len(part)])
            draw = draw.roll(1)
        target.zero_()
        self.packed.zero_()
        if self.to_host:
            self.packed.copy_(self.pages(0))

    def pages(self, end: int) -> torch.Tensor:
        """The pages of the source (0) or the target (1), one after the other."""
        memory = self._memories[end]
        at = torch.from_numpy(self._places[end]).to(memory.device)
        return memory.view(-1, self.page)[at]


def _one(
    plain: Device, pages: Pages, work: Callable[[], object], packed: bool, repeats: int
) -> dict[str, Any]:
    """Measure one way, and see that each byte arrives."""
    pages.begin()
    times = [plain.beside(work, saving=pages.to_host) for _ in range(repeats + 1)][1:]
    found = pages.packed if packed and not pages.to_host else pages.pages(1)
    if not found.cpu().equal(pages.pages(0).cpu()):
        raise RuntimeError("other bytes arrived")
    took = statistics.median(each for _, each in times)
    ratio = statistics.median(copy / each for copy, each in times)
    return {"gb_s": gb_s(found.numel(), took), "of_a_plain_copy": round(ratio, 3)}
