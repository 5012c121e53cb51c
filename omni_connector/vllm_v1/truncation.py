# SPDX-License-Identifier: Apache-2.0
"""Leaving the last token of a prompt to the decode engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

TRUNCATED: Final = "_p_side_truncated"
"""NixlConnector's mark of a prompt that it has shortened, which beside it must happen once."""


def truncation_refusal(request: "Request", num_tokens: int) -> str | None:
    """Why the last token of a prompt cannot be left to the decode engine."""
    if request.skip_reading_prefix_cache:  # as for prompt log-probabilities: all of it is wanted
        return "prompt_logprobs"
    if any(
        feature.mm_position.offset + feature.mm_position.length > num_tokens
        for feature in request.mm_features
    ):
        return "multimodal_tail"
    return None


def truncate(request: "Request", params: Mapping[str, Any]) -> None:
    """Leave the last token of the prompt to the decode engine, and end after the one before it.

    A recurrent state, and the blocks of a window, are those of one token: the decode engine
    computes the last token, so it needs them as they are before it.
    """
    assert request.prompt_token_ids is not None
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    if request.sampling_params is not None:
        request.sampling_params.min_tokens = 0  # else it would outlive its only token
    # In a dict of its own: the caller's may serve more than one request.
    request.kv_transfer_params = {**params, TRUNCATED: True}
