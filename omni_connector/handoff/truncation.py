# SPDX-License-Identifier: Apache-2.0
"""Prompts whose last tokens are left to the decode engine.

A recurrent state, and the blocks of a window, belong to one token. The decode engine computes the
last token of a prompt, so it needs them as they are before that token. MTP of k modules computes
the KV of a token from the next k, so the decode engine computes the last k tokens.

Requests are those of vLLM.
"""

from collections.abc import Mapping
from typing import Any, Final

from omni_connector.handoff.params import wants_remote_kv

TRUNCATED: Final = "_p_side_truncated"
"""NixlConnector's mark of a prompt that it has shortened: of two connectors only one may do so."""


NO_TOKENS: Final = "its prompt is given as embeddings, and the drafter reads tokens"
"""What the log says of a prompt that cannot be told from others (`prompt_embeds`)."""


def truncation_refusal(request: Any, num_tokens: int) -> str | None:
    """Why the last token of a prompt cannot be left to the decode engine; None if it can."""
    if wants_remote_kv(request.kv_transfer_params or {}):
        # All that is left would be loaded. vLLM then computes the last loaded token once more, for
        # its logits, upon states that have it already, and windows that begin after its own.
        return "passed_on"
    if (reason := computes_all(request)) is not None:
        return reason
    if any(
        feature.mm_position.offset + feature.mm_position.length > num_tokens
        for feature in request.mm_features
    ):
        return "multimodal_tail"
    return None


def computes_all(request: Any) -> str | None:
    """Why a request has to compute all tokens of its prompt; None if it need not.

    vLLM 0.30 would load what a connector offers for it, so nothing may be offered.
    """
    if not request.skip_reading_prefix_cache:
        return None
    # vLLM sets it too where log-probabilities are wanted of all tokens of the prompt.
    sampling = request.sampling_params
    logprobs = sampling is not None and sampling.prompt_logprobs is not None
    return "prompt_logprobs" if logprobs else "skip_reading_prefix_cache"


def goes_on_after(loaded: int, prompt: int, *, ahead: int, state_block: int) -> bool:
    """Whether vLLM ever computes the rest of a prompt of which some tokens were loaded.

    Where it keeps states at the ends of blocks, it has a step end there. With MTP of k modules it
    has none end within k tokens of the prompt's end. If both hold, it computes nothing, for ever.

    Args:
        loaded: tokens that are loaded.
        prompt: tokens of the prompt.
        ahead: tokens after a position that its KV depends on.
        state_block: tokens of a block at whose end a state is kept; 0 where none is.
    """
    if ahead < 2 or not state_block or not loaded % state_block:
        return True
    return loaded // state_block == (prompt - 1) // state_block


def truncate(request: Any, params: Mapping[str, Any], tokens_left: int, *, drafts: bool) -> None:
    """Leave the last tokens of the prompt to the decode engine, and end after the one before them.

    Args:
        params: the request's.
        tokens_left: how many tokens are left to the decode engine.
        drafts: whether a drafter computes its KV of the last token from the answer to the shortened
            prompt. Then the answer has to be the first token that is left.
    """
    follows = request.all_token_ids[-tokens_left]
    # In an engine of one process the list is the caller's, and serves each of n answers.
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        part = getattr(request, name, None)
        if part is not None:  # a prompt of embeddings may have no token ids
            setattr(request, name, part[:-tokens_left])
    del request._all_token_ids[-tokens_left:]
    request.num_prompt_tokens -= tokens_left
    if drafts and request.sampling_params is not None:
        _answer_with(request, follows)
    answer_one_token(request)
    # A dict of its own, because the caller's may serve more than one request.
    request.kv_transfer_params = {**params, TRUNCATED: True}


def _answer_with(request: Any, token: int) -> None:
    """Have a request answer with this token, unless it has to follow a grammar."""
    if request.structured_output_request is not None:
        return  # the grammar may forbid the token, and then the drafter has another one
    # A copy, because the caller's may serve more than one request.
    sampling = request.sampling_params.clone()
    sampling.allowed_token_ids = [token]
    sampling.logit_bias = None
    sampling.bad_words = []
    request.sampling_params = sampling


def may_be_cut(request: Any) -> bool:
    """Whether a request whose hand-off is refused can be answered without computing its prompt: its
    sender waits for the hand-off, and not for tokens."""
    return (
        request.max_tokens == 1
        and request.num_prompt_tokens > 1
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
        and not request.skip_reading_prefix_cache  # also where log-probabilities are wanted
        and not wants_remote_kv(request.kv_transfer_params or {})
    )


def cut(request: Any) -> None:
    """Cut the prompt of a request to its first token; see `may_be_cut`."""
    request.prompt_token_ids = request.prompt_token_ids[:1]
    del request._all_token_ids[1:]
    request.num_prompt_tokens = 1
    request.block_hashes = request.block_hashes[:0]
    answer_one_token(request)


def answer_one_token(request: Any) -> None:
    """Have a request end with the first token of its answer."""
    request.max_tokens = 1
    if request.sampling_params is not None:
        request.sampling_params.min_tokens = 0  # else it would outlive its only token
