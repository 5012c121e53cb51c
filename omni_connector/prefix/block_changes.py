# SPDX-License-Identifier: Apache-2.0
"""Blocks that have come to the own arena or to the store, or have gone from there: for KV events.

The arena's blocks are known at any time. Those of the store are known from look-ups: a block counts
as stored from the look-up that finds it until one that does not.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

from omni_connector.arena.slot_pool import SlotPool
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.stores.shared_blocks import BlockName

Content = TypeVar("Content")

_MAX_TOKENS: Final = 1 << 19
"""Tokens of filled blocks whose contents are kept until their copies end, which bounds memory."""

_MAX_STORED: Final = 1 << 16
"""Blocks that count as stored at most, which bounds memory. Of more, the ones found longest ago are
reported as gone."""


class BlockChange(NamedTuple, Generic[Content]):
    """A block has come, or has gone.

    Attributes:
        in_store: True for the store, False for the own arena.
        group: of the block, among the transferred ones.
        block_hash: vLLM's.
        content: of a block that has come; None for one that has gone.
    """

    in_store: bool
    group: int
    block_hash: bytes
    content: Content | None


class BlockChanges(Generic[Content]):
    """Collects the changes of arena and store. The engine's thread calls this.

    A block whose content is not known is not reported, neither when it comes nor when it goes.

    Args:
        pool: of the own arena; None without an arena. Its changes are reported if its listing notes
            them, so not where the arena is for hand-offs alone.
        block_sizes: tokens of a block of each group.
        describe: makes the contents of blocks of a request, from their group and their ascending
            indices.
    """

    def __init__(
        self,
        pool: SlotPool | None,
        block_sizes: Sequence[int],
        describe: Callable[[Any, int, Sequence[int]], Sequence[Content]],
    ) -> None:
        self._pool = pool
        self._describe = describe
        most = max(1, _MAX_TOKENS // min(block_sizes))
        # Blocks that have filled and are not in the arena yet: a number by which they are sorted,
        # vLLM's hash, and the content.
        self._filled: BoundedMap[BlockName, tuple[int, bytes, Content]] = BoundedMap(most)
        self._number = 0
        self._in_slot: dict[int, BlockName] = {}
        self._slots_of: Counter[BlockName] = Counter()
        # Blocks that were reported, in the arena and in the store, with vLLM's hash.
        self._kept: dict[BlockName, bytes] = {}
        self._again: set[BlockName] = set()  # in the arena, and to be reported once more
        self._stored: OrderedDict[BlockName, bytes] = OrderedDict()
        self._untold: list[BlockChange[Content]] = []

    def filled(self, request: Any, group: int, blocks: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Blocks of a request have filled, and may be copied into the arena.

        Args:
            blocks: index, key in the arena and vLLM's hash of each, in order.
        """
        new = [
            each
            for each in blocks
            if (group, each[1]) not in self._kept or self._lost((group, each[1]))
        ]
        contents = self._describe(request, group, [index for index, _, _ in new])
        for (_, key, block_hash), content in zip(new, contents, strict=True):
            self._number += 1
            self._filled[group, key] = self._number, block_hash, content
            if self._slots_of[group, key]:
                self._again.add((group, key))

    def unreported(self, group: int, key: bytes) -> bool:
        """Whether the arena has a block that is not reported as kept."""
        name = group, key
        return name not in self._kept and self._slots_of.get(name, 0) > 0

    def _lost(self, name: BlockName) -> bool:
        """Whether the arena has evicted a block that `take` has reported as kept."""
        if self._pool is None or self._pool.listing is None:
            return False
        with self._pool.lock:
            changes = self._pool.listing.changes
            return changes is not None and changes.lost(*name)

    def looked_up(
        self,
        request: Any,
        group: int,
        blocks: Sequence[tuple[bytes, bytes]],
        held: Iterable[bool],
    ) -> None:
        """A look-up has answered which blocks of a prompt the store holds, from the first on.

        Args:
            blocks: name in the store and vLLM's hash of each.
        """
        new: list[int] = []
        for index, ((key, block_hash), there) in enumerate(zip(blocks, held, strict=False)):
            name = (group, key)
            if not there:
                self._lose(name)
            elif name in self._stored:
                self._stored.move_to_end(name)
            else:
                self._stored[name] = block_hash
                new.append(index)
        contents = self._describe(request, group, new)
        self._untold += [
            BlockChange(True, group, blocks[index][1], content)
            for index, content in zip(new, contents, strict=True)
        ]
        while len(self._stored) > _MAX_STORED:
            self._lose(next(iter(self._stored)))

    def _lose(self, name: BlockName) -> None:
        block_hash = self._stored.pop(name, None)
        if block_hash is not None:
            self._untold.append(BlockChange(True, name[0], block_hash, None))

    def void(self) -> None:
        """Report all blocks as gone: the weights have changed, or vLLM has told its readers that
        all blocks are cleared, which names no medium. Blocks that are still in the arena are
        reported again when a request has them next."""
        for name in sorted(self._stored, key=itemgetter(0)):
            self._lose(name)
        self._untold += self._all_gone()

    def _all_gone(self) -> list[BlockChange[Content]]:
        gone = [BlockChange(False, name[0], h, None) for name, h in self._kept.items()]
        self._kept.clear()
        return sorted(gone, key=attrgetter("group"))

    def take(self) -> list[BlockChange[Content]]:
        """The changes since the last call, in an order that a consumer can apply one by one.

        In the arena, blocks that have gone come first, sorted by group; then blocks that have come,
        each prompt's in its order.
        """
        told = self._untold
        self._untold = []
        listing = None if self._pool is None else self._pool.listing
        if self._pool is not None and listing is not None and listing.changes is not None:
            with self._pool.lock:
                cleared, changed = listing.changes.take()
            told += self._of_arena(cleared, changed)
        return told

    def _of_arena(
        self, cleared: bool, changed: Mapping[int, BlockName | None]
    ) -> list[BlockChange[Content]]:
        told: list[BlockChange[Content]] = []
        if cleared:
            told = self._all_gone()
            self._in_slot.clear()
            self._slots_of.clear()
        touched = self._again
        self._again = set()
        for slot, name in changed.items():
            before = self._in_slot.pop(slot, None)
            if before is not None:
                self._slots_of[before] -= 1
                touched.add(before)
            if name is not None:
                self._in_slot[slot] = name
                self._slots_of[name] += 1
                touched.add(name)
        new: list[tuple[int, BlockChange[Content]]] = []
        for name in touched:
            if self._slots_of[name]:
                if name not in self._kept and name in self._filled:
                    number, block_hash, content = self._filled.pop(name)
                    self._kept[name] = block_hash
                    new.append((number, BlockChange(False, name[0], block_hash, content)))
            else:
                del self._slots_of[name]
                if name in self._kept:
                    told.append(BlockChange(False, name[0], self._kept.pop(name), None))
        told.sort(key=attrgetter("group"))
        new.sort(key=itemgetter(0))
        return told + [change for _, change in new]
