# SPDX-License-Identifier: Apache-2.0
"""KV events: what vLLM publishes of the blocks in the own arena and in the store."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as _external

from omni_connector.arena.slot_pool import SlotPool
from omni_connector.kv.shapes import GroupShape
from omni_connector.prefix.block_changes import BlockChange, BlockChanges

if TYPE_CHECKING:
    from vllm.v1.request import Request

# From 0.31 on keys have tags, which events do not tell.
_untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)

# vLLM's names of media, and where they are as seen from this engine.
_PLACES: Final[Sequence[dict[str, Any]]] = (
    {"medium": "CPU", "locality": "LOCAL"},
    {"medium": "STORAGE", "locality": None},
)


class _Block(NamedTuple):
    """What events say of a block. `of` has the fields that all blocks of its request share."""

    parent: BlockHash | None
    block_hash: BlockHash
    token_ids: "array[int]"  # 4 bytes each: it is kept as long as the block is
    extra_keys: Any
    of: dict[str, Any]


class KVEvents:
    """Makes vLLM's events of what changes in the arena and in the store.

    As vLLM's own do, one event tells of consecutive blocks of a request.

    `AllBlocksCleared` names no medium, and vLLM publishes it itself when its cache is reset. So
    all that was told is taken back then block by block, and what is still there is told again once
    it is known to be of the engine's weights. A second `AllBlocksCleared` at the end of the step
    would take away what vLLM has cached since.

    Args:
        pool: see `BlockChanges`.
        groups: what this engine keeps.
        group_ids: index of each among vLLM's groups.
        kinds: of each of vLLM's groups the kind of its spec, and its window if it has one, as
            vLLM's own events have them: routers count main attention alone.
        hash_block_size: tokens of one of a request's hashes.

    Attributes:
        changes: is told of them.
    """

    def __init__(
        self,
        pool: SlotPool | None,
        groups: Sequence[GroupShape],
        group_ids: Sequence[int],
        kinds: Sequence[tuple[str, int | None]],
        hash_block_size: int,
    ) -> None:
        self._kinds = [kinds[group_id] for group_id in group_ids]
        self._sizes = [shape.block_size for shape in groups]
        self._group_ids = group_ids
        self._hash_block_size = hash_block_size
        self.changes: BlockChanges[_Block] = BlockChanges(pool, self._sizes, self._describe)

    def _describe(self, request: "Request", group: int, indices: Sequence[int]) -> list[_Block]:
        size = self._sizes[group]
        step = size // self._hash_block_size
        hashes = request.block_hashes
        lora = request.lora_request
        of = {
            "lora_id": None if lora is None else lora.adapter_id,
            "lora_name": None if lora is None else lora.name,
            "session_id": request.session_id,
        }
        return [
            _Block(
                hashes[i * step - 1] if i else None,
                hashes[i * step + step - 1],
                array("i", request.all_token_ids[i * size : (i + 1) * size]),
                keys,
                of,
            )
            for i, keys in zip(indices, _extra_keys(request, size, indices), strict=True)
        ]

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        runs: list[list[BlockChange[_Block]]] = []
        for change in self.changes.take():
            if not (runs and _continues(runs[-1][-1], change)):
                runs.append([])
            runs[-1].append(change)
        return [self._event(run) for run in runs]

    def _event(self, run: Sequence[BlockChange[_Block]]) -> KVCacheEvent:
        group = run[0].group
        fields = _PLACES[run[0].in_store] | {"group_idx": self._group_ids[group]}
        blocks = [each.content for each in run if each.content is not None]
        if not blocks:
            hashes = [_external(BlockHash(each.block_hash)) for each in run]
            return BlockRemoved(block_hashes=hashes, **fields)
        parent = blocks[0].parent
        kind, window = self._kinds[group]
        return BlockStored(
            block_hashes=[_external(each.block_hash) for each in blocks],
            parent_block_hash=None if parent is None else _external(parent),
            token_ids=list(chain.from_iterable(each.token_ids for each in blocks)),
            block_size=self._sizes[group],
            extra_keys=_untagged([each.extra_keys for each in blocks]),
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **blocks[0].of,
            **fields,
        )


def _continues(before: BlockChange[_Block], after: BlockChange[_Block]) -> bool:
    """Whether one event can tell of both blocks."""
    if (before.in_store, before.group) != (after.in_store, after.group):
        return False
    first, next_ = before.content, after.content
    if first is None or next_ is None:
        return first is next_
    return next_.parent == first.block_hash and next_.of == first.of


def _extra_keys(request: "Request", size: int, indices: Sequence[int]) -> list[Any]:
    """For each block of `size` tokens, what its hash covers besides its tokens."""
    keys: list[Any] = []
    image = 0
    for i in indices:
        if len(keys) == 1 and request.prompt_embeds is None:
            # Mostly only the first block of a prompt has extra keys: its salt.
            end = (indices[-1] + 1) * size
            if generate_block_hash_extra_keys(request, i * size, end, image)[0] is None:
                return keys + [None] * (len(indices) - 1)
        of_block, image = generate_block_hash_extra_keys(request, i * size, (i + 1) * size, image)
        keys.append(of_block)
    return keys
