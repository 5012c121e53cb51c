# SPDX-License-Identifier: Apache-2.0
"""Slots of a peer whose blocks, heads per rank or byte order differ from ours, made ours."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import LayoutError
from omni_connector.kv.heads import HeadSlice
from omni_connector.kv.page_orders import UNKNOWN

_ORDER = re.compile(r"[HNC][1-9][0-9]{0,11}(\.[HNC][1-9][0-9]{0,11}){0,7}")
_HALVES = re.compile(
    r"(?:(?P<heads>H[1-9][0-9]{0,11})\.)?\((?P<keys>[^|()]+)\|(?P<values>[^|()]+)\)"
)
_MAX_PAGE_BYTES = 1 << 40


class _Dim(NamedTuple):
    name: str
    size: int


class PageRun(NamedTuple):
    """Pages that lie beside each other in a peer's slots and, in the same order, in ours.

    Attributes:
        at: byte of the peer's slots at which they begin.
        first, end: their bytes in our slots.
    """

    at: int
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return self.end - self.first


class SlotConverter:
    """Copies tokens and heads from a peer's slots to slots as we would have written them.

    A slot holds the pages of its layers, one after the other. A page's byte order is named
    slowest dimension first, as in `H2.N16.C256` (`CanonicalKVCaches.page_orders`): H heads,
    N tokens (twice where a block is stored as kernel blocks), C bytes of one head and token;
    a dimension of size 1 may be left out. Where the bytes of a head are not those of one token
    after the other, but of all its keys and then as many of all its values, each half has an order
    of its own: `H2.(C64.N128.C4|N128.C256)`.

    Args:
        source_pages: the byte order of each layer's page in the peer's slots.
        target_pages: the same of ours.
        source_block_size: tokens of one of the peer's blocks.
        target_block_size: tokens of one of ours.
        whole: pages are copied as they are, such as states. Then an order may be unknown.
        places: which page of the peer's slots becomes which of ours, for each layer that both
            have; None: all, each in the same place.

    Raises:
        LayoutError: the pages cannot be made from one another; the message names the layer's
            index and both orders.
        ValueError: a block size that is not positive.
    """

    def __init__(
        self,
        source_pages: Sequence[str],
        target_pages: Sequence[str],
        *,
        source_block_size: int,
        target_block_size: int,
        whole: bool = False,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if source_block_size < 1 or target_block_size < 1:
            raise ValueError(f"blocks of {source_block_size} and of {target_block_size} tokens")
        if places is None:
            if len(source_pages) != len(target_pages):
                raise LayoutError(
                    f"the peer's slots hold {len(source_pages)} layers, ours {len(target_pages)}"
                )
            places = [(layer, layer) for layer in range(len(target_pages))]
        self._layers = len(places)
        self._whole = whole
        self._source_block_size = source_block_size
        self._target_block_size = target_block_size
        self._batches: list[_Batch] = []
        self._runs: list[tuple[int, int, int]] = []  # of whole pages: from, to, bytes
        runs = list(_alike_pages(source_pages, target_pages, places, whole=whole))
        starts = page_starts(source_pages), page_starts(target_pages)
        self.source_bytes, self.target_bytes = (pages[-1] for pages in starts)
        """Bytes of one block in a slot of the peer's, and in one of ours."""
        for layer, count, orders, source, target in runs:
            offsets = [pages[at] for pages, at in zip(starts, places[layer], strict=True)]
            if whole:
                self._runs.append((offsets[0], offsets[1], count * _page_size(source)))
                continue
            for part, pair in enumerate(zip(source, target, strict=True)):
                matched = self._matched(layer, orders, *pair)
                pages = (
                    _Pages.of(page, offset, count, part, len(source))
                    for page, offset in zip(matched, offsets, strict=True)
                )
                self._batches.append(_Batch(layer, *pages))

    @property
    def page_runs(self) -> tuple[PageRun, ...]:
        """Where whole pages lie, in the order of the peer's slots; none unless `whole`."""
        found: list[PageRun] = []
        for at, first, size in sorted(self._runs):
            last = found[-1] if found else None
            if last is not None and (at, first) == (last.at + last.nbytes, last.end):
                found[-1] = last._replace(end=first + size)
            else:
                found.append(PageRun(at, first, first + size))
        return tuple(found)

    def copy(
        self,
        source: NDArray[np.uint8],
        source_block: int,
        target: NDArray[np.uint8],
        target_block: int,
        heads: Sequence[HeadSlice],
        *,
        end_token: int,
    ) -> None:
        """Copy the tokens that two blocks have in common; other bytes of `target` stay.

        Args:
            source: `(n,)`, the peer's slot; n is `source_bytes` or more.
            source_block: which block of the request it holds: tokens from
                `source_block * source_block_size`.
            target: `(n,)`, contiguous and writable; n is `target_bytes` or more.
            target_block: which block of the request it is to hold.
            heads: for each layer the heads to copy; of whole pages everything is copied, whatever
                the heads and blocks.
            end_token: tokens from this one on are not copied.

        Raises:
            ValueError: arrays too short or of another type, negative blocks, or heads that the
                pages do not have; nothing was copied.
        """
        _check(source, self.source_bytes, "source")
        _check(target, self.target_bytes, "target")
        if self._whole:
            for begin, to, size in self._runs:
                target[to : to + size] = source[begin : begin + size]
            return
        if source_block < 0 or target_block < 0:
            raise ValueError(f"blocks {source_block} and {target_block} of a request")
        if len(heads) != self._layers:
            raise ValueError(f"heads of {len(heads)} layers, not of {self._layers}")
        for batch in self._batches:
            for part in heads[batch.first : batch.first + batch.source.shape[0]]:
                if (
                    part.source + part.count > batch.source.heads
                    or part.target + part.count > batch.target.heads
                ):
                    raise ValueError(
                        f"{part}, but pages of {batch.source.heads} and {batch.target.heads} heads"
                    )

        source_first = source_block * self._source_block_size
        target_first = target_block * self._target_block_size
        first = max(source_first, target_first)
        end = min(
            source_first + self._source_block_size,
            target_first + self._target_block_size,
            end_token,
        )
        for batch in self._batches:
            from_pages, to_pages = batch.source.view(source), batch.target.view(target)
            pieces = list(
                _pieces(
                    first - source_first,
                    first - target_first,
                    end - first,
                    batch.source.inner_tokens,
                    batch.target.inner_tokens,
                )
            )
            for layer, count, part in _alike(heads, batch.first, batch.source.shape[0]):
                from_heads = from_pages[
                    layer : layer + count, part.source : part.source + part.count
                ]
                to_heads = to_pages[layer : layer + count, part.target : part.target + part.count]
                for from_tokens, to_tokens in pieces:
                    to_heads[:, :, *to_tokens] = from_heads[:, :, *from_tokens]

    def _matched(
        self,
        layer: int,
        orders: tuple[str, str],
        source: tuple[_Dim, ...],
        target: tuple[_Dim, ...],
    ) -> tuple[tuple[_Dim, ...], tuple[_Dim, ...]]:
        """Both pages with their content divided alike, checked against each other."""
        for page, block_size in (
            (source, self._source_block_size),
            (target, self._target_block_size),
        ):
            tokens = _sizes(page, "N")
            if prod(tokens) != block_size:
                raise _refused(
                    layer, orders, f"a page of {prod(tokens)} tokens in a block of {block_size}"
                )
            if len(tokens) > 2 or len(_sizes(page, "H")) > 1:
                raise _refused(layer, orders, "a byte order that is not understood")
        contents = _sizes(source, "C"), _sizes(target, "C")
        if prod(contents[0]) != prod(contents[1]):
            raise _refused(
                layer,
                orders,
                f"{prod(contents[0])} and {prod(contents[1])} bytes for a head and token",
            )
        common = _common_factors(*contents)
        if common is None:
            raise _refused(layer, orders, "bytes of a head and token in orders that do not match")
        return _divided(source, common), _divided(target, common)


@dataclass(frozen=True, slots=True)
class _Pages:
    """Equal pages of consecutive layers in a slot.

    Args:
        offset: bytes from the slot's first to theirs.
        shape: `(layers, ...)`, the page's dimensions in byte order; of a page in halves those of
            one half, heads first.
        axes: the order of those axes in `view`.
        heads: heads of a page.
        inner_tokens: consecutive tokens that lie at one distance from each other.
        part, parts: which part of each head this is, and of how many.
    """

    offset: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    heads: int
    inner_tokens: int
    part: int
    parts: int

    @classmethod
    def of(
        cls, page: tuple[_Dim, ...], offset: int, layers: int, part: int, parts: int
    ) -> "_Pages":
        # What an order leaves out has size 1, so it may stand anywhere: in front, behind heads
        # that are there.
        head = [dim for dim in page[:1] if dim.name == "H"]
        missing = [_Dim("H", 1)] * (not _sizes(page, "H"))
        missing += [_Dim("N", 1)] * (2 - len(_sizes(page, "N")))
        dims = [_Dim("L", layers), *head, *missing, *page[len(head) :]]
        axes = [axis for name in "LHNC" for axis, dim in enumerate(dims) if dim.name == name]
        sizes = [dims[axis].size for axis in axes]
        shape = tuple(dim.size for dim in dims)
        return cls(offset, shape, tuple(axes), sizes[1], sizes[3], part, parts)

    def view(self, slot: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[layers, heads, outer tokens, inner tokens, *content]`."""
        pages = slot[self.offset : self.offset + self.parts * prod(self.shape)]
        if self.parts > 1:
            layers, heads, *rest = self.shape
            halves = pages.reshape(layers, heads, self.parts, *rest)
            return halves[:, :, self.part].transpose(self.axes)
        return pages.reshape(self.shape).transpose(self.axes)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive layers from `first` whose pages are alike on both sides."""

    first: int
    source: _Pages
    target: _Pages


_Page = list[tuple[_Dim, ...]]
"""The parts of a page, one or two."""


def _alike_pages(
    source_pages: Sequence[str],
    target_pages: Sequence[str],
    places: Sequence[tuple[int, int]],
    *,
    whole: bool,
) -> Iterator[tuple[int, int, tuple[str, str], _Page, _Page]]:
    """Layers that follow each other on both sides, with equal pages on each: the first of them in
    `places`, how many they are, both byte orders, and the pages.

    Raises:
        LayoutError: as `SlotConverter`.
    """
    pairs = [(source_pages[at], target_pages[to]) for at, to in places]
    # Consecutive places are as far from their number as the ones before.
    keys = [
        (pair, at - i, to - i) for i, (pair, (at, to)) in enumerate(zip(pairs, places, strict=True))
    ]
    layer = 0
    for (orders, _, _), alike in groupby(keys):
        source, target = (
            _parse_page(order.removesuffix(UNKNOWN) if whole else order) for order in orders
        )
        if source is None or target is None or len(source) != len(target):
            raise _refused(layer, orders, "byte orders that are not understood, or not alike")
        sizes = _page_size(source), _page_size(target)
        if max(sizes) > _MAX_PAGE_BYTES:
            raise _refused(layer, orders, f"pages of {max(sizes)} bytes")
        if whole and sizes[0] != sizes[1]:
            raise _refused(layer, orders, "pages of different sizes")
        count = len(list(alike))
        yield layer, count, orders, source, target
        layer += count


def page_starts(pages: Sequence[str]) -> list[int]:
    """Where each page of a slot begins, and the last one ends.

    Raises:
        LayoutError: the byte order of a page is not understood.
    """
    starts = [0]
    for order, alike in groupby(pages):
        page = _parse_page(order.removesuffix(UNKNOWN))
        if page is None or _page_size(page) > _MAX_PAGE_BYTES:
            raise LayoutError(f"pages of a byte order that is not understood: {order!r}")
        starts += [starts[-1] + (i + 1) * _page_size(page) for i in range(len(list(alike)))]
    return starts


def _page_size(page: _Page) -> int:
    return sum(_size(part) for part in page)


def _parse_page(order: str) -> list[tuple[_Dim, ...]] | None:
    """The parts of a page, one or two; None if it is none."""
    halves = _HALVES.fullmatch(order)
    if halves is None:
        page = _parse(order)
        return None if page is None else [page]
    heads = _parse(halves["heads"] or "")
    parts = [_parse(halves[name]) for name in ("keys", "values")]
    if heads is None or any(part is None or _sizes(part, "H") for part in parts):
        return None
    found = [(*heads, *part) for part in parts if part is not None]
    return found if _size(found[0]) == _size(found[1]) else None


def _size(page: tuple[_Dim, ...]) -> int:
    return prod(dim.size for dim in page)


def _parse(order: str) -> tuple[_Dim, ...] | None:
    """The dimensions that an order names, without dimensions of size 1; None if it is no order."""
    if not order:
        return ()
    if not _ORDER.fullmatch(order):
        return None
    dims = (_Dim(part[0], int(part[1:])) for part in order.split("."))
    return tuple(dim for dim in dims if dim.size > 1)


def _sizes(page: tuple[_Dim, ...], name: str) -> list[int]:
    return [dim.size for dim in page if dim.name == name]


def _common_factors(one: list[int], two: list[int]) -> list[int] | None:
    """The coarsest factors of a size that divide both of its factorisations further."""
    bounds = sorted({prod(sizes[i:]) for sizes in (one, two) for i in range(len(sizes) + 1)})
    pairs = list(pairwise(bounds))
    if any(after % before for before, after in pairs):
        return None
    return [after // before for before, after in reversed(pairs)]


def _divided(page: tuple[_Dim, ...], factors: list[int]) -> tuple[_Dim, ...]:
    """Divide a page's content dimensions into `factors`, slowest first."""
    left = iter(factors)
    dims: list[_Dim] = []
    for dim in page:
        if dim.name != "C":
            dims.append(dim)
            continue
        size = 1
        while size < dim.size:
            factor = next(left)
            dims.append(_Dim("C", factor))
            size *= factor
    return tuple(dims)


def _pieces(
    source: int, target: int, count: int, source_inner: int, target_inner: int
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Divide `count` tokens from `source` and `target` on into (outer, inner) slices of both."""
    while count > 0:
        source_outer, source_at = divmod(source, source_inner)
        target_outer, target_at = divmod(target, target_inner)
        outer = 1
        inner = min(source_inner - source_at, target_inner - target_at, count)
        if inner == source_inner == target_inner:
            outer = count // inner
        yield (
            (slice(source_outer, source_outer + outer), slice(source_at, source_at + inner)),
            (slice(target_outer, target_outer + outer), slice(target_at, target_at + inner)),
        )
        source += outer * inner
        target += outer * inner
        count -= outer * inner


def _alike(
    heads: Sequence[HeadSlice], first: int, layers: int
) -> Iterator[tuple[int, int, HeadSlice]]:
    """Yield (layer in the batch, layers, slice) of neighbours that have the same slice."""
    layer = 0
    for part, alike in groupby(heads[first : first + layers]):
        count = len(list(alike))
        yield layer, count, part
        layer += count


def _check(slot: NDArray[np.uint8], size: int, what: str) -> None:
    if slot.ndim != 1 or slot.dtype != np.uint8 or slot.shape[0] < size:
        raise ValueError(
            f"expected a {what} of {size} bytes, found {slot.dtype} of shape {slot.shape}"
        )
    if slot.strides[0] != 1:
        # Reshaping it would copy, and the copy would be written to.
        raise ValueError(f"the bytes of the {what} lie {slot.strides[0]} bytes apart")
    if what == "target" and not slot.flags.writeable:
        raise ValueError("the target is read-only")


def _refused(layer: int, orders: tuple[str, str], why: str) -> LayoutError:
    return LayoutError(
        f"layer {layer}: the peer's pages {orders[0]!r} cannot be made ours {orders[1]!r}: {why}"
    )
