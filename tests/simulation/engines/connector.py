# SPDX-License-Identifier: Apache-2.0
"""`OmniKVConnector`, in the surroundings of a simulation."""

from collections.abc import Callable
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from omni_connector.vllm_v1.adapter_loads import AdapterLoads
from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.surroundings import Surroundings

SURROUNDINGS_OF: Final[dict[str, Surroundings]] = {}
"""By engine id; set before an engine is made."""

ADAPTERS_OF: Final[dict[str, list[AdapterLoads]]] = {}
"""By engine id: what each of its workers has loaded and not told yet."""

IS_LATE: Final[dict[str, Callable[[], bool]]] = {}
"""By engine id, for those whose ranks are a step apart now and then: whether a rank is, now."""


class SimulatedConnector(OmniKVConnector):
    """What vLLM loads in a simulation."""

    def _surroundings(self) -> Surroundings:
        return SURROUNDINGS_OF[self._engine_id]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        is_late = IS_LATE.get(self._engine_id)
        if is_late is not None and is_late():  # its copies end just after it has looked
            return KVConnectorTransferResults()
        return super().get_transfer_results(finished_req_ids)

    @property
    def _engine_id(self) -> str:
        engine_id = self._kv_transfer_config.engine_id
        assert engine_id is not None
        return engine_id
