# SPDX-License-Identifier: Apache-2.0
"""The index of an arena: peers look up which slot holds the block of a key.

An index is a memfd of its own, sealed like an arena, written by its owner alone and mapped
read-only by peers. It finds a block by its *tag*, a 64-bit hash of its key. The reader of the slot
then compares the whole key with the slot's header.

The file is a hash table. Each part starts on a page:

    header
    fingerprints   a word for each bucket: 8 bytes, one a cell; 0 for an empty cell
    cells          a uint32 for each cell: the slot
    checks         a word for each slot: tag ^ generation * odd constant
    generations    a word for each slot

A block's tag chooses its bucket, and the block may be in any of the bucket's eight cells. The
fingerprint of a cell has 7 bits of the tag, and one word has all fingerprints of a bucket, so a
look-up compares eight at once. There are as many buckets as slots, so hardly one block in a million
finds its bucket full; such a block is not indexed.

There is no lock in the file. A reader may see any mixture of older and newer words. It trusts a
slot only if check and generation yield the tag that it looks for, which proves that the two were
written together.
"""

import contextlib
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import make_sealed, map_sealed, require_sealed
from omni_connector.arena.format import EPOCH_BYTES, PAGE_BYTES, format_versions
from omni_connector.arena.prefault import prefault
from omni_connector.arena.slot_index import Ints
from omni_connector.errors import IncompatiblePeerError, ProtocolError, TransportError

Tags = NDArray[np.uint64]

MAX_SLOTS: Final = 1 << 28

_MAGIC: Final = b"OMNIINDX"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("=8sIIQQ16s")
_DIGEST: Final = struct.Struct("=Q")
_HEADER_BYTES: Final = _HEADER.size + _DIGEST.size

_CELLS: Final = 8
"""Cells of a bucket: as many as a word has bytes."""

_ONES_INT: Final = 0x0101010101010101
_HIGHS_INT: Final = 0x8080808080808080
_ONES: Final = np.uint64(_ONES_INT)
_HIGHS: Final = np.uint64(_HIGHS_INT)
# Multiplied by the lowest bit of byte k, this has k in its highest byte.
_NUMBERS: Final = np.uint64(0x0001020304050607)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_INT: Final = 0xD6E8FEB86659FD93
_MIX: Final = np.uint64(_MIX_INT)
_WORD: Final = (1 << 64) - 1
_BATCH: Final = 64
"""Blocks of numpy's first look-up. The next ones grow fourfold as long as all blocks are found. So
a prompt that nobody has costs little."""

_PREFAULTED_BYTES: Final = 64 << 20
"""Most bytes of an index that are allocated at the start, and not when they are first written: the
fingerprints and cells of 1.6 million slots. Blocks go to random pages of these, so in an empty
index each of the first blocks would wait for the kernel. That takes 40 ms at most."""

_HALF: Final = np.uint64(32)
_ONE: Final = np.uint64(1)


def _sections(num_slots: int) -> list[int]:
    """Offsets of the fingerprints, cells, checks and generations, and the end of the file."""
    offsets = [PAGE_BYTES]
    for slot_bytes in (_CELLS, _CELLS * 4, 8, 8):
        offsets.append(offsets[-1] + -(-num_slots * slot_bytes // PAGE_BYTES) * PAGE_BYTES)
    return offsets


def index_bytes(num_slots: int) -> int:
    """Size of the index of an arena of `num_slots`; the kernel allocates pages that are written.

    Raises:
        ValueError: no arena has this number of slots.
    """
    if not 1 <= num_slots <= MAX_SLOTS:
        raise ValueError(f"an index has from 1 to {MAX_SLOTS} slots, not {num_slots}")
    return _sections(num_slots)[-1]


def header_bytes(num_slots: int, epoch: bytes) -> bytes:
    """The first bytes of an index of this epoch, for an arena of `num_slots`."""
    fields = _HEADER.pack(_MAGIC, _VERSION, _CELLS, num_slots, index_bytes(num_slots), epoch)
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def tags_of(key_prefix: bytes, group: int, hashes: Sequence[bytes]) -> Tags:
    """The tags of blocks (blocks,), none of them 0.

    Args:
        key_prefix: common prefix of the keys of these blocks.
        group: their cache group.
        hashes: vLLM's block hashes. If all have the same length of 8 bytes or more, their first 8
            bytes are taken as random; else each is hashed, which is slower and gives other tags.
    """
    lengths = set(map(len, hashes))
    seed = _seed_of(key_prefix, group)
    if len(lengths) == 1 and min(lengths) >= 8:
        tags = first_words(hashes)
    else:
        tags = np.fromiter(map(xxhash.xxh3_64_intdigest, hashes), np.uint64, len(hashes))
    return _tags_from(tags, seed)


def tags_of_words(key_prefix: bytes, group: int, words: Tags) -> Tags:
    """The tags of blocks, as `tags_of` gives them, by the first 8 bytes of their hashes.

    Args:
        words: (blocks,), in the byte order of this machine.
    """
    return _tags_from(words, _seed_of(key_prefix, group))


def first_words(hashes: Sequence[bytes]) -> Tags:
    """The first 8 bytes of hashes (blocks,), which all have one length of 8 bytes or more."""
    words = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)[:, :8]
    return np.ascontiguousarray(words).view(np.uint64).reshape(-1)


def _seed_of(key_prefix: bytes, group: int) -> int:
    return xxhash.xxh3_64_intdigest(b"%d/%b" % (group, key_prefix))


def _tags_from(words: Tags, seed: int) -> Tags:
    tags = (words ^ np.uint64(seed)) * _MIX
    tags ^= tags >> _HALF
    tags *= _MIX
    tags[tags == 0] = _ONE
    return tags


def tag_of(key_prefix: bytes, group: int, block_hash: bytes) -> int:
    """The tag of one block, as `tags_of` gives it, in a tenth of the time.

    Args:
        block_hash: vLLM's, of at least 8 bytes; all blocks of the index must have hashes of this
            length.
    """
    tag = int.from_bytes(block_hash[:8], sys.byteorder)
    tag ^= _seed_of(key_prefix, group)
    tag = tag * _MIX_INT & _WORD
    tag ^= tag >> 32
    return tag * _MIX_INT & _WORD or 1


class _Table:
    """A mapped index: what the owner's and a reader's side have in common."""

    def __init__(self, mapped: mmap.mmap, num_slots: int, epoch: bytes) -> None:
        self.num_slots: Final = num_slots
        self.epoch: Final = epoch
        self._map: mmap.mmap | None = mapped
        at = _sections(num_slots)
        count = num_slots * _CELLS
        # The first cell of a bucket has the lowest byte of its word, on any processor.
        self._fingerprints = np.frombuffer(mapped, np.dtype("<u8"), num_slots, at[0])
        self._cells: NDArray[np.uint32] = np.frombuffer(mapped, np.uint32, count, at[1])
        self._checks: Tags = np.frombuffer(mapped, np.uint64, num_slots, at[2])
        self._generations: Ints = np.frombuffer(mapped, np.int64, num_slots, at[3])

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map is None

    @property
    def is_empty(self) -> bool:
        """Whether it lists no block. This looks at every bucket.

        Raises:
            TransportError: the index is closed.
        """
        self._require_open()
        return not self._fingerprints.any()

    def find(self, tags: Tags) -> tuple[Ints, Ints]:
        """The slots and generations of blocks, both (blocks,); -1 and -1 for a block not found.

        Whatever the file holds, each slot is one of the arena, and no error is raised for it.

        Raises:
            TransportError: the index is closed.
        """
        self._require_open()
        buckets = self._buckets(tags)
        matches = self._matches(buckets, _fingerprints(tags) * _ONES)
        slots, generations = np.full((2, len(tags)), -1, np.int64)
        rows = np.flatnonzero(matches)
        while rows.size:
            match = matches[rows]
            lowest = match & -match
            places = ((lowest >> np.uint64(7)) * _NUMBERS >> np.uint64(56)).view(np.int64)
            cells = buckets[rows] * _CELLS + places
            found = self._cells.take(cells, mode="clip").astype(np.int64)
            generation = self._generations.take(found, mode="clip")
            check = self._checks.take(found, mode="clip")
            right = (_check(tags[rows], generation) == check) & (found < self.num_slots)
            right &= generation >= 0
            slots[rows], generations[rows] = np.where(right, (found, generation), -1)
            matches[rows] = np.where(right, 0, match ^ lowest)
            rows = rows[matches[rows] != 0]
        return slots, generations

    def may_hold(self, tag: int) -> bool:
        """Whether the index may have one block. About one in a hundred missing blocks passes.

        Raises:
            TransportError: the index is closed.
        """
        self._require_open()
        word = self._fingerprints.item((tag >> 32) * self.num_slots >> 32)
        bytes_ = word ^ (tag & 0x7F | 0x80) * _ONES_INT
        return (bytes_ - _ONES_INT) & ~bytes_ & _HIGHS_INT != 0

    def close(self) -> None:
        """Unmap the index. Idempotent."""
        mapped, self._map = self._map, None
        if mapped is not None:
            del self._fingerprints, self._cells, self._checks, self._generations
            with contextlib.suppress(BufferError):  # another thread is looking something up
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _buckets(self, tags: Tags) -> Ints:
        return ((tags >> _HALF) * np.uint64(self.num_slots) >> _HALF).view(np.int64)

    def _matches(self, buckets: Ints, marks: Tags) -> Tags:
        """For each block the cells of its bucket that may have it: a word with the highest bit of
        their bytes set.

        Args:
            marks: the fingerprint of each block in every byte of a word.

        Raises:
            TransportError: the index is closed.
        """
        self._require_open()
        # XOR leaves a zero byte for each cell with this fingerprint. The usual trick to find zero
        # bytes may also report a byte above one; `find` compares checks, which refuse it.
        bytes_ = self._fingerprints.take(buckets, mode="clip") ^ marks
        matches: Tags = (bytes_ - _ONES) & ~bytes_ & _HIGHS
        return matches

    def _require_open(self) -> None:
        if self._map is None:
            raise TransportError("the index is closed")


def _fingerprints(tags: Tags) -> Tags:
    """The fingerprint of each tag: a byte that is never 0, because 0 marks an empty cell."""
    return tags & np.uint64(0x7F) | np.uint64(0x80)


def _check(tags: Tags, generations: Ints) -> Tags:
    return tags ^ generations.view(np.uint64) * _ODD


class BlockIndex(_Table):
    """The owner's side of an index; made by `BlockIndex.create`. The caller holds a lock."""

    def __init__(self, fd: int, mapped: mmap.mmap, num_slots: int, epoch: bytes) -> None:
        super().__init__(mapped, num_slots, epoch)
        self._fd = fd
        self._fingerprint_bytes = self._fingerprints.view(np.uint8)
        self._cell_of = np.full(num_slots, -1, np.int32)

    @classmethod
    def create(cls, num_slots: int, epoch: bytes) -> Self:
        """Make the empty index of an arena.

        Args:
            num_slots: of the arena, from 1 to `MAX_SLOTS`.
            epoch: the arena's, `EPOCH_BYTES` bytes.

        Raises:
            ValueError: there is no such arena.
            TransportError: the kernel has no memory for it, or lacks a seal (before Linux 5.1).
        """
        size = index_bytes(num_slots)
        if len(epoch) != EPOCH_BYTES:
            raise ValueError(f"an epoch has {EPOCH_BYTES} bytes, not {len(epoch)}")
        first, _, end, *_ = _sections(num_slots)

        def begin(fd: int, mapped: mmap.mmap) -> None:
            pages = np.frombuffer(mapped, np.uint8)
            prefault(fd, pages, first, min(end - first, _PREFAULTED_BYTES))
            mapped[:_HEADER_BYTES] = header_bytes(num_slots, epoch)

        fd, mapped = make_sealed("index", f"{num_slots} slots", size, begin)
        return cls(fd, mapped, num_slots, epoch)

    @property
    def fd(self) -> int:
        """The memfd, valid until `close`; to keep it longer, duplicate it."""
        self._require_open()
        return self._fd

    def add(self, tags: Tags, slots: Ints, generations: Ints) -> None:
        """List blocks. A block whose bucket is full is left out.

        Args:
            tags: of the blocks (blocks,); another slot may be listed with the same tag.
            slots: different ones (blocks,). Their former blocks are removed from the index.
            generations: of these slots (blocks,), not negative.

        Raises:
            IndexError: there is no such slot.
            TransportError: the index is closed.
        """
        self.remove(slots)
        buckets = self._buckets(tags)
        order = np.argsort(buckets, kind="stable")
        buckets, tags, slots = buckets[order], tags[order], slots[order]
        # Several blocks may go to one bucket: the first takes its first empty cell, and so on.
        numbers = np.arange(len(order))
        starts = np.searchsorted(buckets, buckets)
        empty = self._fingerprint_bytes.reshape(-1, _CELLS)[buckets] == 0
        places = (np.cumsum(empty, axis=1) <= (numbers - starts)[:, None]).sum(axis=1)
        fits = places < _CELLS
        cells, slots, tags = (buckets * _CELLS + places)[fits], slots[fits], tags[fits]
        self._generations[slots] = chosen = generations[order][fits]
        self._checks[slots] = _check(tags, chosen)
        self._cells[cells] = slots
        self._fingerprint_bytes[cells] = _fingerprints(tags)
        self._cell_of[slots] = cells

    def remove(self, slots: Ints) -> None:
        """Remove slots from the index; slots that are not listed are ignored.

        Raises:
            IndexError: there is no such slot.
            TransportError: the index is closed.
        """
        self._require_open()
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_slots:
            raise IndexError(f"slots from {slots.min()} to {slots.max()}, of {self.num_slots}")
        cells = self._cell_of[slots]
        indexed = cells >= 0
        if not indexed.any():  # most often: a copy begins in slots that were free
            return
        slots = slots[indexed]
        self._checks[slots] = 0
        self._generations[slots] = -1
        self._fingerprint_bytes[cells[indexed]] = 0
        self._cell_of[slots] = -1

    def clear(self) -> None:
        """Remove all slots. This looks at every slot of the arena.

        Raises:
            TransportError: the index is closed.
        """
        self._require_open()
        slots = np.flatnonzero(self._cell_of >= 0)
        if len(slots) * _CELLS < self.num_slots:  # do not write to pages that were never used
            self.remove(slots)
            return
        self._checks[slots] = 0
        self._generations[slots] = -1
        self._fingerprint_bytes[:] = 0
        self._cell_of[:] = -1

    def close(self) -> None:
        """Unmap, and close the memfd. Peers keep what they mapped. Idempotent."""
        if not self.closed:
            del self._fingerprint_bytes
            os.close(self._fd)
        super().close()


class BlockIndexView(_Table):
    """A reader's side of an index: a read-only mapping of a memfd that a peer sent."""

    @classmethod
    def open(cls, fd: int, *, epoch: bytes, num_slots: int) -> Self:
        """Check that a received memfd is safe to read, and map it. The caller closes `fd`.

        Args:
            fd: a descriptor that a peer has sent; not trusted.
            epoch: of the arena whose index was asked for.
            num_slots: of that arena, as announced.

        Raises:
            PeerRefusedError: this is no memfd, or not sealed against change of size and writing.
            ProtocolError: this is no index, or not of the announced size.
            IncompatiblePeerError: it has another format, or is that of another arena.
        """
        require_sealed(fd)
        try:
            wanted = index_bytes(num_slots)
        except ValueError as error:
            raise ProtocolError(f"the peer announces an impossible index: {error}") from error
        mapped = map_sealed(fd, wanted, f"{num_slots} slots")
        try:
            check_header(mapped[:_HEADER_BYTES], num_slots, epoch)
        except ProtocolError:
            mapped.close()
            raise
        return cls(mapped, num_slots, epoch)


def find_prefix(
    indexes: Sequence[BlockIndex | BlockIndexView], tags: Tags
) -> tuple[Ints, Ints, Ints]:
    """Find the leading blocks of a prompt, up to the first that none of these indexes has.

    Returns:
        (positions in `indexes`, slots, generations), each (blocks found,).

    Raises:
        TransportError: an index is closed.
    """
    places = np.empty((3, len(tags)), np.int64)
    count = _probe(indexes, tags, places)
    owners, slots, generations = places[:, :count]
    return owners, slots, generations


def find_each(
    indexes: Sequence[BlockIndex | BlockIndexView], tags: Tags
) -> tuple[Ints, Ints, Ints]:
    """Find blocks, each in the first of these indexes that has it.

    Returns:
        (positions in `indexes`, slots, generations), each (blocks,); -1 in all three for a block
        that no index has.

    Raises:
        TransportError: an index is closed.
    """
    places = np.full((3, len(tags)), -1, np.int64)
    marks = _fingerprints(tags) * _ONES
    buckets: dict[int, Ints] = {}  # by size of the index; most indexes have one size
    for index in indexes:
        if index.num_slots not in buckets:
            buckets[index.num_slots] = index._buckets(tags)
    for number, index in enumerate(indexes):
        may = index._matches(buckets[index.num_slots], marks) != 0
        rows = np.flatnonzero(may & (places[0] < 0))
        if rows.size:
            found, generations = index.find(tags[rows])
            places[0, rows[found >= 0]] = number
            places[1, rows], places[2, rows] = found, generations
    owners, slots, generations = places
    return owners, slots, generations


def _probe(indexes: Sequence[_Table], tags: Tags, places: NDArray[np.int64]) -> int:
    """Fill in the places of the leading blocks; returns how many there are."""
    begin, size = 0, _BATCH
    order = list(range(len(indexes)))
    while begin < len(tags):
        batch = tags[begin : begin + size]
        run = 0
        for number in order:
            if indexes[number].may_hold(int(batch[0])):
                slots, generations = indexes[number].find(batch)
                lacks = slots < 0
                run = int(lacks.argmax()) if lacks.any() else len(batch)
            if run:
                break
        if not run:
            break
        places[0, begin : begin + run] = number
        places[1:, begin : begin + run] = slots[:run], generations[:run]
        # The index that has these blocks is likely to have the next ones, too.
        order.remove(number)
        order.insert(0, number)
        begin, size = begin + run, 4 * size if run == len(batch) else _BATCH
    return begin


def check_header(found: bytes, num_slots: int, epoch: bytes) -> None:
    """Raise unless these are the first bytes of an index of this epoch; see `header_bytes`.

    Raises:
        ProtocolError: this is no index, or not the announced one.
        IncompatiblePeerError: it has another format or epoch.
    """
    if len(epoch) != EPOCH_BYTES:
        raise ProtocolError(f"an epoch of {len(epoch)} bytes names no arena")
    if found == header_bytes(num_slots, epoch):
        return
    magic, version, _, _, _, their_epoch = _HEADER.unpack_from(found)
    if magic != _MAGIC:
        raise ProtocolError(f"the peer's memory starts with {magic!r}, it is no index")
    if version != _VERSION:
        raise IncompatiblePeerError("index format version", *format_versions(_VERSION, version))
    if their_epoch != epoch:
        raise IncompatiblePeerError("arena epoch", epoch.hex(), their_epoch.hex())
    raise ProtocolError("the peer's header does not describe the index it announced")
