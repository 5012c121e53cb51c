# SPDX-License-Identifier: Apache-2.0
"""The names of all metrics, and their help texts. `vllm_v1.metrics` puts `vllm:omni_connector_`
before them."""

from typing import Final

FAILURE: Final = "failure:"
"""Prefix of the counters of failures; the kind of failure follows."""

MISSED: Final = "missed:"
"""Prefix of the counters of missed tokens; the cause follows."""

PEER: Final = "peer:"
"""Prefix of the counters of peers' arenas; transport and reason follow."""

# The descriptions are the help texts of vLLM's metrics.
COUNTERS: Final = {
    "bytes_saved": "Bytes copied from KV blocks to slots.",
    "bytes_saved_early": "Bytes of them copied while the forward pass computed other layers.",
    "bytes_loaded": "Bytes copied from a peer's slots to KV blocks.",
    "blocks_saved": "KV blocks copied to slots.",
    "blocks_loaded": "KV blocks copied from a peer's slots.",
    "tokens_cached": "Prompt tokens that vLLM's own cache had, of engines that share prefixes.",
    "tokens_loaded": "Prompt tokens whose KV came from a peer.",
    "tokens_kept": "Prompt tokens whose KV came from this engine's own arena.",
    "tokens_from_host": "Prompt tokens whose KV came from the arenas of other engines of the host.",
    "tokens_shared": "Prompt tokens whose KV came from the shared store.",
    "tokens_from_tails": "Part of these: tokens in blocks in which prompts or requests have ended.",
    "tokens_from_others": "Prompt tokens that a connector beside this one loads, where it shares.",
    "blocks_stored": "KV blocks that the shared store took, or had already.",
    "blocks_dropped": "KV blocks not kept or stored: too many were on their way, no slot was free, "
    "or vLLM had evicted them.",
    "blocks_passed_over": "KV blocks not kept, being new where hardly any are used again.",
    "tails_kept": "Ends of prompts and requests within a block that were kept.",
    "answers_cut": "Answers kept up to where the model begins to think, and not beyond.",
    "pins_refused": "KV blocks that were not pinned: beyond what may be, or not in the arena.",
    "pins_superseded": "KV blocks whose pins ended with a newer state of their session.",
    "blocks_let_go": "KV blocks of sessions that are over, which were let go.",
    "bad_hints": "Hints of requests that were unknown, wrong, or cannot be followed here.",
    "hints_refused": "Hints of requests that the setting `hints` does not allow.",
    "store_misses": "Prompts of which the shared store held nothing beyond the local prefix.",
    "handoffs_offered": "Finished prefills whose KV a peer may lease.",
    "handoffs_received": "Prompts whose KV was loaded from a peer.",
    "handoffs_expired": "Hand-offs that no peer leased or released in time.",
}
SECONDS: Final = {
    "save": "Duration of one copy from KV blocks to slots.",
    "load": "Duration of one load from a peer's slots, its connection included.",
    "share": "Duration of one load from the prefix cache of the host.",
    "fetch": "Duration of one load from the shared store.",
    "claim": "Time from a decode request's arrival to the peer's answer.",
}
GAUGES: Final = {
    "slots_in_use": "Slots held by hand-offs or being written.",
    "slots_cached": "Slots kept for reuse that nobody holds.",
    "slots_pinned": "Slots of them that are pinned.",
    "slots_total": "Slots in the arena.",
    "leases": "Hand-offs leased to a peer.",
    "pinned_bytes": "Bytes of arenas, in the host's memory, that GPUs copy by themselves.",
    "unpinned_bytes": "Bytes of arenas that GPUs copy through a buffer, as they have not pinned "
    "them.",
    "draining": "1 while the engine drains, else 0.",
    "offers_handoffs": "1 while the engine offers new hand-offs, else 0.",
    "fetches_handoffs": "1 while the engine fetches hand-offs, else 0.",
}
