# SPDX-License-Identifier: Apache-2.0
"""Connectors that stand beside ours: one that has a word for its scheduler half and takes no
other, as NIXL, and one whose loads fail."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput

from omni_connector.testing.no_op import NoOpConnector
from tests.toy import BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

SIBLING = {
    "kv_connector": "JealousConnector",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}

FAILING = {
    "kv_connector": "FailingConnector",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}


@dataclass
class Word(KVConnectorHandshakeMetadata):
    """What it tells."""


class JealousConnector(NoOpConnector):
    """Answers prefills with params of its own, but loads nothing."""

    heard: dict[Any, KVConnectorHandshakeMetadata]

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Word()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if not all(isinstance(each, Word) for each in metadata.values()):
            raise ValueError("JealousConnector expects its own handshake metadata")
        self.heard = metadata

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False


@dataclass
class Wanted(KVConnectorMetadata):
    """Blocks that a step is to load."""

    block_ids: set[int]


class FailingConnector(NoOpConnector):
    """Has the first block of requests that ask for it, and fails to load it within the step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._wanted: set[int] = set()
        self._bad: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        asked = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return (BLOCK, False) if asked and not num_computed_tokens else (0, False)

    def update_state_after_alloc(
        self, request: Any, blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._wanted.add(blocks.get_block_ids()[0][0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        wanted, self._wanted = self._wanted, set()
        return Wanted(wanted)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Wanted)
        self._bad = metadata.block_ids

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad
