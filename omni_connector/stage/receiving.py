# SPDX-License-Identifier: Apache-2.0
"""What a connector returns becomes one checked payload."""

from typing import Any

import torch

from omni_connector.stage import contract
from omni_connector.stage.payload import KVCacheTransferData

_FIELDS = ("request_id", "layer_blocks", "block_ids", "metadata")


def read_payload(received: object) -> dict[str, Any]:
    """The payload in what `get` of a connector returned.

    Args:
        received: packed bytes, in any buffer or tensor of bytes; an object whose `tensor`
            has them, and whose `release` is called once they are copied; or an unpacked payload.

    Returns:
        request_id, layer_blocks, block_ids, metadata.

    Raises:
        ValueError: it is no whole payload.
    """
    if isinstance(received, dict):
        return _check_fields(received)
    if isinstance(received, bytes | bytearray | memoryview):
        return KVCacheTransferData.from_bytes(received)
    if isinstance(received, torch.Tensor):
        if received.device.type == "cpu" and received.dtype == torch.uint8 and received.dim() == 1:
            return KVCacheTransferData.from_bytes(received.contiguous().numpy().data)
        return KVCacheTransferData.from_bytes_device(received)
    packed, release = getattr(received, "tensor", None), getattr(received, "release", None)
    if not isinstance(packed, torch.Tensor) or not callable(release):
        raise ValueError(f"a {type(received).__name__} is no KV payload")
    try:
        # These are copies: once released, the memory may be used for something else.
        return KVCacheTransferData.from_bytes_device(packed)
    finally:
        release()


def check_tokens(payload: dict[str, Any]) -> None:
    """Refuse a payload with fewer tokens than it states, or one that breaks its contract.

    Raises:
        ValueError: a layer has fewer tokens than `seq_len`; or see `contract.validate`.
    """
    contract.validate(payload, payload["request_id"])
    stated = contract.metadata_of(payload).get("seq_len")
    if not isinstance(stated, int):
        return
    for name, layers in payload["layer_blocks"].items():
        for number, tensor in enumerate(layers):
            if tensor is not None and tensor.dim() == 3 and tensor.shape[0] < stated:
                raise ValueError(f"{name}_{number} has {tensor.shape[0]} tokens of {stated}")


def place(payload: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """The payload with contiguous tensors, moved to the device if one is named."""

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
    # `to_pieces` checks names and types; tensors in host memory are not copied.
    try:
        data = KVCacheTransferData(**{name: payload[name] for name in _FIELDS})
        data.to_pieces()
        data.layer_blocks = {name: list(each or ()) for name, each in data.layer_blocks.items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a malformed KV payload: {error}") from error
    return data.to_dict()
