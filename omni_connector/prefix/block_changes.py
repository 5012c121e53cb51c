# SPDX-License-Identifier: Apache-2.0
"""Blocks that have come to the own arena or to the store, or have gone from there: for KV events.

The arena's blocks are known at any time. Those of the store are known from look-ups: a block counts
as stored from the look-up that finds it until one that does not.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from omni_connector.arena.slot_pool import SlotPool
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.stores.shared_blocks import BlockName


class Described(Protocol):
    """What is reported of a block."""

    @property
    def parent(self) -> bytes | None:
        """vLLM's hash of the block before it in its prompt; None for the first one."""


Content = TypeVar("Content", bound=Described)

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


class _Reported(NamedTuple, Generic[Content]):
    block_hash: bytes
    content: Content


class _Numbered(NamedTuple, Generic[Content]):
    number: int  # by which blocks that come are sorted
    block: _Reported[Content]


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
        # Blocks that have filled and are not in the arena yet.
        self._filled: BoundedMap[BlockName, _Numbered[Content]] = BoundedMap(most)
        self._number = 0
        self._in_slot: dict[int, BlockName] = {}
        self._slots_of: Counter[BlockName] = Counter()
        # Blocks that were reported, in the arena and in the store.
        self._kept: dict[BlockName, _Reported[Content]] = {}
        self._stored: OrderedDict[BlockName, _Reported[Content]] = OrderedDict()
        # To be reported once more, if it is still in the arena.
        self._again: set[BlockName] = set()
        self._returning: dict[BlockName, _Numbered[Content]] = {}
        # Blocks that readers have forgotten, in the store (True) and in the arena.
        self._forgotten: dict[bool, dict[BlockName, _Reported[Content]]] = {False: {}, True: {}}
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
            self._filled[group, key] = self._numbered(_Reported(block_hash, content))
            if self._slots_of[group, key]:
                self._again.add((group, key))

    def _numbered(self, block: _Reported[Content]) -> _Numbered[Content]:
        self._number += 1
        return _Numbered(self._number, block)

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
        for index, ((key, _), there) in enumerate(zip(blocks, held, strict=False)):
            name = (group, key)
            if not there:
                self._lose(name)
                self._forgotten[True].pop(name, None)
            elif name in self._stored:
                self._stored.move_to_end(name)
            else:
                new.append(index)
        contents = self._describe(request, group, new)
        for index, content in zip(new, contents, strict=True):
            key, block_hash = blocks[index]
            self._store((group, key), _Reported(block_hash, content))

    def _store(self, name: BlockName, block: _Reported[Content]) -> None:
        self._stored[name] = block
        self._untold.append(BlockChange(True, name[0], *block))
        while len(self._stored) > _MAX_STORED:
            self._lose(next(iter(self._stored)))

    def _lose(self, name: BlockName) -> None:
        block = self._stored.pop(name, None)
        if block is not None:
            self._untold.append(BlockChange(True, name[0], block.block_hash, None))

    def void(self) -> None:
        """Report all blocks as gone: the weights have changed."""
        self.forgotten()
        for blocks in self._forgotten.values():
            blocks.clear()

    def forgotten(self) -> None:
        """Report all blocks as gone: vLLM has told its readers that all blocks are cleared, which
        names no medium. Those that are still there are reported again with `tell_again`."""
        self._forgotten[True].update(self._stored)
        for name in sorted(self._stored, key=itemgetter(0)):
            self._lose(name)
        self._forgotten[False].update(self._kept)
        self._untold += self._all_gone()

    def tell_again(self) -> None:
        """Report what readers have forgotten and what is still there, each block after the one
        before it in its prompt."""
        for name, block in _parents_first(self._forgotten[False]):
            if name not in self._kept:
                self._returning[name] = self._numbered(block)
        for name, block in _parents_first(self._forgotten[True]):
            if name not in self._stored:
                self._store(name, block)
        for blocks in self._forgotten.values():
            blocks.clear()

    def _all_gone(self) -> list[BlockChange[Content]]:
        gone = [BlockChange(False, n[0], each.block_hash, None) for n, each in self._kept.items()]
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
        returning = self._returning
        self._returning = {}
        touched = self._again | returning.keys()
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
                filled = self._filled.get(name) or returning.get(name)
                if name not in self._kept and filled is not None:
                    self._filled.pop(name, None)
                    self._kept[name] = filled.block
                    new.append((filled.number, BlockChange(False, name[0], *filled.block)))
            else:
                del self._slots_of[name]
                if name in self._kept:
                    gone = self._kept.pop(name).block_hash
                    told.append(BlockChange(False, name[0], gone, None))
        told.sort(key=attrgetter("group"))
        new.sort(key=itemgetter(0))
        return told + [change for _, change in new]


def _parents_first(
    blocks: Mapping[BlockName, _Reported[Content]],
) -> Iterator[tuple[BlockName, _Reported[Content]]]:
    """These blocks, each after the one before it in its prompt; a prompt's lie together."""
    named = {(name[0], block.block_hash) for name, block in blocks.items()}
    after: defaultdict[tuple[int, bytes | None], list[BlockName]] = defaultdict(list)
    first: list[BlockName] = []
    for name, block in blocks.items():
        before = (name[0], block.content.parent)
        (after[before] if before in named else first).append(name)
    waiting = first[::-1]
    while waiting:
        name = waiting.pop()
        yield name, blocks[name]
        waiting += after[name[0], blocks[name].block_hash][::-1]
