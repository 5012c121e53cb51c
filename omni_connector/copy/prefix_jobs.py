# SPDX-License-Identifier: Apache-2.0
"""What the workers are told to copy for the shared prefix cache, and from it."""

from dataclasses import dataclass
from typing import ClassVar

from omni_connector.copy.jobs import LoadSpec, SaveSpec
from omni_connector.kv.spans import TransferSpec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KeepSpec(SaveSpec):
    """Copy blocks to this engine's own slots, of any requests, after the forward pass."""

    background: ClassVar[bool] = True
    span: ClassVar[str] = "keep"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostLoadSpec(LoadSpec):
    """Fill blocks from the arena of an engine of this host, which gave no lease."""

    span: ClassVar[str] = "share"
    timed_as: ClassVar[str] = "share"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoreSaveSpec(TransferSpec):
    """Copy blocks to the shared store.

    Attributes:
        prefix: of the keys; see `key_prefix`.
        hashes: that name each of the `block_ids` in the store.
        mark: group and name of an entry without content that is stored behind the blocks; see
            `kv.tails.cell_marks`. None for none.
    """

    background: ClassVar[bool] = True
    span: ClassVar[str] = "store"

    prefix: str
    hashes: list[bytes]
    mark: tuple[int, bytes] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoreLoadSpec(StoreSaveSpec):
    """Fill blocks from the shared store. A block with an empty hash is zeroed.

    Attributes:
        timeout: seconds from its arrival until the job is given up.
    """

    fills_blocks: ClassVar[bool] = True
    background: ClassVar[bool] = False
    span: ClassVar[str] = "fetch"
    timed_as: ClassVar[str] = "fetch"

    timeout: float
