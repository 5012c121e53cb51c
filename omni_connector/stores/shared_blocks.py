# SPDX-License-Identifier: Apache-2.0
"""What all engines that share prefixes agree on: the names and the form of blocks in the store.

A block of one cache group and one rank is one entry: the bytes of the block's slot, then a trailer
of 16 bytes that tells whether they are what was stored under this key. The key names all that the
bytes depend on, so engines that would misread each other's blocks never find them.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import ChecksumError
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.runtime.stats import Stats
from omni_connector.stores.block_store import BlockStore

BlockName = tuple[int, bytes]
"""(position of the group among the transferred ones, block hash)."""

_TRAILER: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"omnikv-1"

TRAILER_BYTES: Final = _TRAILER.size
"""Bytes of an entry behind the bytes of its slot."""

CORRUPT: Final = "store_checksum_mismatch"
"""The kind of failure of a load that finds other bytes than were stored."""


def key_prefix(
    namespace: str, compatibility: CompatibilityKey, hash_id: str, vllm: str = ""
) -> str:
    """The part of a key that says which engines can read the block.

    Args:
        namespace: engines share only within one namespace.
        compatibility: model, weights, dtypes, quantization, ranks, the byte order of each group's
            pages, and what else changes the numbers that a model computes.
        hash_id: how blocks are hashed.
        vllm: vLLM's version, for a store, which outlives it; "" for arenas.
    """
    # Entries always carry a checksum, whether slots do or not.
    readers = msgspec.structs.replace(compatibility.of_sharing(), integrity="")
    what = (readers, hash_id, vllm) if vllm else (readers, hash_id)
    digest = hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16, person=_MAGIC)
    return f"{namespace}/{digest.hexdigest()}"


def readers_id(compatibility: CompatibilityKey, hash_id: str) -> bytes:
    """16 bytes, equal for engines that can read each other's slots and name blocks alike."""
    what: tuple[object, ...] = (compatibility.of_sharing(), hash_id)
    if compatibility.num_stripes != 1:
        what += (compatibility.num_stripes,)
    if compatibility.num_shards != 1:
        what += ("shards", compatibility.num_shards)
    encoded = msgspec.msgpack.encode(what)
    return hashlib.blake2b(encoded, digest_size=16, person=_MAGIC).digest()


def reader_traits(compatibility: CompatibilityKey, hash_id: str) -> dict[str, str]:
    """What `readers_id` is a digest of, in words: values by name, of 1,024 characters at most."""
    traits = {name: encodable(str(value)) for name, value in compatibility.values().items()}
    key = compatibility.of_sharing()
    groups = key.stages if key.later_stages else key.groups
    pages = hashlib.blake2b(msgspec.msgpack.encode(groups), digest_size=8)
    # Other weights are told by the keys of blocks.
    traits["configuration"] = traits.pop("weights")
    return {**traits, "KV cache groups": pages.hexdigest(), "hashes": hash_id[:1024]}


def reader_difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """The first trait of ours that an engine has otherwise, in words; None where all are equal."""
    for name, value in ours.items():
        if theirs.get(name) != value:
            return f"another {name.replace('_', ' ')}: {theirs.get(name)!r}, here {value!r}"
    return None


def encodable(text: str) -> str:
    """The text as UTF-8 can encode it, 1,024 characters at most. A path may have other bytes."""
    return text.encode("utf-8", "replace").decode()[:1024]


def block_key(prefix: str, group: int, rank: int, block_hash: bytes) -> str:
    """Key of one block.

    Args:
        prefix: of `key_prefix`.
        group: position of the group among the transferred ones.
        rank: the rank that owns the shard; see `owning_rank`.
        block_hash: vLLM's, over all tokens up to the block's end, cache salt, LoRA and
            multimodal inputs.
    """
    return f"{prefix}/{group}.{rank}/{block_hash.hex()}"


class FailuresOf:
    """Adds the failures that a store counts to statistics, each of them once."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._told: Counter[str] = Counter()

    def count_into(self, stats: Stats) -> None:
        """Add the failures since the last call, as `store:<kind>`."""
        failures = Counter(self._store.failures)
        for kind, number in (failures - self._told).items():
            stats.fail(f"store:{kind}", number)
        self._told = failures


def owning_rank(shape: GroupShape, rank: int, ranks: int) -> int | None:
    """The owning rank: the first of those in its pipeline stage that hold the same bytes, or the
    rank itself; None where they hold no bytes of the group.

    Args:
        shape: the group in the stage of the rank.
        rank: of all ranks, counted stage by stage.
        ranks: of a stage.
    """
    copies = shape.num_copies(ranks)
    return rank - rank % copies if copies else None


def owning_ranks(shapes: Sequence[GroupShape], ranks: int) -> list[int]:
    """The ranks that own the entries of a block, one entry each.

    Args:
        shapes: the block's group in each pipeline stage.
        ranks: of a stage.
    """
    owners = (
        owning_rank(shape, stage * ranks + rank, ranks)
        for stage, shape in enumerate(shapes)
        for rank in range(ranks)
    )
    return sorted({each for each in owners if each is not None})


def add_trailer(row: NDArray[np.uint8], size: int, checksum: int, key: str) -> int:
    """Write the trailer of an entry; returns how many bytes the entry has.

    Args:
        row: the entry, at least `size + TRAILER_BYTES` bytes.
        size: bytes of the block.
        checksum: xxh3-64 of these bytes.
        key: the key under which the entry will be stored.
    """
    row[size : size + TRAILER_BYTES] = np.frombuffer(
        _TRAILER.pack(_MAGIC, _stamp(checksum, key)), np.uint8
    )
    return size + TRAILER_BYTES


def verify(row: NDArray[np.uint8], size: int, checksum: int, key: str) -> None:
    """Compare a block that was read with its trailer. See `add_trailer` for the arguments.

    Raises:
        ChecksumError: the bytes differ from what was stored under the key.
    """
    magic, stamp = _TRAILER.unpack(row[size : size + TRAILER_BYTES].tobytes())
    if magic != _MAGIC or stamp != _stamp(checksum, key):
        raise ChecksumError(f"the entry {key} does not hold what was stored under it")


def _stamp(checksum: int, key: str) -> int:
    # The key goes in, so that an intact block of another key is not taken for this one.
    return checksum ^ xxhash.xxh3_64_intdigest(key.encode())
