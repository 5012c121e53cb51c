# SPDX-License-Identifier: Apache-2.0
"""The head of an object in a Mooncake Store, which says which bytes belong to the object.

A head has 128 bytes: magic, bytes of the object, bytes of a piece, version, digest of the key, and
checksum of the content, all little-endian; then the checksum of these fields; then zeros. A short
content follows the head, a longer one lies in pieces.
"""

import os
import struct
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import IntegrityError
from omni_connector.objects.object_store import host_bytes

PIECE_BYTES: Final = 8 << 20
HEAD_BYTES: Final = 2 << 20

_MAGIC: Final = b"omniobj1"
_FIELDS: Final = struct.Struct("<8sQQ16s32sQ")
_SEAL: Final = struct.Struct("<Q")
CONTENT_AT: Final = 128
INLINE_BYTES: Final = HEAD_BYTES - CONTENT_AT


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an object.

    Attributes:
        length: bytes of the object.
        piece_bytes: bytes of each of its pieces but the last.
        version: 16 random bytes, which no other version of any object has.
        digest: that of the key, 32 bytes.
        checksum: of the content where that is `inline`, else as `codec.checksum_of` says.
    """

    length: int
    piece_bytes: int
    version: bytes
    digest: bytes
    checksum: int

    @classmethod
    def new(cls, digest: bytes, length: int) -> Self:
        """A new version, whose checksum is not known yet."""
        return cls(length, PIECE_BYTES, os.urandom(16), digest, 0)

    @classmethod
    def decode(cls, head: NDArray[np.uint8], digest: bytes) -> Self:
        """The version that a head describes.

        Args:
            head: the bytes under the name of the key, the content that follows the head included.
            digest: that of the key.

        Raises:
            IntegrityError: this is no head of the key's object, or has another length.
        """
        if head.size < CONTENT_AT:
            raise IntegrityError(f"{head.size} bytes are no head of an object")
        fields = head[: _FIELDS.size].tobytes()
        (seal,) = _SEAL.unpack_from(head.data, _FIELDS.size)
        magic, length, piece_bytes, version, own, checksum = _FIELDS.unpack(fields)
        if magic != _MAGIC or seal != xxhash.xxh3_64_intdigest(fields):
            raise IntegrityError("what is under the key is no head of an object")
        if own != digest:
            raise IntegrityError("what is under the key is the head of another object")
        found = cls(length, piece_bytes, version, digest, checksum)
        following = length if found.inline else 0
        if head.size != CONTENT_AT + following:
            raise IntegrityError(f"{head.size - CONTENT_AT} bytes follow the head, not {following}")
        if not found.inline and (length > host_bytes() or piece_bytes < INLINE_BYTES):
            raise IntegrityError(f"an object of {length} bytes in pieces of {piece_bytes}")
        return found

    def encode(self) -> bytes:
        """The head, without the content that follows it."""
        fields = _FIELDS.pack(
            _MAGIC, self.length, self.piece_bytes, self.version, self.digest, self.checksum
        )
        return (fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))).ljust(CONTENT_AT, b"\0")

    @property
    def inline(self) -> bool:
        """Whether the content follows the head."""
        return self.length <= INLINE_BYTES

    @property
    def pieces(self) -> list[int]:
        """How many bytes each piece has."""
        if self.inline:
            return []
        starts = range(0, self.length, self.piece_bytes)
        return [min(self.piece_bytes, self.length - start) for start in starts]

    def piece_names(self, prefix: str) -> list[str]:
        """The names that the pieces are stored under."""
        base = f"{head_name(prefix, self.digest)}/{self.version.hex()}"
        return [f"{base}/{index}" for index in range(len(self.pieces))]


def head_name(prefix: str, digest: bytes) -> str:
    """The name that the head of a key's object is stored under."""
    return f"{prefix}/{digest.hex()}"
