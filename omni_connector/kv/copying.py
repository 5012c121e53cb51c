# SPDX-License-Identifier: Apache-2.0
"""Copying blocks of a KV cache into slots and back: on the host, and the choice of copier."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import CanonicalKVCaches
from omni_connector.kv.copier import BlockCopier, stretches
from omni_connector.kv.cuda import CudaLane
from omni_connector.kv.runs import Run, padding_of, reserved_of, runs_of, split
from omni_connector.kv.slots import SlotLayout
from omni_connector.kv.staging import StagedCopier

__all__ = ["BlockCopier", "CpuCopier", "make_copier"]

_HASHED_BYTES = 512 * 1024
"""Bytes copied before they are hashed: few enough to be still in the core's own cache."""

_COPIED_BYTES = 4 * 1024 * 1024
"""Bytes copied between two looks at whether the copy is still wanted."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of all blocks `(num_blocks, *counts, row_bytes)`, and its bytes of a slot."""

    blocks: NDArray[np.uint8]
    first: int
    end: int


class CpuCopier(BlockCopier):
    """Copies a KV cache in the host's memory, on the calling thread, without holding the GIL."""

    def __init__(self, canonical: CanonicalKVCaches, layout: SlotLayout) -> None:
        super().__init__(canonical, layout)
        buffers = {}
        for tensor in canonical.tensors:
            storage = tensor.tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            buffers[storage.data_ptr()] = whole.numpy()
        groups = range(len(layout.group_bytes))
        runs = [runs_of(canonical, layout, group) for group in groups]
        self._padding = [
            [self._part(run, buffers).blocks for run in padding_of(canonical, group)]
            for group in groups
        ]
        self._reserved = [
            [self._part(run, buffers).blocks for run in reserved_of(canonical, group)]
            for group in groups
        ]
        self._whole = [[self._part(run, buffers) for run in group] for group in runs]
        self._hashed = [
            [self._part(part, buffers) for run in group for part in split(run, _HASHED_BYTES)]
            for group in runs
        ]

    def _part(self, run: Run, buffers: dict[int, NDArray[np.uint8]]) -> _Part:
        blocks: NDArray[np.uint8] = np.ndarray(
            (self._num_blocks, *run.counts, run.row_bytes),
            np.uint8,
            buffers[run.storage],
            run.start,
            (run.block_stride, *(distance for _, distance in run.dims), 1),
        )
        return _Part(blocks, run.slot_offset, run.slot_offset + run.nbytes)

    def fence(self) -> None:
        return None

    def pin(self, slots: NDArray[np.uint8]) -> None:
        """Do nothing: the host reads all of its memory equally well."""

    def save(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
        *,
        checksum: bool,
        fence: object = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> NDArray[np.uint64] | None:
        blocks, targets = self._checked(group, block_ids, slots, slot_ids, saving=True)
        return self._copy(group, blocks, slots, targets, checksum, True, cancelled)

    def load(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
        *,
        checksum: bool,
        fence: object = None,
    ) -> NDArray[np.uint64]:
        blocks, sources = self._checked(group, block_ids, slots, slot_ids, saving=False)
        sums = self._copy(group, blocks, slots, sources, checksum, False, None)
        assert sums is not None  # only a cancelled copy has none
        return sums

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        ids = self._checked_blocks(group, block_ids, unique=False)
        for block, _, count in stretches(ids, ids, len(ids)):
            for reserved in self._reserved[group]:
                reserved[block : block + count] = 0

    def close(self) -> None:
        self._whole = []
        self._hashed = []
        self._padding = []
        self._reserved = []

    def _copy(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
        checksum: bool,
        saving: bool,
        cancelled: Callable[[], bool] | None,
    ) -> NDArray[np.uint64] | None:
        size = self._layout.group_bytes[group]
        limit = max(1, (_HASHED_BYTES if checksum else _COPIED_BYTES) // max(1, size))
        pairs = [
            (part.blocks, _rows(slots, part), slots[:, part.first : part.end])
            for part in (self._hashed if checksum else self._whole)[group]
        ]
        stored = slots[:, :size]
        sums = np.zeros(len(block_ids), np.uint64)
        at = 0
        for block, slot, count in stretches(block_ids, slot_ids, limit):
            if cancelled is not None and cancelled():
                return None
            # A slot is hashed after it was copied, never before: a slot that is rewritten
            # during a load then fails its checksum instead of passing with other bytes.
            digest = xxhash.xxh3_64() if checksum and len(pairs) > 1 and count == 1 else None
            for blocks, rows, flat in pairs:
                if saving:
                    rows[slot : slot + count] = blocks[block : block + count]
                else:
                    blocks[block : block + count] = rows[slot : slot + count]
                if digest is not None:
                    digest.update(flat[slot].data)
            if digest is not None:
                sums[at] = digest.intdigest()
            elif checksum:
                for i in range(count):
                    sums[at + i] = xxhash.xxh3_64_intdigest(stored[slot + i].data)
            if not saving:
                for padding in self._padding[group]:
                    padding[block : block + count] = 0
            at += count
        return sums


def _rows(slots: NDArray[np.uint8], part: _Part) -> NDArray[np.uint8]:
    """View a part of all slots in the shape of its blocks; splitting an axis never copies."""
    return slots[:, part.first : part.end].reshape(slots.shape[0], *part.blocks.shape[1:])


def make_copier(canonical: CanonicalKVCaches, layout: SlotLayout) -> BlockCopier:
    """The copier for the device that the KV cache lies on.

    Raises:
        LayoutError: a device that is neither a CPU nor a CUDA device.
    """
    device = canonical.tensors[0].tensor.device
    if device.type == "cpu":
        return CpuCopier(canonical, layout)
    if device.type == "cuda":
        return StagedCopier(canonical, layout, CudaLane(device))
    raise LayoutError(f"a KV cache on {device} cannot be copied: expected cpu or cuda")
