# SPDX-License-Identifier: Apache-2.0
"""A connector that stands beside ours in MultiConnector and loads some prefixes by itself.

It moves nothing: it writes what the engine's weights give for the tokens, as a connector with a
perfect store would, in the step that needs it or in a later one. Some of its loads fail.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.core.sched.output import SchedulerOutput

from omni_connector.testing.no_op import NoOpConnector
from omni_connector.vllm_v1.specs import fails_by_block
from tests.simulation.surroundings.world import World

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from tests.simulation.engines.engine import CheckedRunner


@dataclass(frozen=True)
class OtherSettings:
    """How the connector of one engine behaves.

    Attributes:
        world: that its engine lives in.
        runner: of the engine, once that is made.
        often: how many of 100 requests it has a prefix of.
        later: whether it loads while others compute, else within the step that computes the rest.
        failing: how often a load fails.
        spoils: whether others may go on with blocks whose load has failed, so that the engine is
            not judged after that.
    """

    world: World
    runner: Callable[[], "CheckedRunner"]
    often: int
    later: bool
    failing: float
    spoils: bool


OTHER_OF: Final[dict[str, OtherSettings]] = {}
"""By engine id; set before an engine is made."""


@dataclass
class OtherLoad:
    """KV that is to be written: of these tokens the positions from `start` on, as `weights` give
    it, which know of the request's salt, images, embeddings and adapter."""

    request_id: str
    weights: bytes
    token_ids: list[int]
    start: int
    tables: tuple[list[int], ...]


@dataclass
class OtherMetadata(KVConnectorMetadata):
    """The loads that begin with a step."""

    loads: list[OtherLoad] = field(default_factory=list)


class OtherConnector(NoOpConnector):
    """Loads what it says to have."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine_id = self._kv_transfer_config.engine_id
        assert engine_id is not None
        self._settings = OTHER_OF[engine_id]
        self._writes = vllm_config.parallel_config.rank == 0  # for all ranks
        self._by_block = fails_by_block(kv_cache_config)
        self._offered: dict[str, int] = {}
        self._queued: list[OtherLoad] = []
        self._under_way: list[OtherLoad] = []
        self._bad: set[int] = set()

    # The scheduler half

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        settings = self._settings
        number = zlib.crc32(request.request_id.encode())
        if number % 100 >= settings.often or request.num_preemptions:
            return 0, False
        size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        whole = (request.num_tokens - 1) // size
        found = (1 + number // 100 % whole) * size if whole else 0
        missing = max(0, found - num_computed_tokens)
        self._offered[request.request_id] = num_computed_tokens
        return missing, bool(missing) and settings.later

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        start = self._offered.pop(request.request_id, 0)
        if num_external_tokens > 0:
            tokens = list(request.all_token_ids)[: start + num_external_tokens]
            tables = tuple(list(ids) for ids in blocks.get_block_ids())
            weights = self._settings.runner().weights_of(request.request_id)
            self._queued.append(OtherLoad(request.request_id, weights, tokens, start, tables))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        queued, self._queued = self._queued, []
        return OtherMetadata(queued)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offered.pop(request.request_id, None)
        return False, None

    # The worker half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OtherMetadata)
        if self._settings.later:
            self._under_way += metadata.loads
        else:
            for load in metadata.loads:
                self._load(load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for load in self._under_way.copy():
            if self._settings.world.chance(0.5):
                self._under_way.remove(load)
                self._load(load)
                results.finished_recving.add(load.request_id)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def _load(self, load: OtherLoad) -> None:
        if not self._writes:
            return
        settings, runner = self._settings, self._settings.runner()
        runner.restore(load.token_ids, load.start, load.tables, weights=load.weights)
        # By whole requests vLLM hears only of loads that others wait for.
        if self._by_block and settings.world.chance(settings.failing):
            settings.world.tell(f"the other connector's load of {load.request_id} fails")
            runner.judged = runner.judged and not settings.spoils
            size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            first = settings.world.draw.randrange(load.start // size, len(load.token_ids) // size)
            bad = [each for each in load.tables[0][first : len(load.token_ids) // size] if each]
            first *= size
            runner.restore(load.token_ids, first, load.tables, weights=b"no model's")
            self._bad.update(bad)
            if not settings.later:
                runner.bad_blocks.update(bad)
