# SPDX-License-Identifier: Apache-2.0
"""The manifest of an object in a Mooncake Store, which says which bytes belong to the object.

A manifest has 128 bytes: magic, bytes of the object, bytes of a fragment, version, digest of the
key, and checksum of the content, all little-endian; then the checksum of these fields; then zeros.
A short content follows the manifest, a longer one lies in fragments.
"""

import os
import struct
from typing import Final, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.format import format_versions
from omni_connector.errors import IncompatiblePeerError, IntegrityError
from omni_connector.net.status import plain
from omni_connector.objects.object_store import host_bytes

FRAGMENT_BYTES: Final = 8 << 20
"""Bytes of each fragment but the last: large enough that a call costs little beside its bytes."""

MANIFEST_BYTES: Final = 2 << 20
"""Most bytes of a manifest and the content after it. Each `get` has memory for as many ready."""

_MAGIC: Final = b"omniobj1"
_FIELDS: Final = struct.Struct("<8sQQ16s32sQ")
_FIELDS_CHECKSUM: Final = struct.Struct("<Q")
# Where the content follows, in bytes.
CONTENT_AT: Final = 128
INLINE_BYTES: Final = MANIFEST_BYTES - CONTENT_AT


class Version(msgspec.Struct, frozen=True):
    """One version of an object.

    Attributes:
        length: bytes of the object.
        fragment_bytes: bytes of each of its fragments but the last.
        version: 16 random bytes, which no other version of any object has.
        digest: that of the key, 32 bytes.
        checksum: of the content where that is `inline`, else as `codec.checksum_of` says.
    """

    length: int
    fragment_bytes: int
    version: bytes
    digest: bytes
    checksum: int

    @classmethod
    def new(cls, digest: bytes, length: int) -> Self:
        """A new version, whose checksum is not known yet."""
        return cls(length, FRAGMENT_BYTES, os.urandom(16), digest, 0)

    @classmethod
    def decode(cls, manifest: NDArray[np.uint8], digest: bytes) -> Self:
        """The version that a manifest describes.

        Args:
            manifest: the bytes under the name of the key, with the content that follows it.
            digest: that of the key.

        Raises:
            IncompatiblePeerError: another version of this package wrote it.
            IntegrityError: this is no manifest of the key's object, or has another length.
        """
        if manifest.size < CONTENT_AT:
            raise IntegrityError(f"{manifest.size} bytes are no manifest of an object")
        fields = manifest[: _FIELDS.size].tobytes()
        (fields_checksum,) = _FIELDS_CHECKSUM.unpack_from(manifest.data, _FIELDS.size)
        magic, length, fragment_bytes, version, own, checksum = _FIELDS.unpack(fields)
        if magic != _MAGIC and magic.startswith(_MAGIC[:-1]):
            theirs_format = plain(magic[-1:].decode("latin-1"))
            ours, theirs = format_versions(_MAGIC[-1:].decode(), theirs_format)
            raise IncompatiblePeerError("the format of manifests", ours, theirs)
        if magic != _MAGIC or fields_checksum != xxhash.xxh3_64_intdigest(fields):
            raise IntegrityError("what is under the key is no manifest of an object")
        if own != digest:
            raise IntegrityError("what is under the key is the manifest of another object")
        found = cls(length, fragment_bytes, version, digest, checksum)
        following = length if found.inline else 0
        if manifest.size != CONTENT_AT + following:
            raise IntegrityError(
                f"{manifest.size - CONTENT_AT} bytes follow the manifest, not {following}"
            )
        if not found.inline and (length > host_bytes() or fragment_bytes < INLINE_BYTES):
            raise IntegrityError(f"an object of {length} bytes in fragments of {fragment_bytes}")
        return found

    def encode(self) -> bytes:
        """The manifest, without the content that follows it."""
        fields = _FIELDS.pack(
            _MAGIC, self.length, self.fragment_bytes, self.version, self.digest, self.checksum
        )
        return (fields + _FIELDS_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(
            CONTENT_AT, b"\0"
        )

    @property
    def inline(self) -> bool:
        """Whether the content follows the manifest."""
        return self.length <= INLINE_BYTES

    @property
    def fragments(self) -> list[int]:
        """How many bytes each fragment has."""
        if self.inline:
            return []
        starts = range(0, self.length, self.fragment_bytes)
        return [min(self.fragment_bytes, self.length - start) for start in starts]

    def fragment_names(self, prefix: str) -> list[str]:
        """The names that the fragments are stored under."""
        if self.inline:
            return []
        base = f"{manifest_name(prefix, self.digest)}/{self.version.hex()}"
        return [f"{base}/{index}" for index in range(len(self.fragments))]


def manifest_name(prefix: str, digest: bytes) -> str:
    """The name that the manifest of a key's object is stored under."""
    return f"{prefix}/{digest.hex()}"
