# SPDX-License-Identifier: Apache-2.0
"""What both halves take from the process and the host around them, memory for arenas included.

The simulation gives its own surroundings: a clock that it moves, randomness from its seed, and
turns and messages in the order that it draws.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import UnsetType

from omni_connector.config import FileStoreSettings, OmniConfig, StoreSettings
from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.ended import CopiesOfRanks, RankCopies
from omni_connector.copy.host_rows import Sharing
from omni_connector.identity.epochs import WeightsDigest, WeightsSaid
from omni_connector.identity.weight_files import ModelFiles
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.net import rank_socket
from omni_connector.net.links import Sockets, ZmqSockets
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.net.status import StatusFile
from omni_connector.prefix.attaching import Ranks, RankSockets
from omni_connector.prefix.neighbours import HostNeighbours, LocalEngine, Neighbours
from omni_connector.runtime.context import PROCESS_CONTEXT, EngineContext
from omni_connector.stores.block_store import BlockStore
from omni_connector.stores.opening import open_block_store
from omni_connector.transports.choice import Transports, make_transports
from omni_connector.vllm_v1.adapter_loads import AdapterLoads, watch_adapter_loads
from omni_connector.vllm_v1.compat import weights_said
from omni_connector.vllm_v1.identity import drafter_of, weight_files, weights_id
from omni_connector.vllm_v1.loaded_models import head_copies, loaded_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass(frozen=True)
class Surroundings:
    """Clock, randomness, threads, and the ways to other processes.

    Attributes:
        context: clock, threads and randomness. Each half adds its own statistics and trace.
        sockets: opens the sockets of the control channel.
        transports: opens the transports that a configuration asks for; told whether it offers any.
        block_store: opens a client of the shared store; told the bytes of memory to lend to it.
        rank_copies: asks the ranks of an engine which of their copies have ended.
        neighbours: finds the engines of this host that share prefixes.
        answer_for_rank: answers the scheduler half that asks a rank; returns what ends that.
        ranks: asks the ranks of an engine, in a runtime folder, to attach arenas of neighbours.
        copier: makes what copies between KV blocks and slots, with threads that share in it.
        weights_id: which weights an engine has, by their files; see `identity.weights_id`.
        weight_files: the files of these weights, or the digest of dummy ones; None leaves out the
            digest of the files.
        drafter_of: which drafter an engine has, by its files; see `identity.drafter_of`.
        read_weights: makes the digest of the weights that a worker has in its memory.
        head_copies: how many ranks hold the same KV head, by layer, as a worker's model says; see
            `loaded_models.head_copies`.
        weights_said: what vLLM is told of an engine's weights; told the engine's KV cache manager.
        adapter_loads: notes which LoRA adapters vLLM loads in a worker.
        status_file: makes the file, in a runtime folder, that `omni-connector top` reads.
        prefault: whether a thread prefaults the arena's memory.
        explains: whether a thread answers `omni-connector explain`.
        lingers: whether the thread of a step that computes nothing helps with copies.
    """

    context: EngineContext = PROCESS_CONTEXT
    sockets: Callable[[], Sockets] = ZmqSockets
    transports: Callable[[OmniConfig, bool], Transports] = make_transports
    block_store: Callable[[StoreSettings | FileStoreSettings, int], BlockStore] = open_block_store
    rank_copies: Callable[[Path, str, int, float], CopiesOfRanks] = RankCopies
    neighbours: Callable[[LocalEngine, EngineContext], Neighbours] = HostNeighbours
    answer_for_rank: Callable[[Path, str, int, RankAnswers], Callable[[], None]] = (
        rank_socket.listen
    )
    ranks: Callable[[Path, str, Sequence[Sequence[int]]], Ranks] = RankSockets
    copier: Callable[[CanonicalKVCaches, SlotLayout, Sharing], BlockCopier] = make_copier
    weights_id: Callable[[OmniConfig, "VllmConfig"], str | None] = weights_id
    weight_files: Callable[[OmniConfig, "VllmConfig"], ModelFiles | str | None] | None = (
        weight_files
    )
    drafter_of: Callable[["VllmConfig"], str | UnsetType] = drafter_of
    read_weights: Callable[["VllmConfig"], Generator[None, None, WeightsDigest]] = loaded_digest
    head_copies: Callable[["VllmConfig"], Mapping[str, int]] = head_copies
    weights_said: Callable[["KVCacheManager"], WeightsSaid] = weights_said
    adapter_loads: Callable[["VllmConfig"], AdapterLoads] = watch_adapter_loads
    status_file: Callable[[Path], StatusFile] = StatusFile
    prefault: bool = True
    explains: bool = True
    lingers: bool = True


SURROUNDINGS: Final = Surroundings()
"""Those of an engine in production."""
