# SPDX-License-Identifier: Apache-2.0
"""What the workers are told to copy to the shared store, and from it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoreRun:
    """Blocks of one group and the hashes that name them in the shared store, pairwise."""

    group: int
    block_ids: list[int]
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class StoreSave:
    """Copy blocks to the shared store.

    Attributes:
        prefix: of the keys; see `key_prefix`.
    """

    job_id: int
    prefix: str
    runs: list[StoreRun]


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """Fill blocks from the shared store; the attributes are as in `LoadJob`."""

    job_id: int
    request_id: str
    prefix: str
    timeout: float
    runs: list[StoreRun]
    zeros: list[tuple[int, list[int]]]


class PrefixWork(Protocol):
    """Work for the workers, as the shared prefix adds to it.

    Attributes:
        store_saves, store_loads: started as those of a hand-off are.
    """

    store_saves: list[StoreSave]
    store_loads: list[StoreLoad]
