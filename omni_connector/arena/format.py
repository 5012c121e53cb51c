# SPDX-License-Identifier: Apache-2.0
"""The format of an arena's bytes, mapped or fetched.

superblock           one page
slot headers         64 bytes each:
                     generation u64 | state + key length << 32, u64 | key 32 bytes |
                     length u64 | checksum u64
slots                `slot_bytes` each, from a page on
"""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import (
    IncompatiblePeerError,
    IntegrityError,
    ProtocolError,
    SlotPendingError,
    StaleSlotError,
)
from omni_connector.net.packets import PACKAGE

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 64
EPOCH_BYTES: Final = 16
MAX_KEY_BYTES: Final = 32
KEY_LENGTH_SHIFT: Final = 32

_MAGIC: Final = b"OMNIARNA"
_VERSION: Final = 1
_SUPERBLOCK: Final = struct.Struct("=8sIIQQQQQ16s")
_DIGEST: Final = struct.Struct("=Q")
_HEADER: Final = struct.Struct("=QQ32sQQ")

SUPERBLOCK_BYTES: Final = _SUPERBLOCK.size + _DIGEST.size


class SlotState(enum.IntEnum):
    """The state of a slot; only a published one may be read."""

    FREE = 0
    WRITING = 1
    PUBLISHED = 2


_STATES: Final = {int(state): state for state in SlotState}


class SlotHeader(msgspec.Struct, frozen=True, gc=False):
    """The owner's description of one slot.

    Attributes:
        generation: a u64 that the owner changes with each use of the slot.
        state: only a `PUBLISHED` slot may be read.
        key: up to 32 bytes that name the content.
        length: bytes of content, from the start of the slot.
        checksum: xxh3_64 of the content, or 0 if the owner computes none. The copier computes it
            with the copy (`copy.jobs.Saver`), and `Arena.publish` writes it.
    """

    generation: int
    state: SlotState
    key: bytes
    length: int
    checksum: int

    @classmethod
    def decode(cls, raw: bytes, slot: int, slot_bytes: int) -> "SlotHeader":
        """The header in `HEADER_BYTES` bytes.

        Raises:
            IntegrityError: no owner writes such a header.
        """
        generation, status, key, length, checksum = _HEADER.unpack(raw)
        key_length = status >> KEY_LENGTH_SHIFT
        state = _STATES.get(state_of(status))
        if state is None or key_length > MAX_KEY_BYTES or length > slot_bytes:
            raise IntegrityError(
                f"slot {slot} has an impossible header: state {state_of(status)}, key of "
                f"{key_length} bytes, {length} bytes of content in a slot of {slot_bytes}"
            )
        return cls(generation, state, key[:key_length], length, checksum)

    def require_published(self, slot: int, generation: int) -> None:
        """Raise unless the slot is published with exactly this generation.

        Raises:
            SlotPendingError: it is not published with this generation yet.
            StaleSlotError: it never will be: it has a later generation, or was retired.
        """
        if self.state is SlotState.PUBLISHED and self.generation == generation:
            return
        writing = self.state is SlotState.WRITING and self.generation == generation
        to_come = writing or self.generation < generation
        raise (SlotPendingError if to_come else StaleSlotError)(
            f"slot {slot} is {self.state.name} with generation {self.generation}, "
            f"wanted PUBLISHED with {generation}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class PublishedSlots:
    """What the headers of published slots say, of which all are alike in state and generation.

    Attributes:
        lengths: bytes of content `(n,)`.
        checksums: of the content `(n,)`.
        keys: name the content, up to 32 bytes each.
    """

    lengths: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    keys: list[bytes]

    @classmethod
    def of(cls, headers: Sequence[SlotHeader]) -> "PublishedSlots":
        """What these headers say."""
        return cls(
            np.array([each.length for each in headers], np.uint64),
            np.array([each.checksum for each in headers], np.uint64),
            [each.key for each in headers],
        )

    @classmethod
    def decode(
        cls, words: NDArray[np.uint64], generations: NDArray[np.int64], slot_bytes: int
    ) -> "PublishedSlots | None":
        """The headers in uint64 `(n, 8)`; None unless all are published with these generations
        `(n,)`, and hold at most `slot_bytes` bytes of content."""
        statuses = words[:, 1]
        key_lengths = statuses >> np.uint64(KEY_LENGTH_SHIFT)
        states = states_of(statuses)
        if not (
            (states == SlotState.PUBLISHED)
            & (words[:, 0] == generations.astype(np.uint64))
            & (key_lengths <= MAX_KEY_BYTES)
            & (words[:, 6] <= slot_bytes)
        ).all():
            return None
        padded = words[:, 2:6].tobytes()
        starts = range(0, len(padded), MAX_KEY_BYTES)
        lengths = key_lengths.tolist()
        keys = [padded[at : at + n] for at, n in zip(starts, lengths, strict=True)]
        return cls(words[:, 6], words[:, 7], keys)


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """The offsets in an arena.

    Attributes:
        n_slots: number of slots, at least one.
        slot_bytes: bytes of each, a positive multiple of the page size.

    Raises:
        ValueError: one of them is out of range.
    """

    n_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.n_slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {self.n_slots}")
        if self.slot_bytes < 1 or self.slot_bytes % PAGE_BYTES:
            raise ValueError(
                f"slot_bytes must be a positive multiple of {PAGE_BYTES}, not {self.slot_bytes}"
            )

    @property
    def headers_at(self) -> int:
        """Offset of the first header."""
        return PAGE_BYTES

    @property
    def slots_at(self) -> int:
        """Offset of the first slot."""
        headers = -(-self.n_slots * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES
        return self.headers_at + headers

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.slots_at + self.n_slots * self.slot_bytes

    def superblock(self, epoch: bytes) -> bytes:
        """The first `SUPERBLOCK_BYTES` bytes of an arena of this epoch."""
        fields = _SUPERBLOCK.pack(
            _MAGIC,
            _VERSION,
            HEADER_BYTES,
            self.n_slots,
            self.slot_bytes,
            PAGE_BYTES,
            self.slots_at,
            self.total_bytes,
            epoch,
        )
        return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))

    def check_superblock(self, found: bytes, epoch: bytes) -> None:
        """Raise unless these are the first `SUPERBLOCK_BYTES` bytes of an arena of this epoch.

        Raises:
            ProtocolError: this is no arena, or not the announced one.
            IncompatiblePeerError: the arena has another format, epoch or size.
        """
        if len(epoch) != EPOCH_BYTES:
            raise ProtocolError(f"an epoch of {len(epoch)} bytes names no arena")
        if found == self.superblock(epoch):
            return
        magic, version, _, n_slots, slot_bytes, *_, their_epoch = _SUPERBLOCK.unpack_from(found)
        if magic != _MAGIC:
            raise ProtocolError(f"the peer's memory starts with {magic!r}, it is no arena")
        if version != _VERSION:
            raise IncompatiblePeerError("arena format version", *format_versions(_VERSION, version))
        if their_epoch != epoch:
            raise IncompatiblePeerError("arena epoch", epoch.hex(), their_epoch.hex())
        if (n_slots, slot_bytes) != (self.n_slots, self.slot_bytes):
            wanted = f"{self.n_slots} x {self.slot_bytes}"
            raise IncompatiblePeerError("arena size", wanted, f"{n_slots} x {slot_bytes}")
        raise ProtocolError("the peer's superblock does not describe the arena it announced")


def format_versions(ours: object, theirs: object) -> tuple[str, str]:
    """Both versions of a format, for a refusal. Memory does not tell which package wrote it."""
    return f"{ours} ({PACKAGE})", f"{theirs} (another version of omni-connector)"


def state_of(status: int) -> int:
    """The state in a header's second word; the upper half is the length of the key."""
    return status & ((1 << KEY_LENGTH_SHIFT) - 1)


def states_of(statuses: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same of several headers `(n,)`."""
    return statuses & np.uint64((1 << KEY_LENGTH_SHIFT) - 1)


def header_keys(key_prefix: bytes, group: int, keys: Sequence[bytes | None]) -> list[bytes]:
    """The keys for slot headers, `MAX_KEY_BYTES` bytes at most; b"" for None.

    Args:
        key_prefix: common prefix of all block keys of an engine.
        group: the cache group of the blocks.
        keys: of the blocks.
    """
    whose = xxhash.xxh3_64_digest(b"%d/%b" % (group, key_prefix))
    rest = MAX_KEY_BYTES - len(whose)
    return [b"" if key is None else whose + key[:rest] for key in keys]
