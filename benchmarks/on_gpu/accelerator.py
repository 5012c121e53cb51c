# SPDX-License-Identifier: Apache-2.0
"""What the parts need of a device, and how much they do with it."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.stream import Stream
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.runtime.shared_work import Helpers

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30


class Report(Protocol):
    """Adds a line to the results, at once."""

    def __call__(self, step: str, **fields: Any) -> None: ...


class Accelerator(Protocol):
    """A device. The product's own copier, streams and pinning are used through it.

    Attributes:
        name: for people.
        device: for torch.
    """

    name: str
    device: str

    def free(self) -> int:
        """Bytes of its memory that nothing uses."""

    def synchronize(self) -> None:
        """Wait until all of its work is done."""

    def mark(self) -> Callable[[], bool]:
        """Mark the current stream's work so far; whether it is done, which does not wait."""

    def copier(
        self, canonical: CanonicalKVCaches, layout: SlotLayout, helpers: Helpers | None = None
    ) -> BlockCopier:
        """The product's copier for a KV cache on this device."""

    def stream(self) -> Stream:
        """One of the product's streams."""

    def host(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of the host, int8."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Capture a graph of some work, as vLLM does; what launches it.

        Raises:
            RuntimeError: the capture has failed.
        """

    def copy_batch(
        self,
        targets: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        nbytes: int,
        *,
        any_order: bool,
    ) -> None:
        """Put copies of so many bytes each, by address, on a side stream, by one call.

        Raises:
            RuntimeError: the driver has no such call, or it has failed.
        """

    def copy_pages(
        self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, programs: int
    ) -> None:
        """The same by one kernel of so many programs, on the current stream, with the addresses in
        the device's memory, int64."""

    def shareable(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """Memory of the device, int8, that lives as long as this process, and a descriptor of it.

        Raises:
            RuntimeError: the device cannot share memory so.
        """

    def attach(self, descriptor: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Another process's `shareable` memory, and what lets go of it.

        Raises:
            RuntimeError: it cannot be had.
        """


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done.

    Attributes:
        arena: bytes of the arena that is pinned beside captures.
        graphs: that are captured.
        launches: that are timed.
        cache: bytes of a KV cache, as far as the device has them.
        moved: bytes of one copy.
        page: bytes of a block of one layer.
        layers: of the models.
        pages: bytes of scattered pages.
        side: of the square matrices of a forward pass.
        layer_s: seconds that a layer of that pass takes.
        shared: bytes of the device that another process reads.
        repeats: of each figure; one more goes before.
    """

    arena: int = 16 * GIB
    graphs: int = 200
    launches: int = 4000
    cache: int = 40 * GIB
    moved: int = 1 * GIB
    page: int = 64 * KIB
    layers: tuple[int, ...] = (32, 80)
    pages: tuple[int, ...] = (2 * MIB, 64 * KIB, 16 * KIB, 4 * KIB)
    side: int = 8192
    layer_s: float = 0.003
    shared: int = 1 * GIB
    repeats: int = 7


WHOLE: Final = Sizes()
QUICK: Final = Sizes(
    arena=16 * MIB,
    graphs=4,
    launches=20,
    cache=8 * MIB,
    moved=256 * KIB,
    page=4 * KIB,
    layers=(4, 6),
    pages=(16 * KIB, 4 * KIB),
    side=64,
    layer_s=0.0001,
    shared=1 * MIB,
    repeats=1,
)


def pin(copier: BlockCopier, slots: NDArray[np.uint8]) -> bool:
    """Have the product pin slots; whether the device has taken them."""
    return copier.pin(slots) == 0


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the longest, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    figures = {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max_ms": ordered[-1],
    }
    return {name: round(each * 1e3, 4) for name, each in figures.items()}


def counted(found: Counter[Any]) -> dict[str, int]:
    """Counts, the most frequent first."""
    return {str(name): count for name, count in found.most_common()}


def gb_s(nbytes: int, seconds: float) -> float:
    """A rate in GB/s."""
    return round(nbytes / seconds / 1e9, 2)
