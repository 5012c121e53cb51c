# SPDX-License-Identifier: Apache-2.0
"""KV caches in every layout, built the way an engine builds them."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from omni_connector.copy.copier import BlockCopier, BlockCopy, Landed
from omni_connector.copy.cuda import CudaStream
from omni_connector.copy.device_hash import hashable
from omni_connector.copy.host import CpuCopier
from omni_connector.copy.staged import StagedCopier
from omni_connector.copy.stream import RowPart, Stream
from omni_connector.kv.canonical import CanonicalKVCaches, GroupSpec, LayerSpec, SlotLayout
from omni_connector.kv.convert import PageRun
from tests.kv.digests import Digests

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PADDABLE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
SPLITTABLE = ("LBHNC", "LBNHC")

MakeCopier = Callable[[CanonicalKVCaches, SlotLayout, np.ndarray], BlockCopier]


@dataclass(frozen=True)
class Shape:
    """Layers of one shape; `content` counts elements of `dtype`."""

    layers: int
    heads: int
    tokens: int
    content: int
    dtype: torch.dtype = torch.int8
    padding: int = 0
    kernel_blocks: int = 1

    @property
    def page(self) -> int:
        return self.heads * self.tokens * self.content * self.dtype.itemsize


@dataclass(frozen=True)
class Cache:
    """One buffer and the views of it that an engine would register."""

    layout: str
    num_blocks: int
    buffer: torch.Tensor
    groups: tuple[GroupSpec, ...]
    views: dict[str, torch.Tensor]

    def clone(self) -> "Cache":
        buffer = self.buffer.clone()
        views = {
            name: buffer.view(view.dtype).as_strided(
                view.shape, view.stride(), view.storage_offset()
            )
            for name, view in self.views.items()
        }
        return Cache(self.layout, self.num_blocks, buffer, self.groups, views)

    def block(self, layer: str, block: int) -> torch.Tensor:
        """A block as `(kernel blocks, H, N, C)`, through the layer's own view."""
        view = self.views[layer]
        count = view.shape[0] // self.num_blocks
        return view[block * count : (block + 1) * count]

    def padding(self, layer: LayerSpec, block: int) -> torch.Tensor:
        """The bytes that the engine reserves behind a page of contiguous content."""
        page = self.block(layer.name, block)
        first = page.storage_offset() * page.element_size()
        return self.buffer[first + layer.page_bytes : first + layer.padded_page_bytes]

    def loaded(self, group: int, block: int, other: "Cache", other_block: int) -> None:
        """Put another cache's block in this one's, as a load must: padding becomes zeros."""
        for layer in self.groups[group].layers:
            self.block(layer.name, block)[...] = other.block(layer.name, other_block)
            self.padding(layer, block).zero_()

    def zeroed(self, group: int, block: int) -> None:
        """Zero a block and its padding, through the layers' own views."""
        for layer in self.groups[group].layers:
            self.block(layer.name, block).zero_()
            self.padding(layer, block).zero_()

    def slot(self, group: int, block: int) -> np.ndarray:
        """What a slot of this block must hold: its layers' pages, in their byte order."""
        pages = []
        seen = set()
        for layer in self.groups[group].layers:
            page = self.block(layer.name, block)
            if page.data_ptr() in seen:
                continue
            seen.add(page.data_ptr())
            if self.layout.index("N") < self.layout.index("H"):
                page = page.transpose(1, 2)
            pages.append(page.contiguous().view(torch.uint8).flatten().numpy())
        return np.concatenate(pages)


def build(
    layout: str,
    num_blocks: int,
    groups: list[list[Shape]],
    *,
    slack: int = 0,
    seed: int = 0,
    shared_layers: bool = False,
) -> Cache:
    """Overlay groups of layers on one buffer of random bytes.

    `slack` adds bytes to the blocks of a block-outermost layout. With `shared_layers` each
    group also names its first layer's cache a second time.
    """
    outermost = layout[0] == "B"
    pages = [sum(s.layers * (s.page + s.padding) for s in shapes) for shapes in groups]
    block_bytes = max(pages) + (slack if outermost else 0)
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(
        -128, 128, (block_bytes * num_blocks,), dtype=torch.int8, generator=generator
    )
    views: dict[str, torch.Tensor] = {}
    specs = []
    for g, shapes in enumerate(groups):
        offset = 0
        layers = []
        for s, shape in enumerate(shapes):
            sizes = {
                "L": shape.layers,
                "B": num_blocks,
                "H": shape.heads,
                "N": shape.tokens,
                "C": shape.content * shape.dtype.itemsize,
            }
            steps = {}
            step = 1
            padded = False
            for dim in reversed(layout):
                if dim in "LB" and not padded:
                    step += shape.padding
                    padded = True
                steps[dim] = block_bytes if outermost and dim == "B" else step
                step = steps[dim] * sizes[dim]
            for i in range(shape.layers):
                name = f"group{g}.shape{s}.layer{i}"
                views[name] = _view(buffer, offset + i * steps["L"], sizes, steps, shape)
                layers.append(LayerSpec(name, shape.page, shape.page + shape.padding))
            offset += shape.layers * (shape.page + shape.padding) * (1 if outermost else num_blocks)
        if shared_layers:
            target = layers[0]
            name = f"group{g}.shared"
            views[name] = views[target.name]
            layers.append(LayerSpec(name, target.page_bytes, target.padded_page_bytes))
        specs.append(GroupSpec("full_attention", 16, tuple(layers)))
    return Cache(layout, num_blocks, buffer, tuple(specs), views)


def _view(
    buffer: torch.Tensor, offset: int, sizes: dict[str, int], steps: dict[str, int], shape: Shape
) -> torch.Tensor:
    k = shape.kernel_blocks
    size = [sizes[dim] for dim in "BHNC"]
    stride = [steps[dim] for dim in "BHNC"]
    if k > 1:
        # A kernel block is a small block of its own: its heads lie closer together.
        size = [size[0] * k, size[1], size[2] // k, size[3]]
        stride[0] //= k
        if stride[1] > stride[2]:
            stride[1] //= k
    return buffer.as_strided(size, stride, offset).view(shape.dtype)


@st.composite
def caches(draw: st.DrawFn, layouts: tuple[str, ...] = LAYOUTS) -> tuple[Cache, Cache]:
    """Two caches with the same groups, of other sizes and, at times, of other layouts."""
    layout = draw(st.sampled_from(layouts))
    token_major = layout.index("N") < layout.index("H")
    alike = [x for x in layouts if (x.index("N") < x.index("H")) == token_major]
    other = draw(st.sampled_from(alike))
    paddable = layout in PADDABLE and other in PADDABLE
    splittable = layout in SPLITTABLE and other in SPLITTABLE
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        shapes = []
        for _ in range(draw(st.integers(1, 2))):
            kernel_blocks = draw(st.sampled_from((1, 2, 4))) if splittable else 1
            shapes.append(
                Shape(
                    layers=draw(st.integers(1, 4)),
                    heads=draw(st.integers(1, 3)),
                    tokens=kernel_blocks * draw(st.integers(1, 3)),
                    content=8 * draw(st.integers(1, 3)),
                    dtype=draw(st.sampled_from((torch.int8, torch.bfloat16, torch.float32))),
                    padding=8 * draw(st.integers(0, 2)) if paddable and kernel_blocks == 1 else 0,
                    kernel_blocks=kernel_blocks,
                )
            )
        groups.append(shapes)
    shared = draw(st.booleans())
    one, two = (
        build(
            name,
            draw(st.integers(1, 9)),
            groups,
            slack=8 * draw(st.integers(0, 2)),
            seed=draw(st.integers(0, 2**16)),
            shared_layers=shared,
        )
        for name in (layout, other)
    )
    return one, two


class HostStream(Stream):
    """A stream whose work is done as soon as it is asked for; it notes what it was asked."""

    def __init__(self, *, pins: bool = False, hashes: bool = False, moves: bool = False) -> None:
        self._pins = pins
        self._moves = moves
        self._hashes = hashes
        self._digests = Digests()
        self._marks = 0
        self.log: list[tuple[str, object]] = []

    def beside(self) -> "HostStream":
        return self

    def active(self) -> nullcontext[None]:
        return nullcontext()

    def fence(self) -> object:
        self.log.append(("fence", None))
        return "a fence"

    def reached(self, fence: object) -> bool:
        return True

    def wait(self, fence: object) -> None:
        self.log.append(("follow" if isinstance(fence, int) else "wait", fence))

    def mark(self) -> object:
        self._marks += 1
        self.log.append(("mark", self._marks))
        return self._marks

    def finish(self, mark: object | None) -> None:
        self.log.append(("finish", mark))

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8)

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8)

    def can_hash(self, nbytes: int) -> bool:
        return self._hashes and hashable(nbytes)

    def prepare_hash(self, nbytes: int) -> None:
        pass

    def hash(
        self,
        rows: torch.Tensor,
        *,
        there: object,
        sums: torch.Tensor,
        part: RowPart | None = None,
    ) -> None:
        self._digests.hash(rows, sums, part)

    def can_move(self, nbytes: int) -> bool:
        return self._moves and not nbytes % 16

    def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        self.log.append(("move", to_host))
        for row, address in zip(staged.numpy(), rows.tolist(), strict=True):
            assert address % 16 == 0
            there = (ctypes.c_int8 * len(row)).from_address(address)
            host = np.frombuffer(there, np.int8)
            np.copyto(*((host, row) if to_host else (row, host)))

    def pin(self, slots: np.ndarray) -> int:
        return 0 if self._pins else 801  # cudaErrorNotSupported

    def unpin(self, slots: np.ndarray) -> None:
        self.log.append(("unpin", slots.ctypes.data))

    def close(self) -> None:
        self.log.append(("close", None))


def cpu(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    return CpuCopier(canonical, layout)


def by_numpy(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    copier = CpuCopier(canonical, layout)
    copier._copy_part = copier._copy_by_numpy
    copier._is_for_native = lambda *_: False
    copier.begin = lambda *_: None
    return copier


class InTurn:
    """Three threads that work one after the other."""

    threads = 3

    def share(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        for item in items:
            work(item)


def shared(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    copier = CpuCopier(canonical, layout, InTurn())
    copier.shared_bytes = 1
    return copier


def staged(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    # Staging buffers of a slot or two, so that small caches take several turns.
    return StagedCopier(canonical, layout, HostStream(), staging_bytes=8192)


def staged_by_threads(
    canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray
) -> BlockCopier:
    copier = StagedCopier(canonical, layout, HostStream(), InTurn(), staging_bytes=8192)
    copier._host_rows.shared_bytes = 1
    return copier


def pinned(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    copier = StagedCopier(canonical, layout, HostStream(pins=True), staging_bytes=8192)
    copier.direct_bytes = 0
    copier.pin(slots)
    return copier


def by_kernel(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    stream = HostStream(pins=True, hashes=True, moves=True)
    copier = StagedCopier(canonical, layout, stream, staging_bytes=8192)
    copier.direct_bytes = 1 << 40
    copier.pin(slots)
    return copier


class OnCuda(BlockCopier):
    """Copies a KV cache as if it lay on a GPU: the cache goes there before each call, and what the
    call has made of it comes back.

    Args:
        pins: whether slots are registered with the GPU, where they can be.
        by_kernel: whether kernels read and write these, where they can.
    """

    def __init__(
        self,
        canonical: CanonicalKVCaches,
        layout: SlotLayout,
        *,
        pins: bool,
        by_kernel: bool = False,
    ) -> None:
        super().__init__(layout)
        self._canonical = canonical
        self._pins = pins
        self._direct_bytes = 1 << 40 if by_kernel else 0
        self._lock = threading.Lock()

    def fence(self) -> object:
        return None

    def reached(self, fence: object) -> bool:
        return True

    def begin(self, groups: Sequence[int], slots: np.ndarray, count: int) -> np.ndarray | None:
        with self._there() as copier:
            return copier.begin(groups, slots, count)

    def zero(self, group: int, block_ids: np.ndarray, *, fence: object = None) -> None:
        with self._there() as copier:
            copier.zero(group, block_ids, fence=copier.fence())

    def close(self) -> None:
        pass

    def _copy(
        self,
        copy: BlockCopy,
        saving: bool,
        cancelled: Callable[[], bool] | None,
        landed: Landed | None,
    ) -> np.ndarray | None:
        with self._there() as copier:
            if self._pins and copy.slots.flags.writeable and copy.slots.flags.c_contiguous:
                copier.pin(copy.slots)
            there = replace(copy, fence=copier.fence())
            if not saving:
                return copier.load(there)
            return copier.save(there, cancelled=cancelled, landed=landed)

    def _copy_pages(
        self, copy: BlockCopy, runs: tuple[PageRun, ...], length: int
    ) -> np.ndarray | None:
        with self._there() as copier:
            if self._pins and copy.slots.flags.writeable and copy.slots.flags.c_contiguous:
                copier.pin(copy.slots)
            there = replace(copy, fence=copier.fence())
            return copier.load_pages(there, runs, length)

    @contextmanager
    def _there(self) -> Iterator[StagedCopier]:
        here = self._canonical.storages
        with self._lock:
            there = {address: each.cuda() for address, each in here.items()}
            canonical = replace(self._canonical, storages=there)
            stream = CudaStream(canonical.device)
            copier = StagedCopier(canonical, self._layout, stream, staging_bytes=8192)
            copier.direct_bytes = self._direct_bytes
            try:
                yield copier
            finally:
                copier.close()
            for address, each in here.items():
                each.copy_(there[address])


def hashed_there(
    canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray
) -> BlockCopier:
    return StagedCopier(canonical, layout, HostStream(hashes=True), staging_bytes=8192)


def cuda(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    return OnCuda(canonical, layout, pins=False)


def cuda_pinned(canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray) -> BlockCopier:
    return OnCuda(canonical, layout, pins=True)


def cuda_by_kernel(
    canonical: CanonicalKVCaches, layout: SlotLayout, slots: np.ndarray
) -> BlockCopier:
    return OnCuda(canonical, layout, pins=True, by_kernel=True)


@pytest.fixture(scope="session")
def kv() -> SimpleNamespace:
    """The builders above, for tests here and in `copy`."""
    return SimpleNamespace(
        LAYOUTS=LAYOUTS,
        PADDABLE=PADDABLE,
        HostStream=HostStream,
        Shape=Shape,
        Cache=Cache,
        build=build,
        caches=caches,
    )


COPIERS = [cpu, by_numpy, shared, staged, staged_by_threads, pinned, hashed_there, by_kernel]
if torch.cuda.is_available():
    COPIERS += [cuda, cuda_pinned, cuda_by_kernel]


@pytest.fixture(scope="session", params=COPIERS, ids=lambda make: make.__name__)
def make_copier(request: pytest.FixtureRequest) -> MakeCopier:
    """Every way to copy a KV cache, so that one set of tests holds for all of them."""
    return request.param
