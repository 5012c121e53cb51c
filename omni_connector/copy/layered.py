# SPDX-License-Identifier: Apache-2.0
"""Saving blocks layer by layer, while the forward pass that fills them computes the next layers.

A slot holds the layers of a block one after the other, so the bytes of one layer are consecutive.
The copier sees each such range as a group of its own, and the checksum of a slot grows with them.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy, Landed
from omni_connector.copy.threads import UNTIL_NOTIFIED
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.kv.convert import PageRun
from omni_connector.kv.spans import BlockSpans
from omni_connector.runtime.trace import Trace, now


class Forward:
    """How far the forward pass of a step has come.

    The engine's thread updates it, the thread that copies reads it.

    Attributes:
        ended: whether all of it has been launched. No slot is published before, because a runner
            may compute a layer again, for other tokens of the step.
        fence: the copier's, which marks the end of the pass; None before `ended`.
        again: layers that were computed more than once.

    Args:
        not_followed: layers that are copied when the pass has ended, as they will be computed more
            than once: a drafter of k tokens computes its layers k times.
    """

    def __init__(self, not_followed: Collection[str] = ()) -> None:
        self.ended = False
        self.fence: object = None
        self.again: set[str] = set()
        self._computed: dict[str, tuple[int, object]] = {}  # the number and fence of each layer
        self._not_followed = frozenset(not_followed)

    @classmethod
    def of(cls, fence: object) -> "Forward":
        """`fence` itself if it is a pass; else a pass that has ended, with this fence."""
        if isinstance(fence, cls):
            return fence
        over = cls()
        over.end(fence)
        return over

    def computed(self, layer: str, fence: object) -> None:
        """The KV of a layer has been computed; `fence` marks that."""
        if layer in self._computed:
            self.again.add(layer)
        self._computed[layer] = len(self._computed), fence

    def end(self, fence: object) -> None:
        """The whole pass has been launched, also layers without a call of `computed`."""
        self.fence = fence
        self.ended = True

    def has(self, layers: frozenset[str]) -> bool:
        """Whether all of these layers are computed and followed; False for no layers."""
        return (
            bool(layers)
            and layers <= self._computed.keys()
            and layers.isdisjoint(self._not_followed)
        )

    def fence_of(self, layers: frozenset[str]) -> object:
        """The fence that marks some layers, all of which are computed. A device is up to a whole
        pass behind the launches, so a copy must not wait for a later layer than its own."""
        return max((self._computed[layer] for layer in layers), key=itemgetter(0))[1]

    def repeated(self, layers: frozenset[str]) -> bool:
        """Whether one of these was computed again after the first time."""
        return not layers.isdisjoint(self.again)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """One layer's bytes of a slot.

    Attributes:
        number: of the group that the copier knows it as.
        first, end: its bytes of the slot.
        layers: the names of the layer; several where others read its cache.
    """

    number: int
    first: int
    end: int
    layers: frozenset[str]


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """The layers of a KV cache's groups.

    Attributes:
        canonical, layout: the KV cache and its slots, for a copier: with a group for each
            layer range after the real ones. A range is copied to and from a view of the slots,
            `slots[:, first:end]`.
        of_groups: for each real group its layer ranges, in slot order.
    """

    canonical: CanonicalKVCaches
    layout: SlotLayout
    of_groups: tuple[tuple[LayerRange, ...], ...]

    @classmethod
    def of(
        cls,
        canonical: CanonicalKVCaches,
        layout: SlotLayout,
        addresses: Sequence[Mapping[str, int]],
    ) -> "LayerRanges":
        """Find the layers' bytes.

        Args:
            canonical: the KV cache.
            layout: its slots.
            addresses: for each group where the bytes of each layer begin, in block 0.
        """
        pages = list(canonical.pages)
        sizes = list(layout.group_bytes)
        of_groups = []
        for group_pages, group_addresses in zip(canonical.pages, addresses, strict=True):
            layer_ranges = []
            for page in group_pages:
                at = page.storage + page.start
                layers = frozenset(name for name, each in group_addresses.items() if each == at)
                end = page.slot_offset + page.nbytes
                layer_ranges.append(LayerRange(len(pages), page.slot_offset, end, layers))
                pages.append((replace(page, slot_offset=0),))
                sizes.append(page.nbytes)
            of_groups.append(tuple(layer_ranges))
        return cls(
            replace(canonical, pages=tuple(pages)),
            SlotLayout(tuple(sizes), layout.slot_bytes),
            tuple(of_groups),
        )


class LayeredSave:
    """The copies of one save.

    Args:
        copier, layer_ranges: of the KV cache; the copier was made for the layer ranges.
        checksum: whether slots have checksums.
        forward: the pass that fills the blocks.
        blocks: what is copied.
        slots: `(n_slots, slot_bytes)`, writable.
        slot_ids: the slot of each of `blocks.block_ids`, unused for a null block.
    """

    def __init__(
        self,
        copier: BlockCopier,
        layer_ranges: LayerRanges,
        checksum: bool,
        forward: Forward,
        blocks: BlockSpans,
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
    ) -> None:
        self._copier = copier
        self._layer_ranges = layer_ranges.of_groups
        self._forward = forward
        self._block_ids = blocks.block_ids
        self._slots = slots
        self._slot_ids = slot_ids
        whole = [max(1, len(blocks.block_ids))] * len(blocks.group_sizes)
        self._places = dict(blocks.batches(whole))
        self._checksum = checksum
        self._states: dict[int, NDArray[np.uint64] | None] = {}
        self._sums = np.zeros(len(slot_ids), np.uint64)
        self._digests: dict[int, xxhash.xxh3_64] = {}
        self._done = [0] * len(self._layer_ranges)

    def follow(self, cancelled: Callable[[], bool]) -> Generator[bool | float, None, int]:
        """Copy layers that are computed until the forward pass has ended; see `Work`.

        A layer is copied after the layers that lie before it in the slot. On a device the pass has
        ended when its work is done, which may be long after its last launch.

        Returns:
            The bytes copied.
        """
        copied = 0
        forward = self._forward
        while not cancelled() and not (forward.ended and self._copier.reached(forward.fence)):
            group = self._next_group()
            if group is None:
                if forward.ended:
                    break
                yield UNTIL_NOTIFIED
                continue
            layer_range = self._layer_ranges[group][self._done[group]]
            fence = forward.fence_of(layer_range.layers)
            for batch in self._batches(self._places[group], layer_range):
                if not self._copy(group, layer_range, batch, fence, cancelled):
                    return copied
                copied += len(batch) * (layer_range.end - layer_range.first)
                yield True
            self._done[group] += 1
        return copied

    def _batches(
        self, places: NDArray[np.int64], layer_range: LayerRange
    ) -> Iterator[NDArray[np.int64]]:
        """Places of blocks of which one layer is copied at once."""
        count = max(1, self._copier.layer_bytes // (layer_range.end - layer_range.first))
        for first in range(0, len(places), count):
            yield places[first : first + count]

    def _next_group(self) -> int | None:
        """A group whose next layer is computed."""
        for group in self._places:
            left = self._layer_ranges[group][self._done[group] :]
            if left and self._forward.has(left[0].layers):
                return group
        return None

    def finish(
        self,
        group: int,
        places: NDArray[np.int64],
        cancelled: Callable[[], bool],
        landed: Landed,
    ) -> bool:
        """Copy what is left of some blocks of a group, once the forward pass has ended.

        Args:
            group: the blocks' group.
            places: of the blocks, among all of the save.
            cancelled, landed: see `BlockCopier.save`.

        Returns:
            False if cancelled.
        """
        layer_ranges = self._layer_ranges[group]
        done = self._done[group]
        if not done or any(self._forward.repeated(each.layers) for each in layer_ranges[:done]):
            return self._save_whole(group, places, cancelled, landed)
        for layer_range in layer_ranges[done:]:
            for batch in self._batches(places, layer_range):
                if not self._copy(group, layer_range, batch, self._forward.fence, cancelled):
                    return False
        landed(slice(0, len(places)), self._checksums(group, places))
        return True

    def _checksums(self, group: int, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Of blocks all of whose layers are copied."""
        if self._checksum and self._states.get(group) is None:
            digests = [self._digests[place].intdigest() for place in places.tolist()]
            return np.array(digests, np.uint64)
        return self._sums[places]

    def _save_whole(
        self,
        group: int,
        places: NDArray[np.int64],
        cancelled: Callable[[], bool],
        landed: Landed,
    ) -> bool:
        """Copy whole slots, whatever was copied of them before."""
        some = _span(places)
        ids = self._block_ids[some], self._slots, self._slot_ids[some]
        whole = BlockCopy(group, *ids, self._checksum, self._forward.fence)
        return self._copier.save(whole, cancelled=cancelled, landed=landed) is not None

    def _copy(
        self,
        group: int,
        layer_range: LayerRange,
        places: NDArray[np.int64],
        fence: object,
        cancelled: Callable[[], bool],
    ) -> bool:
        some = _span(places)
        bytes_of_it = self._slots[:, layer_range.first : layer_range.end]
        slot_ids = self._slot_ids[some]
        if self._checksum and group not in self._states:
            numbers = [each.number for each in self._layer_ranges[group]]
            self._states[group] = self._copier.begin(numbers, self._slots, len(self._slot_ids))
        states = self._states.get(group)
        of_these = None if states is None else states[some]
        ids = self._block_ids[some], bytes_of_it, slot_ids
        goes_on = states is not None
        copy = BlockCopy(layer_range.number, *ids, goes_on, fence, of_these)
        copied = self._copier.save(copy, cancelled=cancelled)
        if copied is None:
            return False
        if states is not None and of_these is not None:
            states[some] = of_these
            self._sums[some] = copied
        elif self._checksum:
            for place, slot in zip(places.tolist(), slot_ids.tolist(), strict=True):
                self._digests.setdefault(place, xxhash.xxh3_64()).update(bytes_of_it[slot].data)
        return True


class TracedCopier(BlockCopier):
    """A copier each of whose copies becomes a span of a trace.

    Args:
        inner: the copier that copies, made for the layer ranges.
        layer_ranges: of the KV cache.
        trace: takes the spans.
    """

    def __init__(self, inner: BlockCopier, layer_ranges: LayerRanges, trace: Trace) -> None:
        super().__init__(layer_ranges.layout)
        self.speed = inner.speed
        self.layer_bytes = inner.layer_bytes
        self.pinned_at_once = inner.pinned_at_once
        self._inner = inner
        self._trace = trace
        self._layers = {
            layer_range.number: " ".join(sorted(layer_range.layers)) or "padding"
            for group in layer_ranges.of_groups
            for layer_range in group
        }

    def fence(self) -> object:
        return self._inner.fence()

    def reached(self, fence: object) -> bool:
        return self._inner.reached(fence)

    def begin(
        self, groups: Sequence[int], slots: NDArray[np.uint8], count: int
    ) -> NDArray[np.uint64] | None:
        return self._inner.begin(groups, slots, count)

    def load_pages(
        self, copy: BlockCopy, runs: Sequence[PageRun], length: int
    ) -> NDArray[np.uint64] | None:
        began = now()
        checksums = self._inner.load_pages(copy, runs, length)
        if checksums is not None:
            blocks = len(copy.block_ids)
            size = blocks * sum(run.nbytes for run in runs)
            self._trace.span("load part", began, group=copy.group, blocks=blocks, bytes=size)
        return checksums

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        began = now()
        self._inner.zero(group, block_ids, fence=fence)
        self._trace.span("zero", began, group=group, blocks=len(block_ids))

    def pin(self, slots: NDArray[np.uint8]) -> int:
        return self._inner.pin(slots)

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        self._inner.unpin(slots)

    def close(self) -> None:
        self._inner.close()

    def _copy(
        self,
        copy: BlockCopy,
        saving: bool,
        cancelled: Callable[[], bool] | None,
        landed: Landed | None,
    ) -> NDArray[np.uint64] | None:
        began = now()
        if saving:
            checksums = self._inner.save(copy, cancelled=cancelled, landed=landed)
        else:
            checksums = self._inner.load(copy)
        layer = self._layers.get(copy.group)
        blocks = len(copy.block_ids)
        self._trace.span(
            "save part" if saving else "load part",
            began,
            group=copy.group if layer is None else None,
            layer=layer,
            blocks=blocks,
            bytes=blocks * self._layout.group_bytes[copy.group],
        )
        return checksums


def _span(places: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Places, which ascend, as a slice if none between them is left out. A slice of an array is a
    view, and no copy."""
    first = int(places[0])
    end = int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else places
