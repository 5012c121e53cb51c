# SPDX-License-Identifier: Apache-2.0
"""Mutants of what engines of one host share: indexes, kept slots, loads without a lease."""

from typing import Final

from tests.simulation.mutants.faults import mutant

SHARING: Final = (
    mutant(
        "a decode engine keeps its index",
        "an engine that hands nothing off shares after a reset what it had before",
        (
            "omni_connector.vllm_v1.scheduler",
            "            slots, generations = self._directory.void()\n",
            "            slots, generations = [], []\n",
        ),
        (
            "omni_connector.prefix.host_blocks",
            "            self._pool.forget()  # without hand-offs nothing else calls it\n",
            "",
        ),
    ),
    mutant(
        "what an index lists is waited for",
        "a load waits for a slot that an index lists, and nobody fills",
        (
            "omni_connector.copy.loading",
            "            if step.keys is not None:\n",
            "            if False:\n",
        ),
        (
            "omni_connector.copy.loading",
            "            if isinstance(error, SlotPendingError) and step.keys is not None:\n",
            "            if False:\n",
        ),
    ),
    mutant(
        "hits wait for their arenas",
        "a neighbour counts before its arenas are attached, and a load waits for them",
        (
            "omni_connector.copy.loading",
            "        self.arenas = rank.arenas.open(waits=spec.own or spec.keys is None)\n",
            "        self.arenas = rank.arenas.open()\n",
        ),
        (
            "omni_connector.transports.peer_arenas",
            "        return ready\n",
            "        return True\n",
        ),
    ),
    mutant(
        "orphans are kept for ever",
        "what an engine had kept stays mapped long after its end",
        (
            "omni_connector.prefix.neighbours",
            "            if now >= orphan.until or",
            "            if",
        ),
    ),
    mutant(
        "a drop takes slots that are held",
        "what an operator drops is freed although a hand-off or a copy still needs it",
        (
            "omni_connector.arena.slot_pool",
            "        cached = slot_ids[self._order.here(slot_ids)]\n        if not len(cached):",
            "        cached = slot_ids[self._ready[slot_ids]]\n        if not len(cached):",
        ),
        (
            "omni_connector.arena.slot_pool",
            "        self._order.remove(cached)\n        self.num_cached -= len(cached)\n"
            "        if self.listing",
            "        there = cached[self._order.here(cached)]\n"
            "        self._order.remove(there)\n        self.num_cached -= len(there)\n"
            "        if self.listing",
        ),
    ),
    mutant(
        "moved blocks change places",
        "a block that is moved to another arena is listed in the slot of another block",
        (
            "omni_connector.prefix.host_blocks",
            "                own_slots=given.slots[of],\n",
            "                own_slots=given.slots[of][::-1],\n",
        ),
    ),
    mutant(
        "ended engines are kept for ever",
        "what `omni-connector keep` has of an engine stays long after its end",
        (
            "omni_connector.prefix.keep",
            "(_, until) in self._kept.items() if now >= until]:",
            "(_, until) in self._kept.items() if now < 0]:",
        ),
    ),
    mutant(
        "ended engines are kept without a bound",
        "what `omni-connector keep` has of ended engines takes any memory",
        (
            "omni_connector.prefix.keep",
            " or self.nbytes > self._most_bytes:",
            ":",
        ),
    ),
    mutant(
        "the own arena is attached",
        "an engine reads its own arena as that of a peer, through its socket",
        (
            "omni_connector.transports.peer_arenas",
            "        if (own := self._arenas.own.get(endpoints)) is not None:\n",
            "        if (own := None) is not None:\n",
        ),
        (
            "omni_connector.copy.loading",
            "        self.arenas = rank.arenas.open(waits=spec.own or spec.keys is None)\n",
            "        self.arenas = rank.arenas.open()\n",
        ),
    ),
    mutant(
        "keys of headers are not compared",
        "whatever is in the slot that an index lists is taken for the block",
        (
            "omni_connector.copy.loading",
            "        if part.keys is not None and headers.keys != part.keys.tolist():\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "tails are found by their length",
        "a request goes on behind other tokens than its own, if they are as many",
        (
            "omni_connector.kv.tails",
            "    ids = np.asarray(tokens, np.int64).view(np.uint64)\n",
            "    ids = np.zeros(len(tokens), np.uint64)\n",
        ),
        (
            "omni_connector.kv.tails",
            '    content = array("q", tokens).tobytes()\n',
            "    content = bytes(_TOKEN_BYTES * len(tokens))\n",
        ),
    ),
    mutant(
        "tails end with tokens that nobody knows",
        "a tail is named by the tokens that are known, and its state has read one more",
        (
            "omni_connector.prefix.tails",
            "        return min([known, *(",
            "        return min([1 << 40, *(",
        ),
    ),
    mutant(
        "a tail in a store is all of a prompt",
        "a prompt goes on behind its last token, whose state it then computes once more",
        (
            "omni_connector.prefix.shared_prefix",
            "            last = prompt.last_reachable(prompt.request.num_tokens, 1)\n",
            "            last = prompt.request.num_tokens\n",
        ),
    ),
    mutant(
        "a tail is named by one token too few",
        "the state of a tail has read a token that the tail has not",
        (
            "omni_connector.prefix.saves",
            "        end = prompt.request.num_computed_tokens\n",
            "        end = max(0, prompt.request.num_computed_tokens - 1)\n",
        ),
    ),
    mutant(
        "a prompt ends with the state of a later token",
        "vLLM copies no state before the step overwrites it",
        (
            "omni_connector.vllm_v1.scheduler",
            "            copy_blocks(scheduler_output, self._ledger.block_copies)\n",
            "",
        ),
    ),
    mutant(
        "copies overwrite what vLLM copies",
        "a state is copied to a block that vLLM copies in the same step",
        (
            "omni_connector.vllm_v1.scheduler",
            "        pool.touch(blocks)\n        try:\n            yield\n        finally:\n"
            "            pool.free_blocks(blocks)\n",
            "        yield\n",
        ),
    ),
    mutant(
        "the state at a boundary is the request's own",
        "where vLLM keeps the state of a whole unit, the state of a later token is kept",
        (
            "omni_connector.prefix.saves",
            "            if whose in elsewhere:\n",
            "            if whose < 0:\n",
        ),
    ),
    mutant(
        "an index outlives its epoch",
        "after a reset peers find what was kept before",
        (
            "omni_connector.arena.slot_pool",
            "            self.listing.clear()\n",
            "            pass\n",
        ),
    ),
    mutant(
        "keys outlive their epoch",
        "what is kept after a reset has keys as before",
        (
            "omni_connector.prefix.shared_prefix",
            "            self._host.rename(self._prefix.in_arenas)\n        for prompt in"
            " self._prompts:\n            if prompt.loads",
            "            pass\n        for prompt in self._prompts:\n            if prompt.loads",
        ),
    ),
    mutant(
        "evicted slots stay listed",
        "a slot that is about to be filled anew is found by the block that it held",
        (
            "omni_connector.arena.slot_pool",
            "            self.listing.hide(slot_ids)\n",
            "            pass\n",
        ),
    ),
    mutant(
        "slots are listed too soon",
        "a slot is found from the moment that its copy is decided",
        (
            "omni_connector.arena.slot_pool",
            "            self.listing.name(group, keys, slot_ids, tags)\n",
            "            self.listing.name(group, keys, slot_ids, tags)\n"
            "            self.listing.show(slot_ids, self.generation[slot_ids])\n",
        ),
    ),
    mutant(
        "what was not kept is listed",
        "a slot whose copy has failed is found",
        (
            "omni_connector.prefix.host_blocks",
            "            if failure is None:\n",
            "            if True:\n",
        ),
    ),
    mutant(
        "kept slots stay held",
        "a slot that was filled for the host is never evicted",
        (
            "omni_connector.prefix.host_blocks",
            "            self._pool.let_go(spec.slots[::-1])\n",
            "",
        ),
    ),
    mutant(
        "room is lost with each block that is kept",
        "slots that were filled count as being filled",
        (
            "omni_connector.prefix.host_blocks",
            "        spec = self.keeping.pop(job_id)\n",
            "        spec = self.keeping[job_id]\n",
        ),
    ),
    mutant(
        "copies into the arena hold no blocks",
        "what is copied for the host is not held",
        (
            "omni_connector.prefix.saves",
            "        job_id = self._ledger.start(spec.blocks, ended, soon=_COPY_S)\n",
            "        job_id = self._ledger.start(BlockSpans.of(()), ended, soon=_COPY_S)\n",
        ),
    ),
    mutant(
        "a store has no holes",
        "a prefix ends at the last block that a store has, whatever is missing before it",
        (
            "omni_connector.prefix.lookups",
            "        return int(self.misses[at]) if at < len(self.misses) else "
            "max(start, len(self.blocks))\n",
            "        there = np.flatnonzero(self.blocks)\n"
            "        return max(start, int(there[-1]) + 1 if len(there) else start)\n",
        ),
    ),
    mutant(
        "a window has no holes",
        "of the blocks that a window reads a store has the last one, and that is enough",
        (
            "omni_connector.prefix.lookups",
            "self.runs[np.where(known, end - 1, 0)] >= count)",
            "self.runs[np.where(known, end - 1, 0)] >= 1)",
        ),
    ),
    mutant(
        "some of the blocks are enough",
        "a load from a store is good where one block of it has come",
        (
            "omni_connector.prefix.store_jobs",
            "        if not all(there):\n            raise _GoneError",
            "        if not any(there):\n            raise _GoneError",
        ),
    ),
    mutant(
        "a failed part counts",
        "a request whose load from one of several arenas has failed goes on as if it had not",
        (
            "omni_connector.prefix.loads",
            "        elif prompt.failure is None:\n",
            "        else:\n",
        ),
    ),
    mutant(
        "the first part is the load",
        "a request of which one arena has sent its part is computed with",
        (
            "omni_connector.vllm_v1.outcomes",
            "            if self._loads_left[spec.request_id] <= 0:\n",
            "            if True:\n",
        ),
    ),
    mutant(
        "a failed load from the host is told to vLLM",
        "whose policy may end the request for it",
        (
            "omni_connector.vllm_v1.outcomes",
            "        if type(spec) is LoadSpec and",
            "        if isinstance(spec, LoadSpec) and",
        ),
    ),
    mutant(
        "a load that has failed is tried again",
        "vLLM counts the blocks of the first load too, and the request waits for itself",
        (
            "omni_connector.prefix.loads",
            "        prompt.loads = False\n        prompt.found = None\n",
            "        prompt.found = None\n",
        ),
    ),
    mutant(
        "hits are believed",
        "an engine is told that slots were read which it does not have",
        (
            "omni_connector.arena.slot_pool",
            "        known = (slot_ids >= 0) & (slot_ids < len(self.generation))\n",
            "        known = slot_ids >= 0\n",
        ),
    ),
    mutant(
        "blocks are kept before they are full",
        "the block that a step begins to fill is listed with those that it fills",
        (
            "omni_connector.prefix.saves",
            "            end = there // unit * unit // shape.block_size\n",
            "            end = -(-there // unit) * unit // shape.block_size\n",
        ),
    ),
    mutant(
        "a window is all that is there",
        "the tokens before a gap are offered with those after it, which are not there",
        (
            "omni_connector.prefix.lookups",
            '        if shape.attention_type != "all" and shape.is_cached:\n',
            '        if shape.attention_type == "none":\n',
        ),
    ),
    mutant(
        "the last state is that of all blocks",
        "the state at a step's end is kept for each block that the step has filled",
        (
            "omni_connector.kv.spans",
            "    found = zip(block_ids, finds(block_ids, hashes), strict=True)\n",
            '    if shape.attention_type == "last" and finds(block_ids[-1:], hashes[-1:])[0]:\n'
            "        return block_ids[-1:] * len(block_ids)\n"
            "    found = zip(block_ids, finds(block_ids, hashes), strict=True)\n",
        ),
    ),
)
