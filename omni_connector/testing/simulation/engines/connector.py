# SPDX-License-Identifier: Apache-2.0
"""`OmniKVConnector`, in the surroundings of a simulation."""

from typing import Final

from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.surroundings import Surroundings

SURROUNDINGS_OF: Final[dict[str, Surroundings]] = {}
"""By engine id; set before an engine is made."""


class SimulatedConnector(OmniKVConnector):
    """What vLLM loads in a simulation."""

    def _surroundings(self) -> Surroundings:
        engine_id = self._kv_transfer_config.engine_id
        assert engine_id is not None
        return SURROUNDINGS_OF[engine_id]
