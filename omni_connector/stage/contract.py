# SPDX-License-Identifier: Apache-2.0
"""The contract that a sender may state in a payload's metadata: the payload is whole.

vLLM-Omni's senders state it in versions after 0.30, and its receivers then check the payload by it.
A payload without a contract is older, or has layers without key or value, as MLA has.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

CONTRACT_KEY: Final = "_kv_payload_contract"
CONTRACT_VERSION: Final = 1
"""Version of the contract under `CONTRACT_KEY`; a payload with another one is refused."""


def metadata_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a payload; empty where it is no mapping, which the format allows."""
    metadata = payload.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def states_contract(payload: Mapping[str, Any]) -> bool:
    """Whether a payload says that it is whole."""
    return metadata_of(payload).get(CONTRACT_KEY) is not None


def validate(payload: object, request_id: str, *, required: bool = False) -> None:
    """Refuse a payload that breaks the contract that it states.

    Args:
        payload: request_id, layer_blocks, block_ids, metadata.
        request_id: the request that it must be of.
        required: refuse a payload without a contract, too; its parts had one.

    Raises:
        ValueError: the message says what is missing, or does not fit.
    """
    if not isinstance(payload, dict):
        raise ValueError(f"a KV payload is a dict, not a {type(payload).__name__}")
    metadata = metadata_of(payload)
    version = metadata.get(CONTRACT_KEY)
    if version is None:
        if required:
            raise ValueError(f"{CONTRACT_KEY} was removed during rank merge or slicing")
        return
    if version != CONTRACT_VERSION:
        raise ValueError(f"Unsupported {CONTRACT_KEY}: {version!r}")
    if payload.get("request_id") != request_id:
        raise ValueError(
            f"request ID mismatch: {payload.get('request_id')!r} instead of {request_id!r}"
        )
    layers, tokens, block_size = (
        _positive(metadata, name) for name in ("num_layers", "seq_len", "block_size")
    )
    blocks = payload.get("block_ids")
    needed = -(-tokens // block_size)
    if not isinstance(blocks, list) or len(blocks) < needed:
        raise ValueError(f"the block table has not the {needed} blocks of {tokens} tokens")
    keys, values = _caches(payload.get("layer_blocks"))
    if (len(keys), len(values)) != (layers, layers):
        raise ValueError(
            f"Incomplete KV payload layers: {len(keys)} of keys and {len(values)} of values, "
            f"of {layers}"
        )
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        _check_layer(number, key, value, tokens)


def _positive(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata.get(name)
    if type(value) is not int or value <= 0:
        raise ValueError(f"{name} is {value!r}, not a positive integer")
    return value


def _caches(blocks: object) -> tuple[list[Any], list[Any]]:
    caches = blocks if isinstance(blocks, dict) else {}
    keys, values = caches.get("key_cache"), caches.get("value_cache")
    if not isinstance(keys, list) or not isinstance(values, list):
        raise ValueError("layer_blocks has not the lists key_cache and value_cache")
    return keys, values


def _check_layer(number: int, key: object, value: object, tokens: int) -> None:
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        raise ValueError(f"layer {number} is missing key or value")
    if key.shape != value.shape:
        raise ValueError(
            f"layer {number} has mismatched K/V shapes: {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if not key.dim() or key.shape[0] != tokens:
        raise ValueError(f"layer {number} is {tuple(key.shape)}, not {tokens} tokens")
