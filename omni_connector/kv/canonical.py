# SPDX-License-Identifier: Apache-2.0
"""The canonical form of a KV cache: per group, which bytes make up one block, and a slot.

An engine hands over strided views `[B, H, N, C]` (blocks, heads, tokens, content) of one
buffer, in one of several memory layouts; older ones also views with K and V apart, or one
tensor of all layers. The canonical form has one `Segment` for each layer's page instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from omni_connector.errors import LayoutError
from omni_connector.kv.segments import Segment, packed

SLOT_ALIGNMENT: Final = 4096
"""Bytes of which a slot's size is a multiple: a memory page."""


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

    Raises:
        ValueError: a layer named twice, or a size that is not positive.
    """

    kind: str
    block_size: int
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ValueError(f"{self.kind} group: block size {self.block_size} is not positive")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{self.kind} group: layers named twice: {', '.join(twice)}")


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """A KV cache in canonical form. A layer that reads another one's cache has no page of its own.

    Args:
        page_orders: for each group the byte order inside each page that a slot holds, slowest
            dimension first, such as `H2.N16.C256` (C in bytes; `N8.H2.N16.C256` where a block
            of 128 tokens is stored as kernel blocks of 16). Equal strings mean pages of equal
            byte order, whatever the layouts they came from.
        pages: for each group its pages, in slot order.
        storages: the memory that the pages lie in, by its address.
        num_blocks: blocks of the cache.
    """

    page_orders: tuple[tuple[str, ...], ...]
    pages: tuple[tuple[Segment, ...], ...]
    storages: dict[int, torch.UntypedStorage]
    num_blocks: int

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return next(iter(self.storages.values())).device

    def view(self, segment: Segment, word: torch.dtype) -> torch.Tensor:
        """A segment of all blocks, `(num_blocks, *counts, words)`.

        Args:
            segment: part of one of the pages, or of several.
            word: an integer dtype, whose size divides the segment's start, rows and distances.
        """
        width = word.itemsize
        blocks = torch.empty(0, dtype=word, device=self.device)
        return blocks.set_(
            self.storages[segment.storage],
            segment.start // width,
            (self.num_blocks, *segment.counts, segment.row_bytes // width),
            (segment.block_stride // width, *(step // width for _, step in segment.dims), 1),
        )


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """What a slot holds: one block of one group, all its pages, packed without gaps.

    Args:
        group_bytes: for each group the bytes of one block; they start at the slot's first byte.
        slot_bytes: bytes of every slot: the largest group's, rounded up to a memory page.
    """

    group_bytes: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def of(cls, canonical: CanonicalKVCaches) -> "SlotLayout":
        """Lay out the slots of a KV cache."""
        sizes = tuple(sum(page.nbytes for page in pages) for pages in canonical.pages)
        return cls(sizes, -(-max(sizes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)


class _Dim(NamedTuple):
    """A dimension of a block: elements, and bytes from one to the next."""

    name: str
    size: int
    step: int


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

    named = [layer.name for group in groups for layer in group.layers]
    for name in named:
        if name not in kv_caches:
            raise LayoutError(f"layer {name}: no KV cache was registered for it")
    grouped = [_pages_of(group, kv_caches, num_blocks, dims) for group in groups]
    if len({kv_caches[name].device for name in named}) != 1:
        raise LayoutError("the layers of the KV cache lie on several devices")
    pages = tuple(tuple(page for page, _ in group) for group in grouped)
    orders = tuple(tuple(order for _, order in group) for group in grouped)
    stores = [kv_caches[name].untyped_storage() for name in named]
    storages = {storage.data_ptr(): storage for storage in stores}
    return CanonicalKVCaches(orders, pages, storages, num_blocks)


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


def _pages_of(
    group: GroupSpec, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, dims: str
) -> list[tuple[Segment, str]]:
    """The distinct pages of a group in slot order, each with its byte order."""
    # A layer that reads another layer's cache appears in the group under its own name;
    # its bytes are stored once, at their first place.
    stored: dict[tuple[object, ...], tuple[Segment, str]] = {}
    slot_bytes = 0
    for layer in group.layers:
        page, order = _page_of(layer, kv_caches[layer.name], num_blocks, dims)
        place = page.storage + page.start, page.dims, page.block_stride
        if place not in stored:
            stored[place] = replace(page, slot_offset=slot_bytes), order
            slot_bytes += page.nbytes
        first, first_order = stored[place]
        if (order, page.padded_bytes) != (first_order, first.padded_bytes):
            raise LayoutError(
                f"layer {layer.name}: its pages {order, page.padded_bytes} are another "
                f"layer's {first_order, first.padded_bytes}"
            )
    _check_disjoint(group.kind, (page for page, _ in stored.values()), num_blocks)
    return list(stored.values())


def _page_of(
    layer: LayerSpec, view: torch.Tensor, num_blocks: int, dims: str
) -> tuple[Segment, str]:
    """One layer's page and its byte order, checked against its spec and its storage."""
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

    rows, row_bytes = packed([(part.size, part.step) for part in parts], 1)
    extent = row_bytes
    for count, distance in reversed(rows):
        if distance < extent:
            raise LayoutError(f"{where}: the bytes of a block overlap ({found})")
        extent += distance * (count - 1)

    padded_bytes = row_bytes
    if not rows:
        padded_bytes = layer.padded_page_bytes
    elif layer.padded_page_bytes != layer.page_bytes:
        raise LayoutError(f"{where}: a padded page in several runs ({found})")
    if num_blocks > 1 and block_stride < padded_bytes:
        raise LayoutError(
            f"{where}: expected blocks {padded_bytes} bytes apart or more, "
            f"found {block_stride} ({found})"
        )

    storage = view.untyped_storage()
    first = int(view.storage_offset()) * item
    end = first + extent - row_bytes + (num_blocks - 1) * block_stride + padded_bytes
    if end > storage.nbytes():
        raise LayoutError(
            f"{where}: expected a buffer of {end} bytes or more, found {storage.nbytes()} ({found})"
        )
    page = Segment(storage.data_ptr(), first, rows, row_bytes, padded_bytes, block_stride)
    return page, _order(parts)


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


def _check_disjoint(kind: str, pages: Iterable[Segment], num_blocks: int) -> None:
    """Refuse pages of one group that share a byte of any block."""
    ordered = sorted(
        (page.storage + start, page.padded_bytes, page.block_stride)
        for page in pages
        for start in page.row_starts
    )
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
