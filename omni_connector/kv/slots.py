# SPDX-License-Identifier: Apache-2.0
"""What a slot holds: one block of one group, all its layers, packed without gaps."""

from dataclasses import dataclass
from itertools import accumulate

from omni_connector.kv.canonical import CanonicalKVCaches

SLOT_ALIGNMENT = 4096
"""Bytes of which a slot's size is a multiple: a memory page."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where a block's bytes lie in a slot.

    Args:
        group_bytes: for each group the bytes of one block; they start at the slot's first byte.
        slot_bytes: bytes of every slot: the largest group's, rounded up to a memory page.
        ref_offsets: for each group the offset into the slot of each of its refs, in bytes.
    """

    group_bytes: tuple[int, ...]
    slot_bytes: int
    ref_offsets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, canonical: CanonicalKVCaches) -> "SlotLayout":
        """Lay out the slots of a KV cache: each group's refs one after the other."""
        ends = [
            list(accumulate((ref.page_size_bytes for ref in refs), initial=0))
            for refs in canonical.group_data_refs
        ]
        group_bytes = tuple(end[-1] for end in ends)
        return cls(
            group_bytes=group_bytes,
            slot_bytes=-(-max(group_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT,
            ref_offsets=tuple(tuple(end[:-1]) for end in ends),
        )
