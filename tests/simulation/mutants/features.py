# SPDX-License-Identifier: Apache-2.0
"""Mutants that only features of vLLM show which few seeds use; see `simulation.features`."""

from typing import Final

from tests.simulation.mutants.faults import mutant

FEATURES: Final = (
    mutant(
        "defect: loads fill the pool",
        "requests whose KV was loaded hold all blocks, and none of them finds one to go on",
        (
            "omni_connector.vllm_v1.load_room",
            "        if self.under_way and not self._has_room(state, local, end):",
            "        if False:",
        ),
    ),
    mutant(
        "failed loads find no room",
        "requests whose KV was loaded wait behind one that needs more blocks than its load had",
        (
            "omni_connector.vllm_v1.load_room",
            "            max(failure for _, failure in needs),\n            after_failure,\n",
            "            0,\n",
        ),
    ),
    mutant(
        "no room for copies of blocks",
        "requests whose KV ends within blocks need more blocks to go on than their loads left",
        (
            "omni_connector.vllm_v1.load_room",
            "            if group.is_cached and end % group.block_size and self._within_blocks:",
            "            if False:",
        ),
    ),
    mutant(
        "a ring is copied while it is written",
        "the block of a ring is copied with the step that fills the first block of the prompt",
        (
            "omni_connector.handoff.sender",
            'group.attention_type in ("last", "ring")',
            'group.attention_type == "last"',
        ),
    ),
    mutant(
        "a ring is loaded with the first token alone",
        "vLLM's own prefix cache has the beginning of a prompt, and the ring is not loaded",
        (
            "omni_connector.kv.shapes",
            "        if self.is_cached:\n            first = max(first, start",
            "        if True:\n            first = max(first, start",
        ),
        (
            "omni_connector.handoff.receiver",
            "    if not group.is_cached:\n        start = 0",
            "    if False:\n        start = 0",
        ),
    ),
    mutant(
        "prefixes end within a ring",
        "a shared prefix ends between tokens that are compressed together",
        (
            "omni_connector.prefix.prompts",
            "math.lcm(*(shape.block_size for shape in self.shapes))",
            "math.lcm(*(shape.block_size for shape in self.shapes if shape.is_cached))",
        ),
    ),
    mutant(
        "a state is kept before it is in place",
        "where drafts are in a step, the block of a state is copied before vLLM has moved it there",
        (
            "omni_connector.prefix.saves",
            "min(kept_tokens, in_place) if has_state else kept_tokens",
            "kept_tokens",
        ),
    ),
    mutant(
        "a state is kept where it was",
        "with drafts the block of a state is kept after vLLM has freed it and used it anew",
        (
            "omni_connector.copy.held_blocks",
            "        return self._pool.blocks[block_id].ref_cnt == 0\n",
            "        return True\n",
        ),
        (
            "omni_connector.prefix.saves",
            "                    block_ids = whole_blocks(shape, block_ids, filled, finds)\n",
            "                    whole = whole_blocks(shape, block_ids, filled, finds)\n"
            "                    places = zip(whole, block_ids, table, strict=True)\n"
            "                    block_ids = [a or b * each.is_null for a, b, each in places]\n",
        ),
    ),
    mutant(
        "a shared prefix is said to bring the window",
        "a window that no prefix cache has is not computed again after a load of a prefix",
        (
            "omni_connector.vllm_v1.scheduler",
            "return self._transferred if offer is not None and offer.brings_all else self._cached",
            "return self._transferred",
        ),
    ),
    mutant(
        "a ring takes a block for each block of tokens",
        "loads wait for blocks that vLLM never asks for",
        (
            "omni_connector.kv.shapes",
            '        if self.attention_type == "ring":\n            return min(1, num_tokens)\n',
            "",
        ),
    ),
    mutant(
        "room for loads is kept for who is over",
        "an aborted request whose KV was loaded reserves its blocks for ever",
        (
            "omni_connector.vllm_v1.scheduler",
            "        self._room.ends(state)\n        self._adapters.ends(request)\n",
            "        self._adapters.ends(request)\n",
        ),
    ),
    mutant(
        "what another connector loads is kept at once",
        "blocks are kept before vLLM has heard whether another connector has loaded them",
        (
            "omni_connector.prefix.saves",
            "if self._step <= self._doubtful_until:",
            "if False:",
        ),
    ),
    mutant(
        "copies for who has gone are sound",
        "a load fails of a request that is over; hand-offs of its prompt keep what was copied",
        (
            "omni_connector.handoff.sender",
            "            if send.block_ids.isdisjoint(block_ids):\n",
            "            if send.block_ids.isdisjoint(block_ids) or True:\n",
        ),
    ),
    mutant(
        "ranks are as many as here",
        "KV of a peer with other ranks is read as that of one with as many",
        (
            "omni_connector.kv.compatibility",
            "            self.ranks == reader.ranks\n            and self.num_stripes ==",
            "            self.num_stripes ==",
        ),
    ),
    mutant(
        "any rank's heads",
        "of a peer with other ranks the first heads are read",
        (
            "omni_connector.kv.heads",
            "    first = target_rank // target_copies * target_heads\n",
            "    first = 0\n",
        ),
    ),
    mutant(
        "any rank's states",
        "of a peer with other ranks the first channels and heads of a state are read",
        (
            "omni_connector.kv.states",
            "theirs + from_part + piece.source * part.unit_bytes,",
            "theirs + from_part,",
        ),
    ),
    mutant(
        "one arena for all pipeline stages",
        "ranks of later pipeline stages read the first stage's arenas",
        (
            "omni_connector.copy.load_plans",
            "owning_arenas(stage, rank, self._ranks, self._stripes)",
            "owning_arenas(0, rank, self._ranks, self._stripes)",
        ),
    ),
    mutant(
        "each rank reads its own stripe",
        "of KV that all ranks hold, a rank looks for all slots in one arena",
        (
            "omni_connector.kv.stripes",
            "    return tuple(range(first, first + stripes))\n",
            "    return (stage * ranks + rank,)\n",
        ),
    ),
    mutant(
        "stripes are saved by the next rank",
        "a slot is saved in another rank's arena than it is read from",
        (
            "omni_connector.kv.stripes",
            "    own: NDArray[np.bool_] = owners == rank % stripes\n",
            "    own: NDArray[np.bool_] = owners == (rank + 1) % stripes\n",
        ),
    ),
    mutant(
        "the first head for all",
        "of more ranks than KV heads, all read the slots of the first head",
        (
            "omni_connector.kv.stripes",
            "    first = stage * ranks + rank - rank % stripes\n",
            "    first = stage * ranks + (rank if stripes == 1 else 0)\n",
        ),
    ),
    mutant(
        "the head beside it",
        "of more ranks than KV heads, ranks read the slots of the next head",
        (
            "omni_connector.kv.stripes",
            "    first = stage * ranks + rank - rank % stripes\n",
            "    turned = rank if stripes == 1 else (rank + stripes) % ranks\n"
            "    first = stage * ranks + turned - rank % stripes\n",
        ),
    ),
    mutant(
        "as many heads as the model says",
        "layers with other numbers of heads than the model's are read as if they had as many",
        (
            "omni_connector.kv.shapes",
            "    if not told:\n        return kv_heads or None\n",
            "    if not told or kv_heads:\n        return kv_heads or None\n",
        ),
    ),
    mutant(
        "stripes as of the last group",
        "slots are spread over ranks that hold the same of the last group, and not of all",
        (
            "omni_connector.kv.compatibility",
            "    return gcd(ranks, *(group.num_copies(ranks) for group in groups))\n",
            "    return gcd(ranks, *(group.num_copies(ranks) for group in list(groups)[-1:]))\n",
        ),
    ),
    mutant(
        "copies are taken for stripes",
        "slots of an engine whose ranks keep all of them are read as if they were spread",
        (
            "omni_connector.kv.compatibility",
            "            and self.num_stripes == reader.num_stripes\n",
            "",
        ),
    ),
    mutant(
        "the next rank's shard",
        "of blocks that are divided, ranks load the shards of the rank beside them",
        (
            "omni_connector.copy.load_plans",
            "            shard = rank % self._shards if divided else 0\n",
            "            shard = (rank + 1) % self._shards if divided else 0\n",
        ),
    ),
    mutant(
        "the first shard for all",
        "of a peer with other ranks, the first shard of a state is read for all",
        (
            "omni_connector.copy.load_plans",
            "                        shard=of_stage % shards,\n",
            "                        shard=0,\n",
        ),
    ),
    mutant(
        "siblings are neighbours",
        "a load of the own blocks does not wait until the arenas of the other ranks are attached",
        (
            "omni_connector.copy.loading",
            "waits=spec.own or spec.keys is None",
            "waits=spec.keys is None",
        ),
        (
            "omni_connector.prefix.neighbours",
            "        return [self.arenas] if max(self.stripes, default=1) > 1 else []\n",
            "        return []\n",
        ),
    ),
    mutant(
        "slots are rewritten as the first stage's",
        "of a peer with other blocks or ranks, the first pipeline stage is read by all",
        (
            "omni_connector.copy.load_plans",
            "                source.arenas_of(source_stage, of_stage),\n                converts",
            "                source.arenas_of(0, of_stage),\n                converts",
        ),
    ),
    mutant(
        "stages with as many layers are the same",
        "of a peer with other pipeline stages, a stage with as many layers is read as ours",
        (
            "omni_connector.copy.load_plans",
            "there[group].layers == ours.layers",
            "len(there[group].pages) == len(ours.pages)",
        ),
    ),
    mutant(
        "one stage of the peer is read",
        "layers that the peer keeps in further pipeline stages are left out",
        (
            "omni_connector.copy.load_plans",
            "for each in found.read_by(ours)]\n",
            "for each in found.read_by(ours)[:1]]\n",
        ),
    ),
    mutant(
        "pages keep their places",
        "whole pages of a slot are copied to where they were",
        (
            "omni_connector.kv.convert",
            "self._runs.append((offsets[0], offsets[1], ",
            "self._runs.append((offsets[0], offsets[0] % self.target_bytes, ",
        ),
    ),
    mutant(
        "pages of slots with other layers are not checked",
        "bytes that changed on their way to an engine with other layers are served",
        (
            "omni_connector.copy.loading",
            "            self._compare(part, checksums, slots)\n        return True\n",
            "        return True\n",
        ),
    ),
    mutant(
        "a job ends with the ranks of a stage",
        "a copy counts as done before all pipeline stages have made it",
        (
            "omni_connector.vllm_v1.assembly",
            "CopyLedger(manager.block_pool, self._ours.num_arenas, ",
            "CopyLedger(manager.block_pool, self._ours.ranks, ",
        ),
    ),
    mutant(
        "all stages store the same",
        "entries of a store are those of the first pipeline stage that stores them",
        (
            "omni_connector.stores.shared_blocks",
            "    return rank - rank % copies if copies else None\n",
            "    return rank % ranks - rank % copies if copies else None\n",
        ),
    ),
    mutant(
        "an answer that stops early is none",
        "a prefill that ends at a stop token is not handed off",
        (
            "omni_connector.handoff.sender",
            '    {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION"}',
            '    {"FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}',
        ),
    ),
    mutant(
        "a shortened prompt is answered on",
        "a prefill of a model with windows or states goes on behind the prompt that it hands off",
        (
            "omni_connector.handoff.truncation",
            "        _answer_with(request, follows)\n    answer_one_token(request)\n",
            "        _answer_with(request, follows)\n",
        ),
    ),
    mutant(
        "a session is handed off",
        "the first prompt of a streaming session is handed off, while the session goes on",
        (
            "omni_connector.handoff.sender",
            "        if refusal is None and request.resumable:\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "drafters have KV of their own",
        "speculative decoding without KV of its own is refused",
        (
            "omni_connector.vllm_v1.drafter",
            '{"mlp_speculator", "medusa", "ngram", "ngram_gpu", "suffix"}',
            '{"mlp_speculator", "medusa", "suffix"}',
        ),
    ),
    mutant(
        "a block's name ends with it",
        "a drafter's KV of a block's last position is shared with other next tokens",
        (
            "omni_connector.kv.block_names",
            "    if not tokens_ahead:\n",
            "    if True:\n",
        ),
    ),
    mutant(
        "the next token is no part of a prompt",
        "hand-offs of prompts that differ in their last token alone share slots, with a drafter's "
        "KV of their last positions",
        (
            "omni_connector.vllm_v1.requests",
            "    if tokens_ahead:\n",
            "    if False:\n",
        ),
    ),
    mutant(
        "modules read one token ahead",
        "MTP of several modules is handed off with KV that was computed from proposed tokens",
        (
            "omni_connector.handoff.prompt",
            "        return max(1, self.tokens_ahead)\n",
            "        return 1\n",
        ),
    ),
    mutant(
        "a shortened prompt is answered as it likes",
        "a drafter computes its KV of the last token from an answer that is not what follows",
        (
            "omni_connector.handoff.truncation",
            "    if drafts and request.sampling_params is not None:\n",
            "    if False:\n",
        ),
    ),
    mutant(
        "blocks without the drafter's KV are shared",
        "an engine shares blocks that it has loaded from an engine without its drafter",
        (
            "omni_connector.vllm_v1.scheduler",
            "        if self._undrafted.has(request, self._blocks_of):\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "what vLLM's cache has is whole",
        "blocks without the drafter's KV are shared by requests that find them in vLLM's cache",
        (
            "omni_connector.vllm_v1.undrafted",
            "            if block.block_hash == name:\n",
            "            if False:\n",
        ),
    ),
    mutant(
        "the drafter's pages are left as they were",
        "where the prefill engine has no drafter, its pages keep what another request left there",
        (
            "omni_connector.copy.loading",
            "made = np.zeros((len(step.block_ids), self._rank.layout.slot_bytes), np.uint8)",
            "made = np.full((len(step.block_ids), self._rank.layout.slot_bytes), 7, np.uint8)",
        ),
        (
            "omni_connector.copy.loading",
            "            copier.zero(step.group, step.block_ids, fence=self._fence)\n",
            "            pass\n",
        ),
    ),
    mutant(
        "a group of a drafter is left as it was",
        "where the prefill engine has no layer of a group, its blocks are not zeroed",
        (
            "omni_connector.handoff.receiver",
            "                blocks.append((index, block_ids[lead:]))\n"
            "                slots.append((0, []))\n",
            "                blocks.append((index, []))\n                slots.append((0, []))\n",
        ),
    ),
    mutant(
        "prompts end where the own drafter wants it",
        "of an engine with another drafter, or none, another prompt is asked for than it has",
        (
            "omni_connector.handoff.receiver",
            "        ahead = rules.tokens_ahead if ahead is None else ahead\n",
            "        ahead = rules.tokens_ahead\n",
        ),
    ),
    mutant(
        "answers grow by one token a step",
        "of an answer with drafts blocks fill, and may go, before they are looked at",
        (
            "omni_connector.vllm_v1.assembly",
            "tokens_a_step=1 + self._vllm_config.num_speculative_tokens,",
            "tokens_a_step=1,",
        ),
    ),
    mutant(
        "a chunk is a window",
        "of local attention other blocks are handed off than the next token reads",
        (
            "omni_connector.kv.shapes",
            "            first = num_tokens // self.window * self.window // self.block_size\n"
            '        elif self.attention_type == "last":\n            first = max(',
            "            first = max(0, num_tokens - self.window + 1) // self.block_size + 1\n"
            '        elif self.attention_type == "last":\n            first = max(',
        ),
    ),
    mutant(
        "states of mode all are those of all tokens",
        "the states at the ends of earlier blocks are handed off, too, which nobody has kept",
        (
            "omni_connector.vllm_v1.specs",
            '    if kinds == {"mamba"}:\n        return "last", 0\n',
            '    if kinds == {"mamba"} and group.kv_cache_spec.mamba_cache_mode != "all":\n'
            '        return "last", 0\n',
        ),
    ),
    mutant(
        "ranks report as one",
        "a job ends only if all ranks report it in one step",
        (
            "omni_connector.copy.held_blocks",
            "            if job.ranks_left <= 0:\n",
            "            if ranks >= self._ranks:\n",
        ),
    ),
    mutant(
        "what a reset has let go of does not end",
        "ranks that report a copy after a reset has waited for it are not heard",
        (
            "omni_connector.copy.held_blocks",
            "            if job is None:\n                continue\n",
            "            if job is None or not job.block_ids:\n                continue\n",
        ),
    ),
    mutant(
        "slots are voided under a copy",
        "at a reset slots are voided at once, also where a rank still copies into them",
        (
            "omni_connector.vllm_v1.worker",
            "            self._threads.saves.submit(NO_JOB_ID, work, in_order=True)\n",
            "            list(work(lambda: False))\n",
        ),
    ),
    mutant(
        "a hand-off of a short prompt stays",
        "a decode engine computes a prompt itself, and does not tell the prefill engine",
        (
            "omni_connector.handoff.receiver",
            "        self._stats.fail(SHORT_PROMPT)\n        self.reject(remote)\n",
            "        self._stats.fail(SHORT_PROMPT)\n",
        ),
    ),
    mutant(
        "a hand-off of a short prompt is fetched",
        "a decode engine gives a hand-off up, and asks for it",
        (
            "omni_connector.handoff.receiver",
            "        self.reject(remote)\n        return True\n",
            "        self.reject(remote)\n        return False\n",
        ),
    ),
)
