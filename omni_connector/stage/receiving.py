# SPDX-License-Identifier: Apache-2.0
"""Waiting for the KV of a request, and making one checked payload of what comes."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from omni_connector.stage.link import ConnectorLink
from omni_connector.stage.payload import KVCacheTransferData
from omni_connector.stage.tp import Topology

logger = logging.getLogger(__name__)

FIRST_POLL_S: Final = 0.01
LAST_POLL_S: Final = 0.5

# A key, and the sender's rank where there are several.
ReceiveKey = tuple[str, int | None]
ReceiveKeyBuilder = Callable[[str, str, str], Sequence[str | ReceiveKey]]

_FIELDS = ("request_id", "layer_blocks", "block_ids", "metadata")


def receive_keys(
    request_id: str,
    from_stage: str,
    to_stage: str,
    topology: Topology,
    build_keys: ReceiveKeyBuilder | None,
) -> list[ReceiveKey]:
    """The keys to get a request by: those of `build_keys` if it has any, else the usual ones."""
    built = list(build_keys(request_id, from_stage, to_stage)) if build_keys is not None else []
    if not built:
        return topology.receive_keys(request_id, from_stage, to_stage)
    sources = [] if topology.single else topology.source_ranks()
    ranks = iter(sources if len(sources) == len(built) else [None] * len(built))
    return [(each, next(ranks)) if isinstance(each, str) else (each[0], each[1]) for each in built]


def wait_for_payloads(
    link: ConnectorLink,
    stages: tuple[str, str],
    keys: Sequence[ReceiveKey],
    timeout: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[dict[str, Any]], int] | None:
    """Get the payloads of some keys, asking every 10 ms at first and every 500 ms later.

    Returns:
        The payloads, in the order of the keys, and their bytes in all; None after `timeout`
        seconds, which one `get` that is under way may exceed.

    Raises:
        ValueError: what came is no whole payload.
    """
    from_stage, to_stage = stages
    found: dict[str, tuple[dict[str, Any], int]] = {}
    deadline = clock() + timeout
    interval = FIRST_POLL_S
    while True:
        for key, rank in keys:
            if key not in found:
                result = _get(link, from_stage, to_stage, key, rank)
                if result is not None:
                    found[key] = read_payload(result[0]), int(result[1])
        if all(key in found for key, _ in keys):
            break
        left = deadline - clock()
        if left <= 0:
            logger.error(
                "%d of %d parts came from stage %s to %s in %.1f s; missing is %r",
                *(len(found), len(keys), from_stage, to_stage, timeout),
                next(key for key, _ in keys if key not in found),
            )
            return None
        sleep(min(interval, left))
        interval = min(2 * interval, LAST_POLL_S)
    return [found[key][0] for key, _ in keys], sum(size for _, size in found.values())


def _get(link: ConnectorLink, from_stage: str, to_stage: str, key: str, rank: int | None) -> Any:
    connector = link.connector
    if connector is None:
        return None
    try:
        return connector.get(
            from_stage=from_stage, to_stage=to_stage, get_key=key, metadata=link.source(rank)
        )
    except Exception:
        # A connector may be anybody's; the next poll may do better.
        logger.warning("get of %r failed", key, exc_info=True)
        return None


def read_payload(received: object) -> dict[str, Any]:
    """The payload in what `get` of a connector returned.

    Args:
        received: packed bytes, in any buffer, array or tensor of bytes, or in the `tensor` of an
            object that is to be told by `release` when it is done with; or a payload unpacked.

    Returns:
        request_id, layer_blocks, block_ids, metadata.

    Raises:
        ValueError: it is no whole payload.
    """
    if isinstance(received, dict):
        return _check_fields(received)
    if isinstance(received, bytes | bytearray | memoryview):
        return KVCacheTransferData.from_bytes(received)
    if isinstance(received, np.ndarray):
        return KVCacheTransferData.from_bytes(np.ascontiguousarray(received).data)
    if isinstance(received, torch.Tensor):
        if received.device.type == "cpu" and received.dtype == torch.uint8 and received.dim() == 1:
            return KVCacheTransferData.from_bytes(received.contiguous().numpy().data)
        return KVCacheTransferData.from_bytes_device(received)
    packed, release = getattr(received, "tensor", None), getattr(received, "release", None)
    if not isinstance(packed, torch.Tensor) or not callable(release):
        raise ValueError(f"a {type(received).__name__} is no KV payload")
    try:
        # Copies: the memory is another one's as soon as it is released.
        return KVCacheTransferData.from_bytes_device(packed)
    finally:
        release()


def check_tokens(payload: dict[str, Any]) -> None:
    """Refuse a payload that lacks tokens of those that it says it has.

    Raises:
        ValueError: a layer has fewer tokens than `seq_len`.
    """
    stated = payload["metadata"].get("seq_len")
    if not isinstance(stated, int):
        return
    for name, layers in payload["layer_blocks"].items():
        for number, tensor in enumerate(layers):
            if tensor is not None and tensor.dim() == 3 and tensor.shape[0] < stated:
                raise ValueError(f"{name}_{number} has {tensor.shape[0]} tokens of {stated}")


def place(payload: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """The payload with its tensors contiguous, and on a device if one is named."""

    def placed(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return (tensor if device is None else tensor.to(device)).contiguous()

    blocks = {
        name: [placed(tensor) for tensor in layers]
        for name, layers in payload["layer_blocks"].items()
    }
    return {**payload, "layer_blocks": blocks}


def _check_fields(payload: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in _FIELDS if name not in payload]
    if missing:
        raise ValueError(f"a KV payload without {', '.join(missing)}")
    # Packing checks names and types, and copies nothing.
    try:
        data = KVCacheTransferData(**{name: payload[name] for name in _FIELDS})
        data.to_pieces()
        data.layer_blocks = {name: list(each or ()) for name, each in data.layer_blocks.items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a malformed KV payload: {error}") from error
    return data.to_dict()
