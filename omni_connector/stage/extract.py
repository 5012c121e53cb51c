# SPDX-License-Identifier: Apache-2.0
"""The KV of one request is copied out of the paged cache of an engine.

Whatever its layout, a layer comes out as key and value, each (tokens, heads, dim). A layer of MLA
comes out as one latent (tokens, 1, dim), in the place of the key.
"""

import operator
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from omni_connector.errors import LayoutError
from omni_connector.stage import contract
from omni_connector.stage.payload import KVCacheTransferData

LayerKV = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class KVLayout(StrEnum):
    """How one tensor holds the cache of a layer; B blocks of N tokens, H heads, D of each.

    A pair of tensors (B, N, H, D), key and value, is a layout without a name.

    Attributes:
        KV_FIRST: (2, B, N, H, D).
        BLOCKS_FIRST: (B, 2, N, H, D).
        PACKED: (B, H, N, C); C is a token's key, then its value.
        LATENT: (B, N, C) or (B, 1, N, C); C is the latent of MLA.
        CPU_VEC: (B, H, N, C); the N * C elements of a head are the keys of all tokens, transposed,
            then the values. vLLM's attention on CPUs does this with the instruction sets `vec`
            and `vec16`.
        CPU_AMX: (B, H, N, C); the N * C elements of a head are keys, then values, in tiles of 16.
            vLLM's attention on CPUs does this with `amx`.
    """

    KV_FIRST = "kv_first"
    BLOCKS_FIRST = "blocks_first"
    PACKED = "packed"
    LATENT = "latent"
    CPU_VEC = "cpu_vec"
    CPU_AMX = "cpu_amx"


Layouts = str | Sequence[str | None] | None


class _Plane(NamedTuple):
    """The keys, or values, of a layer: a view (B, tokens..., H, content...)."""

    view: torch.Tensor
    heads: int
    dim: int


def extract_kv_cache(
    request_id: str,
    block_ids: Sequence[int],
    seq_len: int,
    kv_caches: Sequence[LayerKV | None],
    block_size: int,
    cache_dtype: str,
    custom_metadata: dict[str, Any] | None = None,
    *,
    layout: Layouts = None,
    head_dim: int | None = None,
    cpu_engine: bool = False,
) -> KVCacheTransferData:
    """Copy the KV of a request out of the cache.

    Args:
        request_id: the request.
        block_ids: the request's blocks, in order; all layers share them. Those behind the last
            token are ignored.
        seq_len: tokens to copy; the rest of the last block is left out.
        kv_caches: the cache of each layer; None where a layer has none.
        block_size: tokens of a block.
        cache_dtype: what the engine calls the cache's dtype.
        custom_metadata: is added to the metadata, in place of entries of the same name. The
            contract (`contract.CONTRACT_KEY`) is stated by this function alone, if it holds.
        layout: a `KVLayout`, or one a layer. By default the shape must tell the layout; it is an
            error if two layouts fit.
        head_dim: elements of a key, where known; else keys and values are of equal size.
        cpu_engine: whether the cache is that of a CPU engine, which has layouts of its own.

    Raises:
        LayoutError: a layer's layout cannot be told, or is not the one that was named.
        ValueError: not every layer has a block of these ids; too few blocks; no layer.
        TypeError: the block ids are no integers, or come in groups.
    """
    if block_size < 1 or seq_len < 0:
        raise ValueError(f"request {request_id}: {seq_len} tokens in blocks of {block_size}")
    blocks = _block_ids(request_id, block_ids, -(-seq_len // block_size))
    if len(blocks) * block_size < seq_len:
        raise ValueError(
            f"request {request_id}: {seq_len} tokens do not fit in {len(blocks)} blocks of "
            f"{block_size}"
        )
    layouts = _layouts(layout, len(kv_caches))
    keys: list[torch.Tensor | None] = []
    values: list[torch.Tensor | None] = []
    for number, (cache, name) in enumerate(zip(kv_caches, layouts, strict=True)):
        if cache is None:
            keys.append(None)
            values.append(None)
            continue
        where = f"request {request_id}, layer {number}"
        try:
            if name is None and isinstance(cache, torch.Tensor):
                name = _layout_of(cache, block_size, head_dim, cpu_engine)
            key, value = _planes(cache, block_size, name, head_dim)
        except LayoutError as error:
            raise LayoutError(f"{where}: {error}") from error
        count = min(len(plane.view) for plane in (key, value) if plane is not None)
        if blocks and max(blocks) >= count:
            raise ValueError(f"{where}: block {max(blocks)} is not one of {count}")
        keys.append(_gather(key, blocks, seq_len))
        values.append(None if value is None else _gather(value, blocks, seq_len))
    if all(key is None for key in keys):
        raise ValueError(f"request {request_id}: no layer has a KV cache")
    metadata: dict[str, Any] = {
        "block_size": block_size,
        "num_layers": len(kv_caches),
        "dtype": str(cache_dtype),
        "seq_len": seq_len,
    }
    extracted = KVCacheTransferData(
        request_id=request_id,
        layer_blocks={"key_cache": keys, "value_cache": values},
        block_ids=blocks,
        metadata=metadata
        | (custom_metadata or {})
        | {contract.CONTRACT_KEY: contract.CONTRACT_VERSION},
    )
    try:
        contract.validate(vars(extracted), request_id)
    except ValueError:
        # A latent has no value, for one.
        del extracted.metadata[contract.CONTRACT_KEY]
    return extracted


def _block_ids(request_id: str, block_ids: Sequence[int], needed: int) -> list[int]:
    try:
        blocks = [operator.index(block) for block in block_ids][:needed]
    except TypeError as error:
        raise TypeError(
            f"request {request_id}: block ids must be one flat list of integers, which all the "
            f"layers share ({error})"
        ) from error
    if blocks and min(blocks) < 0:
        raise ValueError(f"request {request_id}: block {min(blocks)} does not exist")
    return blocks


def _layouts(layout: Layouts, layers: int) -> list[KVLayout | None]:
    names = [layout] * layers if layout is None or isinstance(layout, str) else list(layout)
    if len(names) != layers:
        raise LayoutError(f"{len(names)} layouts for {layers} layers")
    try:
        return [None if name is None else KVLayout(name) for name in names]
    except ValueError as error:
        raise LayoutError(f"{error}; known are {', '.join(KVLayout)}") from error


def _gather(plane: _Plane, blocks: list[int], seq_len: int) -> torch.Tensor:
    view = _widest(plane.view)
    index = torch.tensor(blocks, dtype=torch.int64, device=view.device)
    tokens = view.index_select(0, index).view(plane.view.dtype)
    tokens = tokens.reshape(-1, plane.heads * plane.dim)[:seq_len]
    return tokens.view(seq_len, plane.heads, plane.dim)


def _widest(view: torch.Tensor) -> torch.Tensor:
    """View the same bytes as the largest integers possible: fewer elements are copied faster.

    And not every kernel supports every 8-bit float.
    """
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if dtype.itemsize >= view.dtype.itemsize:
            try:
                return view.view(dtype)
            except RuntimeError:
                # What is adjacent in the view is not adjacent in memory.
                continue
    return view


def _planes(
    cache: LayerKV, block_size: int, layout: KVLayout | None, head_dim: int | None
) -> tuple[_Plane, _Plane | None]:
    if isinstance(cache, torch.Tensor):
        assert layout is not None
        return _split(cache, block_size, layout, head_dim)
    pair: object = cache
    if not isinstance(pair, tuple | list) or len(pair) != 2 or layout is not None:
        raise LayoutError(
            f"a {type(pair).__name__} is not what layout {layout} holds; expected a tensor, "
            f"or key and value with no layout named"
        )
    key, value = pair
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise LayoutError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} are not both "
            f"(blocks, tokens, heads, dim)"
        )
    return _tokens(key, block_size), _tokens(value, block_size)


def _layout_of(
    cache: torch.Tensor, block_size: int, head_dim: int | None, cpu_engine: bool
) -> KVLayout:
    """The only layout that a shape fits."""
    shape = tuple(cache.shape)
    packed = (KVLayout.CPU_VEC, KVLayout.CPU_AMX) if cpu_engine else (KVLayout.PACKED,)
    fitting: list[KVLayout] = []
    if len(shape) == 5 and shape[2] == block_size:
        if shape[0] == 2:
            fitting.append(KVLayout.KV_FIRST)
        if shape[1] == 2:
            fitting.append(KVLayout.BLOCKS_FIRST)
    elif len(shape) == 4 and shape[2] == block_size:
        # A single head may be a latent, unless its width shows that it is not.
        if shape[1] == 1 and head_dim in (None, shape[3]):
            fitting.append(KVLayout.LATENT)
        if shape[3] != head_dim:
            fitting.extend(packed)
    elif len(shape) == 3 and shape[1] == block_size:
        fitting.append(KVLayout.LATENT)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise LayoutError(
            f"a cache of {shape} may be {' or '.join(fitting)}; name its layout (`kv_layout`)"
        )
    raise LayoutError(f"a cache of {shape} has no known layout with blocks of {block_size} tokens")


def _split(
    cache: torch.Tensor, block_size: int, layout: KVLayout, head_dim: int | None
) -> tuple[_Plane, _Plane | None]:
    shape = tuple(cache.shape)
    refused = LayoutError(f"a cache of {shape} is not {layout} with blocks of {block_size} tokens")
    match layout, shape:
        case KVLayout.KV_FIRST, (2, _, _, _, _):
            return _tokens(cache[0], block_size), _tokens(cache[1], block_size)
        case KVLayout.BLOCKS_FIRST, (_, 2, _, _, _):
            return _tokens(cache[:, 0], block_size), _tokens(cache[:, 1], block_size)
        case KVLayout.LATENT, (_, _, _):
            return _tokens(cache.unsqueeze(2), block_size), None
        case KVLayout.LATENT, (_, 1, _, _):
            return _tokens(cache.transpose(1, 2), block_size), None
        case KVLayout.PACKED, (_, _, _, content):
            width = head_dim
            if width is None:
                width, odd = divmod(content, 2)
                if odd:
                    raise refused
            if not 0 < width < content:
                raise LayoutError(f"keys of {width} elements leave no value in {shape}")
            tokens = cache.transpose(1, 2)
            return (
                _tokens(tokens[..., :width], block_size),
                _tokens(tokens[..., width:], block_size),
            )
        case ((KVLayout.CPU_VEC | KVLayout.CPU_AMX), (_, _, tokens, content)):
            if tokens != block_size or content % 2 or head_dim not in (None, content // 2):
                raise refused
            return _cpu_planes(cache, layout)
    raise refused


def _tokens(view: torch.Tensor, block_size: int) -> _Plane:
    if view.shape[1] != block_size:
        raise LayoutError(f"blocks of {view.shape[1]} tokens, not of {block_size}")
    return _Plane(view, view.shape[2], view.shape[3])


def _cpu_planes(cache: torch.Tensor, layout: KVLayout) -> tuple[_Plane, _Plane]:
    """Split (B, H, N, C) as vLLM's CPU kernels do: the first half of a head's elements is keys."""
    _, heads, tokens, content = cache.shape
    dim = content // 2
    try:
        halves = cache.view(*cache.shape[:2], 2, tokens * dim)
    except RuntimeError as error:
        raise LayoutError(f"the tokens of a head do not lie together: {error}") from error
    key, value = halves[:, :, 0], halves[:, :, 1]
    head = cache.shape[:2]
    if layout is KVLayout.CPU_VEC:
        key = key.view(*head, dim, tokens).permute(0, 3, 1, 2)
        value = value.view(*head, tokens, dim).permute(0, 2, 1, 3)
    else:
        itemsize = cache.dtype.itemsize
        if itemsize not in (2, 4) or tokens % 16 or dim % 16:
            raise LayoutError(f"{tuple(cache.shape)} of {cache.dtype} does not consist of tiles")
        # A row of a tile has 16 columns; each holds the neighbours that make up 4 bytes.
        row = 4 // itemsize
        key = key.view(*head, tokens // 16, dim // row, 16, row).permute(0, 2, 4, 1, 3, 5)
        value = value.view(*head, dim // 16, tokens // row, 16, row).permute(0, 3, 5, 1, 2, 4)
    return _Plane(key, heads, dim), _Plane(value, heads, dim)
