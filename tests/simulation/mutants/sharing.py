# SPDX-License-Identifier: Apache-2.0
"""Mutants of what engines of one host share: indexes, kept slots, loads without a lease."""

from typing import Final

from tests.simulation.mutants.faults import mutant

SHARING: Final = (
    mutant(
        "a decode engine keeps its index",
        "an engine that hands nothing off shares after a reset what it had before",
        (
            "vllm_v1.scheduler",
            "slots, generations = self._directory.void()",
            "slots, generations = [], []",
        ),
        ("prefix.host_blocks", "self._pool.forget()", ""),
    ),
    mutant(
        "what an index lists is waited for",
        "a load waits for a slot that an index lists, and nobody fills",
        ("copy.loading", "if step.keys is not None:", "if False:"),
        (
            "copy.loading",
            "if isinstance(error, SlotPendingError) and step.keys is not None:",
            "if False:",
        ),
    ),
    mutant(
        "hits wait for their arenas",
        "a neighbour counts before its arenas are attached, and a load waits for them",
        (
            "copy.loading",
            "self.arenas = rank.arenas.open(waits=spec.own or spec.keys is None)",
            "self.arenas = rank.arenas.open()",
        ),
        ("transports.peer_arenas", "return ready", "return True"),
    ),
    mutant(
        "orphans are kept for ever",
        "what an engine had kept stays mapped long after its end",
        ("prefix.neighbours", "if now >= orphan.until or", "if"),
    ),
    mutant(
        "a drop takes slots that are held",
        "what an operator drops is freed although a hand-off or a copy still needs it",
        (
            "arena.slot_pool",
            "cached = slot_ids[self._order.here(slot_ids)]",
            "cached = slot_ids[self._ready[slot_ids]]",
        ),
        (
            "arena.slot_pool",
            "self._order.remove(cached)\nself.num_cached -= len(cached)",
            "there = cached[self._order.here(cached)]\n"
            "self._order.remove(there)\n"
            "self.num_cached -= len(there)",
        ),
    ),
    mutant(
        "moved blocks change places",
        "a block that is moved to another arena is listed in the slot of another block",
        ("prefix.host_blocks", "own_slots=given.slots[of],", "own_slots=given.slots[of][::-1],"),
    ),
    mutant(
        "ended engines are kept for ever",
        "what `omni-connector keep` has of an engine stays long after its end",
        (
            "prefix.keep",
            "(_, until) in self._kept.items() if now >= until]:",
            "(_, until) in self._kept.items() if now < 0]:",
        ),
    ),
    mutant(
        "ended engines are kept without a bound",
        "what `omni-connector keep` has of ended engines takes any memory",
        ("prefix.keep", "or self.nbytes > self._most_bytes:", ":"),
    ),
    mutant(
        "the own arena is attached",
        "an engine reads its own arena as that of a peer, through its socket",
        (
            "transports.peer_arenas",
            "if (own := self._arenas.own.get(endpoints)) is not None:",
            "if (own := None) is not None:",
        ),
        (
            "copy.loading",
            "self.arenas = rank.arenas.open(waits=spec.own or spec.keys is None)",
            "self.arenas = rank.arenas.open()",
        ),
    ),
    mutant(
        "keys of headers are not compared",
        "whatever is in the slot that an index lists is taken for the block",
        (
            "copy.loading",
            "if part.keys is not None and headers.keys != part.keys.tolist():",
            "if False:",
        ),
    ),
    mutant(
        "tails are found by their length",
        "a request goes on behind other tokens than its own, if they are as many",
        (
            "kv.tails",
            "ids = np.asarray(tokens, np.int64).view(np.uint64)",
            "ids = np.zeros(len(tokens), np.uint64)",
        ),
        (
            "kv.tails",
            'content = array("q", tokens).tobytes()',
            "content = bytes(_TOKEN_BYTES * len(tokens))",
        ),
    ),
    mutant(
        "tails end with tokens that nobody knows",
        "a tail is named by the tokens that are known, and its state has read one more",
        ("prefix.tails", "return min([known, *(", "return min([1 << 40, *("),
    ),
    mutant(
        "a tail in a store is all of a prompt",
        "a prompt goes on behind its last token, whose state it then computes once more",
        (
            "prefix.shared_prefix",
            "last = prompt.last_reachable(prompt.request.num_tokens, 1)",
            "last = prompt.request.num_tokens",
        ),
    ),
    mutant(
        "a tail is named by one token too few",
        "the state of a tail has read a token that the tail has not",
        (
            "prefix.saves",
            "end = prompt.request.num_computed_tokens",
            "end = max(0, prompt.request.num_computed_tokens - 1)",
        ),
    ),
    mutant(
        "a prompt ends with the state of a later token",
        "vLLM copies no state before the step overwrites it",
        ("vllm_v1.scheduler", "copy_blocks(scheduler_output, self._ledger.block_copies)", ""),
    ),
    mutant(
        "copies overwrite what vLLM copies",
        "a state is copied to a block that vLLM copies in the same step",
        (
            "vllm_v1.scheduler",
            "pool.touch(blocks)\ntry:\n    yield\nfinally:\n    pool.free_blocks(blocks)",
            "yield",
        ),
    ),
    mutant(
        "the state at a boundary is the request's own",
        "where vLLM keeps the state of a whole unit, the state of a later token is kept",
        ("prefix.saves", "if whose in elsewhere:", "if whose < 0:"),
    ),
    mutant(
        "an index outlives its epoch",
        "after a reset peers find what was kept before",
        ("arena.slot_pool", "self.listing.clear()", "pass"),
    ),
    mutant(
        "keys outlive their epoch",
        "what is kept after a reset has keys as before",
        (
            "prefix.shared_prefix:SharedPrefix.follow",
            "self._host.rename(self._prefix.in_arenas)",
            "pass",
        ),
    ),
    mutant(
        "evicted slots stay listed",
        "a slot that is about to be filled anew is found by the block that it held",
        ("arena.slot_pool", "self.listing.hide(slot_ids)", "pass"),
    ),
    mutant(
        "slots are listed too soon",
        "a slot is found from the moment that its copy is decided",
        (
            "arena.slot_pool",
            "self.listing.name(group, keys, slot_ids, tags)",
            "self.listing.name(group, keys, slot_ids, tags)\n"
            "self.listing.show(slot_ids, self.generation[slot_ids])",
        ),
    ),
    mutant(
        "what was not kept is listed",
        "a slot whose copy has failed is found",
        ("prefix.host_blocks", "if failure is None:", "if True:"),
    ),
    mutant(
        "kept slots stay held",
        "a slot that was filled for the host is never evicted",
        ("prefix.host_blocks", "self._pool.let_go(spec.slots[::-1])", ""),
    ),
    mutant(
        "room is lost with each block that is kept",
        "slots that were filled count as being filled",
        ("prefix.host_blocks", "spec = self.keeping.pop(job_id)", "spec = self.keeping[job_id]"),
    ),
    mutant(
        "copies into the arena hold no blocks",
        "what is copied for the host is not held",
        (
            "prefix.saves",
            "job_id = self._ledger.start(spec.blocks, ended, soon=_COPY_S)",
            "job_id = self._ledger.start(BlockSpans.of(()), ended, soon=_COPY_S)",
        ),
    ),
    mutant(
        "a store has no holes",
        "a prefix ends at the last block that a store has, whatever is missing before it",
        (
            "prefix.lookups",
            "return int(self.misses[at]) if at < len(self.misses) else max(start, "
            "len(self.blocks))",
            "there = np.flatnonzero(self.blocks)\n"
            "return max(start, int(there[-1]) + 1 if len(there) else start)",
        ),
    ),
    mutant(
        "a window has no holes",
        "of the blocks that a window reads a store has the last one, and that is enough",
        (
            "prefix.lookups",
            "self.runs[np.where(known, end - 1, 0)] >= count)",
            "self.runs[np.where(known, end - 1, 0)] >= 1)",
        ),
    ),
    mutant(
        "some of the blocks are enough",
        "a load from a store is good where one block of it has come",
        ("prefix.store_jobs", "if not all(there):", "if not any(there):"),
    ),
    mutant(
        "a failed part counts",
        "a request whose load from one of several arenas has failed goes on as if it had not",
        ("prefix.loads", "elif prompt.failure is None:", "else:"),
    ),
    mutant(
        "the first part is the load",
        "a request of which one arena has sent its part is computed with",
        ("vllm_v1.outcomes", "if self._loads_left[spec.request_id] <= 0:", "if True:"),
    ),
    mutant(
        "a failed load from the host is told to vLLM",
        "whose policy may end the request for it",
        ("vllm_v1.outcomes", "if type(spec) is LoadSpec and", "if isinstance(spec, LoadSpec) and"),
    ),
    mutant(
        "a load that has failed is tried again",
        "vLLM counts the blocks of the first load too, and the request waits for itself",
        ("prefix.loads", "prompt.loads = False", ""),
    ),
    mutant(
        "hits are believed",
        "an engine is told that slots were read which it does not have",
        (
            "arena.slot_pool",
            "known = (slot_ids >= 0) & (slot_ids < len(self.generation))",
            "known = slot_ids >= 0",
        ),
    ),
    mutant(
        "blocks are kept before they are full",
        "the block that a step begins to fill is listed with those that it fills",
        (
            "prefix.saves",
            "end = there // unit * unit // shape.block_size",
            "end = -(-there // unit) * unit // shape.block_size",
        ),
    ),
    mutant(
        "a window is all that is there",
        "the tokens before a gap are offered with those after it, which are not there",
        (
            "prefix.lookups",
            'if shape.attention_type != "all" and shape.is_cached:',
            'if shape.attention_type == "none":',
        ),
    ),
    mutant(
        "the last state is that of all blocks",
        "the state at a step's end is kept for each block that the step has filled",
        (
            "kv.spans",
            "found = zip(block_ids, finds(block_ids, hashes), strict=True)",
            'if shape.attention_type == "last" and finds(block_ids[-1:], hashes[-1:])[0]:\n'
            "    return block_ids[-1:] * len(block_ids)\n"
            "found = zip(block_ids, finds(block_ids, hashes), strict=True)",
        ),
    ),
)
