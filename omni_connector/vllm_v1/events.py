# SPDX-License-Identifier: Apache-2.0
"""KV events: what vLLM publishes of the blocks in the own arena and in the store."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as _external

from omni_connector.kv.shapes import GroupShape
from omni_connector.memory.slot_pool import SlotPool
from omni_connector.prefix.block_changes import BlockChange, BlockChanges

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Before 0.32 keys have no tags that would have to be taken away.
_untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)

# vLLM's names of media, and where they are as seen from this engine.
_PLACES: Final = (("CPU", "LOCAL"), ("STORAGE", None))


class KVEvents:
    """Makes vLLM's events of what changes in the arena and in the store.

    `AllBlocksCleared` names no medium, and vLLM publishes it itself when its cache is reset. So
    what is void then is told block by block. A second `AllBlocksCleared` at the end of the step
    would take away what vLLM has cached since.

    Args:
        pool: see `BlockChanges`.
        groups: what this engine keeps.
        group_ids: index of each among vLLM's groups.
        hash_block_size: tokens of one of a request's hashes.

    Attributes:
        changes: is told of them.
    """

    def __init__(
        self,
        pool: SlotPool | None,
        groups: Sequence[GroupShape],
        group_ids: Sequence[int],
        hash_block_size: int,
    ) -> None:
        self._sizes = [shape.block_size for shape in groups]
        self._group_ids = group_ids
        self._hash_block_size = hash_block_size
        self.changes: BlockChanges[BlockStored] = BlockChanges(pool, self._sizes, self._describe)

    def _describe(self, request: "Request", group: int, index: int) -> BlockStored:
        size = self._sizes[group]
        start, end = index * size, (index + 1) * size
        hashes = request.block_hashes
        parent = _external(hashes[start // self._hash_block_size - 1]) if start else None
        # vLLM would look at all images from the one that it is given on.
        image = bisect_right(
            request.mm_features, start, key=lambda e: e.mm_position.offset + e.mm_position.length
        )
        keys, _ = generate_block_hash_extra_keys(request, start, end, image)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[_external(hashes[end // self._hash_block_size - 1])],
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=size,
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            medium=None,
            **_known(
                BlockStored,
                extra_keys=_untagged([keys]),
                group_idx=self._group_ids[group],
                session_id=getattr(request, "session_id", None),
            ),
        )

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        return [self._event(change) for change in self.changes.take()]

    def _event(self, change: BlockChange[BlockStored]) -> KVCacheEvent:
        medium, locality = _PLACES[change.in_store]
        event = change.content or BlockRemoved(
            block_hashes=[_external(BlockHash(change.block_hash))],
            medium=medium,
            **_known(BlockRemoved, group_idx=self._group_ids[change.group]),
        )
        for name, value in _known(type(event), medium=medium, locality=locality).items():
            setattr(event, name, value)
        return event


def _known(event: type[KVCacheEvent], **fields: Any) -> dict[str, Any]:
    """Those of these fields that events of this version of vLLM have."""
    return {name: value for name, value in fields.items() if name in event.__struct_fields__}
