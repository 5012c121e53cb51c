# SPDX-License-Identifier: Apache-2.0
"""What the slots of a cache group hold, in the terms that two engines compare.

Two engines of one model may differ in block size, in tensor-parallel ranks and in the byte order
of their pages: the reading side rewrites the slots as it loads them. Everything else must agree.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import gcd
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from omni_connector.errors import LayoutError
from omni_connector.kv.convert import SlotConverter, page_starts
from omni_connector.kv.heads import head_sources
from omni_connector.kv.page_orders import UNKNOWN
from omni_connector.kv.states import StateSlices, StateTensor, cut_bytes, state_sources

_Text = Annotated[str, Meta(max_length=1024)]
_Page = Annotated[str, Meta(min_length=1, max_length=1024)]
_HEADS = re.compile(r"\bH([0-9]{1,12})\b")
_Size = Annotated[int, Meta(ge=1, lt=1 << 40)]
_Copies = Annotated[int, Meta(ge=1, lt=1 << 16)]


def pickled(value: msgspec.Struct) -> tuple[Any, ...]:
    """What `__reduce__` returns for a struct that may have fields without a value.

    pickle looks for UNSET in every module there is, and fails if one of them cannot be looked at.
    """
    return _unpickled, (type(value), msgspec.msgpack.encode(value))


def _unpickled(kind: Any, encoded: bytes) -> Any:
    return msgspec.msgpack.decode(encoded, type=kind)


class GroupShape(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group.

    Attributes:
        kind: the family, such as `full_attention`.
        block_size: tokens of a block.
        attention_type: which blocks the next token reads: `all`; the ones of a sliding `window`;
            the ones of a `chunk` of local attention; the `last`, which holds a recurrent state; or
            a `ring`, the one block that a request has, in which position p lies in place
            p % block_size.
        window: tokens of the window or chunk; 0 where there is none.
        layers: digest of the layers' names.
        replicated: whether every rank holds the same bytes, as with a latent cache, which has no
            heads to share out.
        attention: the kernels that read and write the pages.
        kept: what these keep of a token, and in which type of numbers; left out where only like
            kernels may read it. See `page_orders.kept_by`.
        pages: byte order of a block, one entry a layer; see `SlotConverter`. One that ends with "?"
            is not known: such blocks are copied whole, or refused. A pipeline stage may have no
            layer of a group, and then keeps nothing of its blocks.
        uncached: whether vLLM's prefix cache has no block of the group; left out where it has.
        states: shapes and dtypes of recurrent states, whose pages tell only how many bytes they
            have; left out where there are none. See `states_of`.
        cut: how ranks share out the state of each layer; left out where there are none, and where
            the rule of a layer is not known. Then only engines of as many ranks read them.
        names: the name of each page's layer, so that engines with other pipeline stages find the
            layers that they have; left out where they are not known.
        copies: for each page, how many consecutive ranks hold the same KV head, where the model has
            fewer of them than there are ranks; left out where no layer is known to have copies.
    """

    kind: _Text
    block_size: _Size
    attention_type: Literal["all", "window", "chunk", "last", "ring"]
    window: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0
    layers: _Text
    replicated: bool = False
    attention: _Text = ""
    kept: _Text | UnsetType = UNSET
    pages: Annotated[tuple[_Page, ...], Meta(max_length=1 << 14)]
    uncached: Literal[True] | UnsetType = UNSET
    states: _Text | UnsetType = UNSET
    cut: Annotated[tuple[StateTensor, ...], Meta(min_length=1, max_length=8)] | UnsetType = UNSET
    names: Annotated[tuple[_Text, ...], Meta(max_length=1 << 14)] | UnsetType = UNSET
    copies: Annotated[tuple[_Copies, ...], Meta(max_length=1 << 14)] | UnsetType = UNSET

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled(self)

    def __post_init__(self) -> None:
        if (self.window > 0) != (self.attention_type in ("window", "chunk")):
            raise ValueError(f"a {self.attention_type} group with a window of {self.window} tokens")
        if self.attention_type == "ring" and self.is_cached:
            raise ValueError("a ring whose blocks are in the prefix cache")
        if 0 in self.heads:
            raise ValueError(f"a page of no heads: {self.pages[self.heads.index(0)]}")
        if self.copies is not UNSET:
            self._check_copies(self.copies)
        if self.names is UNSET:
            return
        if len(self.names) != len(self.pages):
            raise ValueError(f"{len(self.names)} names of {len(self.pages)} pages")
        if len(set(self.names)) != len(self.names):
            twice, _ = Counter(self.names).most_common(1)[0]
            raise ValueError(f"layer {twice} has two pages")

    def _check_copies(self, copies: tuple[int, ...]) -> None:
        if len(copies) != len(self.pages):
            raise ValueError(f"copies of the heads of {len(copies)} of {len(self.pages)} pages")
        if self.replicated or self.attention_type in ("last", "ring"):
            raise ValueError(f"copies of the heads of a {self.kind} group, which has none")
        for number, heads in zip(copies, self.heads, strict=True):
            if number > 1 and heads > 1:
                raise ValueError(f"{number} copies of {heads} heads on each rank")

    def num_copies(self, ranks: int) -> int:
        """How many consecutive ranks hold the same bytes of a block; 0 where none holds any.

        Args:
            ranks: tensor-parallel size.

        >>> shape = GroupShape(
        ...     kind="full_attention",
        ...     block_size=16,
        ...     attention_type="all",
        ...     layers="",
        ...     pages=("H1.N16.C64", "H1.N16.C64"),
        ...     copies=(4, 2),
        ... )
        >>> shape.num_copies(8)
        2
        """
        if not self.pages:
            return 0
        if self.replicated:
            return ranks
        return 1 if self.copies is UNSET else gcd(*self.copies)

    @property
    def block_table(self) -> tuple[str, int, str, int, bool]:
        """What decides which blocks there are, and which are read: equal in all pipeline stages."""
        return self.kind, self.block_size, self.attention_type, self.window, self.is_cached

    @property
    def is_cached(self) -> bool:
        """Whether vLLM's prefix cache may have blocks of the group, by their hashes."""
        return self.uncached is UNSET

    @property
    def heads(self) -> tuple[int, ...]:
        """KV heads of one rank, one entry a layer; 1 of a ring, which is copied whole."""
        if self.attention_type == "ring":
            return (1,) * len(self.pages)
        found = (_HEADS.search(page) for page in self.pages)
        return tuple(1 if match is None else int(match[1]) for match in found)

    def of_layers(self, places: Sequence[int]) -> "GroupShape":
        """The same group with some of its layers only.

        Args:
            places: of these layers among the pages.
        """
        names = self.names if self.names is UNSET else tuple(self.names[at] for at in places)
        pages = tuple(self.pages[at] for at in places)
        copies = self.copies if self.copies is UNSET else tuple(self.copies[at] for at in places)
        return msgspec.structs.replace(self, pages=pages, names=names, copies=copies, layers="")

    def needed(self, num_tokens: int, start: int = 0) -> range:
        """The blocks of the tokens from `start` to `num_tokens` that the next token still reads.

        vLLM's managers keep the same blocks (`get_num_skipped_tokens`). What a prefix cache has of
        the tokens before `start` is not read again, unless the group has nothing there.
        """
        end = self.num_blocks(num_tokens)
        first = 0
        if self.attention_type == "window":
            first = max(0, num_tokens - self.window + 1) // self.block_size
        elif self.attention_type == "chunk":
            first = num_tokens // self.window * self.window // self.block_size
        elif self.attention_type == "last":
            first = max(0, end - 1)
        if self.is_cached:
            first = max(first, start // self.block_size)
        return range(first, end)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that a request with `num_tokens` tokens has in its block table."""
        if self.attention_type == "ring":
            return min(1, num_tokens)
        return -(-num_tokens // self.block_size)

    def needed_by_each(
        self, num_tokens: NDArray[np.int64], start: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First block and end of what `needed` returns, for each number of tokens; of a group in
        the prefix cache."""
        size, window = self.block_size, self.window
        end = -(-num_tokens // size)
        first = np.full_like(end, start // size)
        if self.attention_type == "window":
            first = np.maximum(first, (num_tokens - window + 1) // size)
        elif self.attention_type == "chunk":
            first = np.maximum(first, num_tokens // window * window // size)
        elif self.attention_type == "last":
            first = np.maximum(first, end - 1)
        return first, end


def leading_group(shapes: Sequence[GroupShape]) -> int:
    """The number of the group by whose missing blocks misses are explained: the first that keeps
    all tokens, else the first that is cached at all."""
    of_all = (g for g, shape in enumerate(shapes) if shape.attention_type == "all")
    cached = (g for g, shape in enumerate(shapes) if shape.is_cached)
    return next(of_all, next(cached, 0))


def states_of(specs: Iterable[Any]) -> str | UnsetType:
    """The recurrent states of a group, as in `3x64 bfloat16, 4x8x8 float32`; UNSET for none.

    The shape tells the layout of a convolution's state, too: which of its dimensions comes first.

    Args:
        specs: vLLM's specs of the layers that have states.
    """
    told = {
        ", ".join(
            f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        for spec in specs
    }
    return "; ".join(sorted(told)) or UNSET


def same_bytes(source: GroupShape, target: GroupShape) -> bool:
    """Whether blocks of engines with equally many ranks hold the same bytes in the same order."""
    return source.pages == target.pages and (
        source.attention_type == "last" or source.block_size == target.block_size
    )


def difference(
    source: tuple[GroupShape, ...],
    source_ranks: int,
    target: tuple[GroupShape, ...],
    target_ranks: int,
    kv_heads: int,
) -> tuple[str, object, object] | None:
    """Why the target cannot read the source's slots: what differs, and both values.

    Args:
        source, target: the groups of the engine that holds the slots, and of the one that reads.
        source_ranks, target_ranks: their tensor-parallel sizes.
        kv_heads: KV heads of the whole model.
    """
    if len(source) != len(target):
        return "groups", _kinds(source), _kinds(target)
    for number, (ours, theirs) in enumerate(zip(source, target, strict=True)):
        for name in ("kind", "attention_type", "window", "layers", "replicated", "attention"):
            if name == "attention" and _keep_the_same(ours, theirs):
                continue
            if getattr(ours, name) != getattr(theirs, name):
                return f"{name} of group {number}", getattr(ours, name), getattr(theirs, name)
        where = f"of group {number} ({ours.kind})"
        stateful = ours.attention_type == "last"
        if ours.attention_type == "ring" and ours.block_size != theirs.block_size:
            # The place of a position depends on it.
            return f"block_size {where}", ours.block_size, theirs.block_size
        if stateful and source_ranks != target_ranks and not ours.replicated:
            found = _states_difference(ours, source_ranks, theirs, target_ranks, where)
            if found is not None:
                return found
            continue
        if ours.states != theirs.states:
            return f"states {where}", ours.states or "", theirs.states or ""
        if stateful or ours.attention_type == "ring":
            if ours.pages != theirs.pages:
                return f"pages {where}", _first_page(ours), _first_page(theirs)
            continue
        small, large = sorted((ours.block_size, theirs.block_size))
        if large % small:
            return f"block_size {where}", ours.block_size, theirs.block_size
        if source_ranks == target_ranks and same_bytes(ours, theirs):
            if ours.copies and theirs.copies and ours.copies != theirs.copies:
                return f"copies of heads {where}", ours.copies, theirs.copies
            continue
        try:
            converter(ours, theirs)
            layers = {
                (
                    total_heads(ours, at, source_ranks, theirs, at, target_ranks, kv_heads),
                    ours.heads[at],
                    theirs.heads[at],
                )
                for at in range(len(ours.pages))
            }
            for total, source_heads, target_heads in layers:
                for rank in range(target_ranks):
                    head_sources(
                        total=total,
                        source_heads=source_heads,
                        source_ranks=source_ranks,
                        target_heads=target_heads,
                        target_rank=rank,
                        target_ranks=target_ranks,
                    )
        except LayoutError as error:
            return f"pages {where} ({error})", _first_page(ours), _first_page(theirs)
    return None


def total_heads(
    source: GroupShape,
    source_layer: int,
    source_ranks: int,
    target: GroupShape,
    target_layer: int,
    target_ranks: int,
    kv_heads: int,
) -> int | None:
    """KV heads of a layer in the whole model; 1 of MLA, None where they are not known.

    Layers may have other numbers of heads than the model says: those of a drafter, or of sliding
    windows. An engine that has copies of a layer's heads knows how many there are.

    Args:
        source, source_layer, source_ranks: of the engine that holds the slots: the group, the place
            of the layer's page in it, and the tensor-parallel size.
        target, target_layer, target_ranks: the same of the engine that reads.
        kv_heads: KV heads of the whole model; 0 where they are not known.

    Raises:
        LayoutError: the two engines have other numbers of heads.
    """
    if target.replicated:
        return 1
    told = {
        ranks // shape.copies[layer]
        for shape, layer, ranks in (
            (source, source_layer, source_ranks),
            (target, target_layer, target_ranks),
        )
        if shape.copies is not UNSET and shape.copies[layer] > 1
    }
    if not told:
        return kv_heads or None
    heads = source.heads[source_layer], target.heads[target_layer]
    if len(told) > 1 or heads != tuple(
        max(1, min(told) // n) for n in (source_ranks, target_ranks)
    ):
        raise LayoutError(
            f"a layer of {' or '.join(map(str, sorted(told)))} KV heads, of which one rank of "
            f"{source_ranks} has {heads[0]} and one of {target_ranks} has {heads[1]}"
        )
    return told.pop()


def _states_difference(
    source: GroupShape, source_ranks: int, target: GroupShape, target_ranks: int, where: str
) -> tuple[str, object, object] | None:
    """Why the target cannot make its states of those of engines with another number of ranks."""
    if not source.pages and not target.pages:
        return None  # a pipeline stage that has none of the layers
    if source.cut is UNSET or target.cut is UNSET:
        why = "whose ranks share out states in a way that is not known"
        return f"ranks {where}, {why}", source_ranks, target_ranks
    try:
        for rank in range(target_ranks):
            state_slices(source, source_ranks, target, rank, target_ranks)
    except LayoutError as error:
        return f"ranks {where} ({error})", source_ranks, target_ranks
    return None


def state_slices(
    source: GroupShape,
    source_ranks: int,
    target: GroupShape,
    target_rank: int,
    target_ranks: int,
    places: Sequence[tuple[int, int]] | None = None,
) -> dict[int, StateSlices]:
    """What each rank of a peer has of the states of one of our ranks.

    Args:
        places: as of `converter`.

    Raises:
        LayoutError: our states cannot be made of the peer's.
    """
    if source.cut is UNSET or target.cut is UNSET:
        raise LayoutError("it is not known how ranks share out the states")
    if places is None:
        if len(source.pages) != len(target.pages):
            raise LayoutError(f"states of {len(source.pages)} layers and of {len(target.pages)}")
        places = [(at, at) for at in range(len(target.pages))]
    starts = page_starts(source.pages), page_starts(target.pages)
    for begins, cut in zip(starts, (source.cut, target.cut), strict=True):
        if any(end - begin != cut_bytes(cut) for begin, end in pairwise(begins)):
            raise LayoutError(f"states of {cut_bytes(cut)} bytes in pages of other sizes")
    return state_sources(
        source.cut,
        source_ranks,
        target.cut,
        target_rank,
        target_ranks,
        pages=[(starts[0][at], starts[1][own]) for at, own in places],
        source_bytes=starts[0][-1],
    )


def _keep_the_same(one: GroupShape, other: GroupShape) -> bool:
    """Whether kernels keep the same of a token, however they order a page, and both say how."""
    unknown = any(page.endswith(UNKNOWN) for page in (*one.pages, *other.pages))
    return one.kept == other.kept and one.kept is not UNSET and not unknown


def converter(
    source: GroupShape,
    target: GroupShape,
    *,
    places: Sequence[tuple[int, int]] | None = None,
    like_ranks: bool = False,
) -> SlotConverter:
    """What rewrites the slots of one group.

    Args:
        places: which page of the source's slots becomes which page of the target's; None: each
            the same.
        like_ranks: whether each rank reads the same rank of the source.

    Raises:
        LayoutError: the pages cannot be rewritten.
    """
    here, there = source, target
    if places is not None:
        here = source.of_layers([at for at, _ in places])
        there = target.of_layers([at for _, at in places])
    return SlotConverter(
        source.pages,
        target.pages,
        source_block_size=source.block_size,
        target_block_size=target.block_size,
        # Of what all ranks hold, the page of any rank will do, in whatever order it is.
        whole=source.attention_type == "last"
        or ((source.replicated or like_ranks) and same_bytes(here, there)),
        places=places,
    )


def _first_page(shape: GroupShape) -> str:
    return next(iter(shape.pages), "")


def _kinds(groups: tuple[GroupShape, ...]) -> str:
    return ", ".join(group.kind for group in groups)
