# SPDX-License-Identifier: Apache-2.0
"""The canonical form of a KV cache: per group, the contiguous byte runs that make up one block.

An engine hands over strided views `[B, H, N, C]` (blocks, heads, tokens, content) of one
buffer, in one of several memory layouts; older ones also views with K and V apart, or one
tensor of all layers. Everything after this module sees `int8` tensors `(num_blocks, page)`
instead, and for each group the runs of them that hold a block's bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from omni_connector.errors import LayoutError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer stores for one block.

    Args:
        name: the layer's name, as the engine calls it.
        page_bytes: bytes of content of one block.
        padded_page_bytes: bytes that the engine reserves for them, at least `page_bytes`.

    Raises:
        ValueError: the sizes are not positive, or the padded one is the smaller.
    """

    name: str
    page_bytes: int
    padded_page_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.page_bytes <= self.padded_page_bytes:
            raise ValueError(
                f"layer {self.name}: {self.page_bytes} bytes of content do not fit "
                f"a page of {self.padded_page_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one block table.

    Args:
        kind: the kind of cache, such as `full_attention` or `mamba`.
        block_size: tokens of one block.
        layers: the layers, in the order in which a slot holds them; a pipeline stage may
            have none.
        sliding_window: tokens that the layers look back on; None for all.

    Raises:
        ValueError: a layer named twice, or a size that is not positive.
    """

    kind: str
    block_size: int
    layers: tuple[LayerSpec, ...]
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ValueError(f"{self.kind} group: block size {self.block_size} is not positive")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"{self.kind} group: window {self.sliding_window} is not positive")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{self.kind} group: layers named twice: {', '.join(twice)}")


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One run of bytes of every block.

    Args:
        tensor: int8 `(num_blocks, page)`; its rows may lie further apart than they are long.
        page_size_bytes: `page`, padding included.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A group's part of a canonical tensor.

    Args:
        tensor_idx: which of the canonical tensors.
        page_size_bytes: how many leading bytes of its rows are content; no padding.
        padded_size_bytes: how many leading bytes of its rows the group reserves.
    """

    tensor_idx: int
    page_size_bytes: int
    padded_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """A KV cache in canonical form.

    Args:
        tensors: the distinct runs; layers of several groups may share one.
        group_data_refs: for each group its runs, in layer order and then address order.
        page_orders: for each group the byte order inside each page that a slot holds, slowest
            dimension first, such as `H2.N16.C256` (C in bytes; `N8.H2.N16.C256` where a block
            of 128 tokens is stored as kernel blocks of 16). Equal strings mean pages of equal
            byte order, whatever the layouts they came from. A layer that reads another one's
            cache has no page of its own.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]
    page_orders: tuple[tuple[str, ...], ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return int(self.tensors[0].tensor.shape[0])


class _Dim(NamedTuple):
    """A dimension of a block: elements, and bytes from one to the next."""

    name: str
    size: int
    step: int


@dataclass(frozen=True, slots=True)
class _Page:
    """One layer's page: `segment_bytes` contiguous bytes at each of `starts` (bytes into the
    storage, block 0), the same again every `block_stride` bytes."""

    storage: torch.UntypedStorage
    device: torch.device
    starts: tuple[int, ...]
    segment_bytes: int
    padded_segment_bytes: int
    block_stride: int
    order: str


def canonicalize(
    groups: Sequence[GroupSpec],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    *,
    dims: str = "BHNC",
) -> CanonicalKVCaches:
    """Find the contiguous bytes of every block of every group.

    Args:
        groups: the groups to be transferred.
        kv_caches: each layer's view, of any dtype; B is `num_blocks`, or a multiple of it where
            a block is split into kernel blocks. Views not named by `groups` are ignored.
        num_blocks: blocks of the cache.
        dims: what the dimensions of the views are, never inferred from their sizes: one of B,
            H, N and C each. C may stand for several; where K and V lie apart (`CBNHC`, or
            `BCNHC`) the dimension of 2 is the first part of a token's content.

    Raises:
        LayoutError: a layer is missing, or its view is not what its spec says.
        ValueError: `dims` without exactly one B, or with other letters.
    """
    if dims.count("B") != 1 or not set(dims) <= set("BHNC"):
        raise ValueError(f"dimensions {dims!r}: expected one B, and of H, N and C any")
    if num_blocks <= 0:
        raise LayoutError(f"a KV cache of {num_blocks} blocks")
    if not any(group.layers for group in groups):
        raise LayoutError("a KV cache without layers")

    indices: dict[tuple[int, int], int] = {}
    pages: list[_Page] = []
    starts: list[int] = []
    widths: list[int] = []
    group_refs: list[list[CanonicalKVCacheRef]] = []
    orders: list[tuple[str, ...]] = []
    for group in groups:
        # A layer that reads another layer's cache appears in the group under its own name;
        # its bytes are stored once, at their first place.
        refs: dict[int, CanonicalKVCacheRef] = {}
        stored: dict[tuple[int, ...], tuple[str, int]] = {}
        for layer in group.layers:
            if layer.name not in kv_caches:
                raise LayoutError(f"layer {layer.name}: no KV cache was registered for it")
            page = _page_of(layer, kv_caches[layer.name], num_blocks, dims)
            segments = []
            for start in page.starts:
                key = (page.storage.data_ptr() + start, page.block_stride)
                index = indices.setdefault(key, len(pages))
                if index == len(pages):
                    pages.append(page)
                    starts.append(start)
                    widths.append(0)
                widths[index] = max(widths[index], page.padded_segment_bytes)
                segments.append(index)
            shape = page.order, page.padded_segment_bytes
            if stored.setdefault(tuple(segments), shape) != shape:
                raise LayoutError(
                    f"layer {layer.name}: its pages {shape} are another layer's "
                    f"{stored[tuple(segments)]}"
                )
            for index in segments:
                refs[index] = CanonicalKVCacheRef(
                    index, page.segment_bytes, page.padded_segment_bytes
                )
        _check_disjoint(
            group.kind,
            (
                (
                    pages[i].storage.data_ptr() + starts[i],
                    ref.padded_size_bytes,
                    pages[i].block_stride,
                )
                for i, ref in refs.items()
            ),
            num_blocks,
        )
        if len(refs) != sum(len(segments) for segments in stored):
            raise LayoutError(f"{group.kind} group: layers share some of their bytes, not all")
        group_refs.append(list(refs.values()))
        orders.append(tuple(order for order, _ in stored.values()))

    tensors = [
        CanonicalKVCacheTensor(_rows(page, start, width, num_blocks), width)
        for page, start, width in zip(pages, starts, widths, strict=True)
    ]
    if len({tensor.tensor.device for tensor in tensors}) != 1:
        raise LayoutError("the layers of the KV cache lie on several devices")
    return CanonicalKVCaches(tensors, group_refs, tuple(orders))


def canonicalize_cross_layers(
    groups: Sequence[GroupSpec],
    kv_cache: torch.Tensor,
    layer_names: Sequence[str],
    num_blocks: int,
    *,
    dims: str,
) -> CanonicalKVCaches:
    """Find the contiguous bytes of every block, given one tensor of all layers.

    Args:
        groups: the groups to be transferred.
        kv_cache: the tensor.
        layer_names: the layer at each index of dimension L.
        num_blocks: blocks of the cache.
        dims: what the dimensions of the tensor are, as `canonicalize` takes them, and one L;
            such as `BLCNHC`.

    Returns:
        The same as `canonicalize` for the views of the layers.

    Raises:
        LayoutError: the tensor has other dimensions or layers, or is not what the specs say.
        ValueError: `dims` without exactly one L and one B, or with other letters.
    """
    if dims.count("L") != 1:
        raise ValueError(f"dimensions {dims!r}: expected one L")
    if kv_cache.ndim != len(dims):
        raise LayoutError(
            f"all layers: expected a tensor [{', '.join(dims)}], found shape "
            f"{tuple(kv_cache.shape)}"
        )
    axis = dims.index("L")
    if kv_cache.shape[axis] != len(layer_names):
        raise LayoutError(
            f"all layers: expected {len(layer_names)} layers, found {kv_cache.shape[axis]} in "
            f"dimension {axis} of shape {tuple(kv_cache.shape)}"
        )
    views = dict(zip(layer_names, kv_cache.unbind(axis), strict=True))
    return canonicalize(groups, views, num_blocks, dims=dims.replace("L", ""))


def _page_of(layer: LayerSpec, view: torch.Tensor, num_blocks: int, dims: str) -> _Page:
    """Resolve one layer's view, checked against its spec and its storage."""
    where = f"layer {layer.name}"
    found = f"shape {tuple(view.shape)}, strides {view.stride()}, {view.dtype}"
    if view.ndim != len(dims):
        raise LayoutError(f"{where}: expected a view [{', '.join(dims)}], found {found}")
    blocks = dims.index("B")
    if view.shape[blocks] == 0 or view.shape[blocks] % num_blocks:
        raise LayoutError(f"{where}: expected a multiple of {num_blocks} blocks, found {found}")
    item = view.element_size()
    page_bytes = item * view.numel() // num_blocks
    if page_bytes != layer.page_bytes:
        raise LayoutError(
            f"{where}: expected {layer.page_bytes} bytes a block, found {page_bytes} ({found})"
        )

    kernel_blocks = view.shape[blocks] // num_blocks
    block_stride = view.stride(blocks) * item * kernel_blocks
    parts = [_Dim("E", item, 1)]
    for name, size, step in zip(dims, view.shape, view.stride(), strict=True):
        parts.append(
            _Dim("R", kernel_blocks, step * item) if name == "B" else _Dim(name, size, step * item)
        )
    parts = [part for part in parts if part.size > 1]
    parts.sort(key=lambda part: part.step, reverse=True)

    outer = list(parts)
    segment_bytes = 1
    while outer and outer[-1].step == segment_bytes:
        segment_bytes *= outer.pop().size
    extent = segment_bytes
    for dim in reversed(outer):
        if dim.step < extent:
            raise LayoutError(f"{where}: the bytes of a block overlap ({found})")
        extent += dim.step * (dim.size - 1)

    padded_segment_bytes = segment_bytes
    if not outer:
        padded_segment_bytes = layer.padded_page_bytes
    elif layer.padded_page_bytes != layer.page_bytes:
        raise LayoutError(f"{where}: a padded page in several runs ({found})")
    if num_blocks > 1 and block_stride < padded_segment_bytes:
        raise LayoutError(
            f"{where}: expected blocks {padded_segment_bytes} bytes apart or more, "
            f"found {block_stride} ({found})"
        )

    first = view.storage_offset() * item
    offsets = product(*(range(0, dim.size * dim.step, dim.step) for dim in outer))
    starts = tuple(int(first + sum(offset)) for offset in offsets)
    storage = view.untyped_storage()
    end = starts[-1] + (num_blocks - 1) * block_stride + padded_segment_bytes
    if end > storage.nbytes():
        raise LayoutError(
            f"{where}: expected a buffer of {end} bytes or more, found {storage.nbytes()} ({found})"
        )
    return _Page(
        storage,
        view.device,
        starts,
        segment_bytes,
        padded_segment_bytes,
        block_stride,
        _order(parts),
    )


def _order(dims: Sequence[_Dim]) -> str:
    """Name the byte order of a page whose dimensions are given slowest first.

    Neighbours that only subdivide one another (elements of content, kernel blocks directly
    above their tokens) count as one.
    """
    sizes: list[tuple[str, int]] = []
    for dim in dims:
        name = {"R": "N", "E": "C"}.get(dim.name, dim.name)
        if sizes and sizes[-1][0] == name:
            sizes[-1] = (name, sizes[-1][1] * dim.size)
        else:
            sizes.append((name, dim.size))
    return ".".join(f"{name}{size}" for name, size in sizes)


def _rows(page: _Page, start: int, width: int, num_blocks: int) -> torch.Tensor:
    """View `width` bytes at `start` of every block as int8 `(num_blocks, width)`."""
    empty = torch.empty(0, dtype=torch.int8, device=page.device)
    return empty.set_(page.storage, start, (num_blocks, width), (page.block_stride, 1))


def _check_disjoint(kind: str, segments: Iterable[tuple[int, int, int]], num_blocks: int) -> None:
    """Refuse runs (address, bytes, block stride) of one group that share a byte."""
    ordered = sorted(segments)
    for i, (start, size, stride) in enumerate(ordered):
        end = start + (num_blocks - 1) * stride + size
        for other_start, other_size, other_stride in ordered[i + 1 :]:
            if other_start >= end:
                break
            gap = (other_start - start) % stride if stride else 0
            if other_stride != stride or gap < size or stride - gap < other_size:
                raise LayoutError(
                    f"{kind} group: two layers share bytes of one block: {size} bytes at "
                    f"{start:#x} and {other_size} at {other_start:#x}, blocks {stride} and "
                    f"{other_stride} bytes apart"
                )
