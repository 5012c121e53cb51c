# SPDX-License-Identifier: Apache-2.0
"""A connector that stands beside ours: as NIXL it has a word for its scheduler half, and takes no
other."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from omni_connector.testing.no_op import NoOpConnector

SIBLING = {
    "kv_connector": "JealousConnector",
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
