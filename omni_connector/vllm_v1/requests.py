# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half reads of vLLM's requests, and what it changes of them."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b, sha256
from operator import ne
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from omni_connector.handoff.params import is_usable
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.truncation import answer_one_token
from omni_connector.net.status import plain
from omni_connector.net.warnings import Warnings
from omni_connector.prefix.hints import KEYS, NO_HINTS, Hints, read_hints, wrong_hint
from omni_connector.prefix.shared_prefix import SharedPrefix
from omni_connector.runtime.stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = init_logger("vllm.omni_connector.scheduler")

# Longest text of a client's hint in the log, in characters: two lines of a terminal.
_SHOWN_CHARS: Final = 200


def _unhashed(request: "Request", begin: int, end: int, dtype: object) -> bytes:
    """What vLLM's block hashes leave out of these positions of a prompt, although their KV depends
    on it (vLLM #56655): where tokens are read in place of embeddings, and the type of embeddings
    that are converted. Empty where they leave nothing out.

    `complete_hashes` adds it to the hashes, which name slots and shared blocks, and `prompt_of` to
    the digest.

    Args:
        dtype: the `torch.dtype` in which the model reads embeddings.
    """
    embeds = request.prompt_embeds
    if embeds is None:
        return b""
    found = b"" if embeds.dtype == dtype else str(embeds.dtype).encode()
    is_token = request.prompt_is_token_ids
    mask = bytes(is_token[begin:end]) if is_token is not None else b""
    return found + b"=" + mask if any(mask) else found


def complete_hashes(request: "Request", hash_block_size: int, dtype: object) -> bool:
    """Add to vLLM's block hashes of a new request what they leave out; see `_unhashed`.

    vLLM's own prefix cache, its events, and connectors beside this one go by these hashes, too. So
    KV of another prompt can neither come from vLLM's cache nor be named wrongly.

    Args:
        hash_block_size: tokens that each hash stands for; 0 where hashes name no KV.
        dtype: as of `_unhashed`.

    Returns:
        False where this vLLM does not make its hashes as expected. They name no KV then.
    """
    if not hash_block_size:
        return True
    untold = {
        (begin, begin + hash_block_size): found
        for begin in range(0, request.num_prompt_tokens, hash_block_size)
        if (found := _unhashed(request, begin, begin + hash_block_size, dtype))
    }
    if not untold:
        return True
    # vLLM keeps here what a hash says of the embeddings of a block.
    of_embeddings = getattr(request, "_prompt_embeds_per_block_hashes", {})
    for block, found in untold.items():
        generate_block_hash_extra_keys(request, *block, 0)
        if block not in of_embeddings:
            return False
        of_embeddings[block] = sha256(of_embeddings[block] + found).digest()
    first = min(untold)[0] // hash_block_size
    before = request.block_hashes[first:]
    del request.block_hashes[first:]
    request.update_block_hashes()
    return all(map(ne, before, request.block_hashes[first:]))


def prompt_of(
    request: "Request",
    num_tokens: int,
    hash_block_size: int,
    dtype: object,
    adapter: str = "",
    tokens_ahead: int = 0,
) -> Prompt | None:
    """The first `num_tokens` tokens of a request's prompt, as peers compare them.

    None where the prompt consists of embeddings, and a drafter reads the tokens in their place.

    Args:
        hash_block_size: tokens that each of the request's block hashes stands for.
        dtype: the `torch.dtype` in which the model reads embeddings.
        adapter: digest of what the request's LoRA adapter contains; "" without one.
        tokens_ahead: tokens after a position that its KV depends on.
    """
    tokens: Sequence[int] | None = request.prompt_token_ids
    embeds = request.prompt_embeds
    if embeds is not None and tokens_ahead:
        return None
    if embeds is not None:
        # vLLM takes 0 for the tokens in the place of embeddings, as its block hashes do.
        tokens = request.all_token_ids[:num_tokens]
    if tokens is None:
        return None
    extra = [f"salt={request.cache_salt}"] if request.cache_salt is not None else []
    if adapter:
        extra.append(f"lora={adapter}")
    for feature in request.mm_features:
        place = feature.mm_position
        extra.append(f"mm={feature.identifier}@{place.offset}+{place.length}")
    if embeds is not None:
        unhashed = blake2b(_unhashed(request, 0, num_tokens, dtype))
        extra.append(f"embeddings={unhashed.hexdigest()}")
    if tokens_ahead:
        extra.append(f"next={tokens[num_tokens : num_tokens + tokens_ahead]}")
    return Prompt(
        token_ids=tokens,
        num_tokens=num_tokens,
        block_hashes=request.block_hashes,
        hash_block_size=hash_block_size if request.block_hashes else 0,
        extra=tuple(extra),
        tokens_ahead=tokens_ahead,
        adapter=adapter,
        embeddings=None if embeds is None else embeds.contiguous().view(torch.uint8).numpy(),
    )


def drop_unusable(request: "Request", stats: Stats) -> None:
    """Take from a new request params that neither this connector nor vLLM can read."""
    params: Any = request.kv_transfer_params
    if params is not None and not is_usable(params):
        stats.fail("malformed_params")
        logger.warning(
            "Request %s is served without hand-off: its kv_transfer_params are no object, or "
            "their do_remote_decode is no boolean (malformed_params)",
            request.request_id,
        )
        # vLLM itself takes them for an object, and would stop at anything else.
        known = params if isinstance(params, Mapping) else {}
        request.kv_transfer_params = {key: known[key] for key in KEYS if key in known} or None


def take_hints(
    request: "Request", shared: SharedPrefix | None, stats: Stats, warnings: Warnings
) -> Hints:
    """Read the hints of a new request, and leave of its params what they say of a hand-off.

    Args:
        warnings: of clients' hints that are misspelt.
        shared: says which hints are followed; None where nothing is shared.
        stats: counts hints that are not followed.

    Returns:
        Those that are followed.
    """
    params = request.kv_transfer_params
    sampling = request.sampling_params
    known = params if isinstance(params, Mapping) else {}
    extra_args = None if sampling is None else sampling.extra_args
    named = any(key in known for key in KEYS)
    if not extra_args and not named:
        return NO_HINTS  # most requests have none
    hints, bad = read_hints(known, extra_args, request.prompt_token_ids)
    if hints == NO_HINTS and not bad and not named:
        return NO_HINTS
    if bad and (wrong := wrong_hint(known, extra_args)):
        warnings.warn("Request %s: %s (bad_hints)", request.request_id, plain(wrong)[:_SHOWN_CHARS])
    if shared is None:
        bad += hints.keeps_here
        hints = NO_HINTS
    else:
        hints = shared.followed(hints)
    if bad:
        stats.count("bad_hints", bad)
    if named:
        request.kv_transfer_params = {key: known[key] for key in known if key not in KEYS} or None
    if hints.prefetch and request.kv_transfer_params is None:
        answer_one_token(request)
    return hints


def recompute(request: "Request", manager: "KVCacheManager") -> None:
    """Have a request computed from its first token although its load is about to be called good.

    vLLM does the same for a request in `failed_recving`. Call this from `update_connector_output`,
    before vLLM looks at `finished_recving`. The request is recomputed under
    `kv_load_failure_policy` "fail" too, because no connector can end a request.
    """
    if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        return  # aborted meanwhile
    request.num_computed_tokens = 0
    manager.free(request)


def token_hasher(
    vllm_config: "VllmConfig", hash_block_size: int
) -> Callable[[list[int], str | None, bytes | None], Sequence[bytes]]:
    """vLLM's hashes of full blocks, by their tokens, the cache salt and the hash before them."""
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    hasher = get_request_block_hasher(hash_block_size, hash_fn)

    def hashes(tokens: list[int], salt: str | None, after: bytes | None) -> Sequence[bytes]:
        before: list[Any] = [] if after is None else [after]
        tokens = [0] * (hash_block_size * len(before)) + tokens
        request = Request("", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt)
        request.block_hashes = before
        return hasher(request)

    return hashes
