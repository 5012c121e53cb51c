# SPDX-License-Identifier: Apache-2.0
"""Handing the KV of a request to the connector: keys, heads of each receiver, tries."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from omni_connector.errors import ConfigError, TransportError
from omni_connector.objects.base import OmniConnector
from omni_connector.objects.codec import Pieces
from omni_connector.stage.link import ConnectorLink
from omni_connector.stage.payload import KVCacheTransferData
from omni_connector.stage.tp import Topology, slice_for_receiver

logger = logging.getLogger(__name__)

SEND_TRIES: Final = 3
SEND_BACKOFF_S: Final = 0.1

SendKeyBuilder = Callable[[str, str, str], Sequence[str]]


def send_kv_cache(
    link: ConnectorLink,
    stages: tuple[str | None, str | None],
    topology: Topology,
    kv_data: KVCacheTransferData,
    *,
    build_keys: SendKeyBuilder | None = None,
    num_kv_heads: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Put the KV of a request, for each receiver what it uses of it.

    Returns:
        Bytes put.

    Raises:
        ConfigError: the stages, or the connector, are not configured.
        TransportError: a part was not put in three tries, 0.1 s and 0.2 s apart; parts of the
            same request that were are withdrawn.
        ValueError: the heads cannot be shared out, or the metadata is no JSON.
    """
    from_stage, to_stage = stages
    if from_stage is None or to_stage is None:
        raise ConfigError("omni_from_stage and omni_to_stage are not both configured")
    if not link.configured:
        raise ConfigError("no connector is configured")
    request_id = kv_data.request_id
    keys = list(build_keys(request_id, from_stage, to_stage)) if build_keys is not None else []
    # Keys of others' making do not tell which rank each is for: its receiver cuts out its heads.
    sliced = topology.fan_out > 1 and not keys
    if not keys:
        keys = topology.send_keys(request_id, from_stage, to_stage)
    if topology.fan_in > 1 and num_kv_heads is not None:
        kv_data.metadata["tp_kv_heads"] = {
            "total": num_kv_heads,
            "source_rank": topology.rank,
            "from_tp": topology.from_tp,
        }
    size = 0
    try:
        for index, key in enumerate(keys):
            data = kv_data
            if sliced:
                data = slice_for_receiver(kv_data, topology, topology.target_ranks()[index])
            size += _put(link, from_stage, to_stage, key, data, sleep)
    except TransportError:
        # Receivers of some ranks must not find what those of others never will.
        if len(keys) > 1:
            link.cleanup(request_id)
        raise
    return size


def _put(
    link: ConnectorLink,
    from_stage: str,
    to_stage: str,
    key: str,
    data: KVCacheTransferData,
    sleep: Callable[[float], None],
) -> int:
    packed: Any = None
    reason = ""
    for attempt in range(SEND_TRIES):
        if attempt:
            link.count(send_retries=1)
            sleep(SEND_BACKOFF_S * 2 ** (attempt - 1))
        connector = link.connector
        if connector is None:
            reason = "there is no connector"
            continue
        if packed is None:
            packed = _pack(connector, data)
        try:
            done, size, _ = connector.put(
                from_stage=from_stage, to_stage=to_stage, put_key=key, data=packed
            )
        except Exception as error:
            # A connector may be anybody's.
            reason = f"{type(error).__name__}: {error}"
            logger.warning("put of %r failed", key, exc_info=True)
            continue
        if done:
            return int(size)
        reason = "the connector refused it"
    raise TransportError(f"{key!r} was not put in {SEND_TRIES} tries: {reason}")


def _pack(connector: Any, data: KVCacheTransferData) -> Any:
    if getattr(connector, "supports_raw_data", False):
        return data.to_gpu_tensor()
    # Ours join the bytes where they are going to lie.
    return Pieces(data.to_pieces()) if isinstance(connector, OmniConnector) else data.to_bytes()
