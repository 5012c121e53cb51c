# SPDX-License-Identifier: Apache-2.0
"""Mutants that only features of vLLM show which few seeds use; see `simulation.features`."""

from typing import Final

from tests.simulation.mutants.faults import mutant

FEATURES: Final = (
    mutant(
        "defect: loads fill the pool",
        "requests whose KV was loaded hold all blocks, and none of them finds one to go on",
        (
            "vllm_v1.load_room",
            "if self.under_way and not self._has_room(state, local, end):",
            "if False:",
        ),
    ),
    mutant(
        "failed loads find no room",
        "requests whose KV was loaded wait behind one that needs more blocks than its load had",
        ("vllm_v1.load_room", "max(failure for _, failure in needs),\nafter_failure,", "0,"),
    ),
    mutant(
        "no room for copies of blocks",
        "requests whose KV ends within blocks need more blocks to go on than their loads left",
        (
            "vllm_v1.load_room",
            "if group.is_cached and end % group.block_size and self._within_blocks:",
            "if False:",
        ),
    ),
    mutant(
        "a ring is copied while it is written",
        "the block of a ring is copied with the step that fills the first block of the prompt",
        (
            "handoff.sender",
            'group.attention_type in ("last", "ring")',
            'group.attention_type == "last"',
        ),
    ),
    mutant(
        "a ring is loaded with the first token alone",
        "vLLM's own prefix cache has the beginning of a prompt, and the ring is not loaded",
        ("kv.shapes", "if self.is_cached:", "if True:"),
        ("handoff.receiver", "if not group.is_cached:", "if False:"),
    ),
    mutant(
        "prefixes end within a ring",
        "a shared prefix ends between tokens that are compressed together",
        (
            "prefix.prompts",
            "math.lcm(*(shape.block_size for shape in self.shapes))",
            "math.lcm(*(shape.block_size for shape in self.shapes if shape.is_cached))",
        ),
    ),
    mutant(
        "a state is kept before it is in place",
        "where drafts are in a step, the block of a state is copied before vLLM has moved it there",
        ("prefix.saves", "min(kept_tokens, in_place) if has_state else kept_tokens", "kept_tokens"),
    ),
    mutant(
        "a state is kept where it was",
        "with drafts the block of a state is kept after vLLM has freed it and used it anew",
        ("copy.held_blocks", "return self._pool.blocks[block_id].ref_cnt == 0", "return True"),
        (
            "prefix.saves",
            "block_ids = whole_blocks(shape, block_ids, filled, finds)",
            "whole = whole_blocks(shape, block_ids, filled, finds)\n"
            "places = zip(whole, block_ids, table, strict=True)\n"
            "block_ids = [a or b * each.is_null for a, b, each in places]",
        ),
    ),
    mutant(
        "a shared prefix is said to bring the window",
        "a window that no prefix cache has is not computed again after a load of a prefix",
        (
            "vllm_v1.scheduler",
            "return self._transferred if offer is not None and offer.brings_all else self._cached",
            "return self._transferred",
        ),
    ),
    mutant(
        "a ring takes a block for each block of tokens",
        "loads wait for blocks that vLLM never asks for",
        ("kv.shapes", 'if self.attention_type == "ring":\n    return min(1, num_tokens)', ""),
    ),
    mutant(
        "room for loads is kept for who is over",
        "an aborted request whose KV was loaded reserves its blocks for ever",
        ("vllm_v1.scheduler:OmniScheduler.request_finished", "self._room.ends(state)", ""),
    ),
    mutant(
        "what another connector loads is kept at once",
        "blocks are kept before vLLM has heard whether another connector has loaded them",
        ("prefix.saves", "if self._step <= self._doubtful_until:", "if False:"),
    ),
    mutant(
        "copies for who has gone are sound",
        "a load fails of a request that is over; hand-offs of its prompt keep what was copied",
        (
            "handoff.sender",
            "if send.block_ids.isdisjoint(block_ids):",
            "if send.block_ids.isdisjoint(block_ids) or True:",
        ),
    ),
    mutant(
        "ranks are as many as here",
        "KV of a peer with other ranks is read as that of one with as many",
        (
            "kv.compatibility",
            "self.ranks == reader.ranks\nand self.num_stripes ==",
            "self.num_stripes ==",
        ),
    ),
    mutant(
        "any rank's heads",
        "of a peer with other ranks the first heads are read",
        ("kv.heads", "first = target_rank // target_copies * target_heads", "first = 0"),
    ),
    mutant(
        "any rank's states",
        "of a peer with other ranks the first channels and heads of a state are read",
        (
            "kv.states",
            "theirs + from_part + piece.source * part.unit_bytes,",
            "theirs + from_part,",
        ),
    ),
    mutant(
        "one arena for all pipeline stages",
        "ranks of later pipeline stages read the first stage's arenas",
        (
            "copy.load_plans",
            "owning_arenas(stage, rank, self._ranks, self._stripes)",
            "owning_arenas(0, rank, self._ranks, self._stripes)",
        ),
    ),
    mutant(
        "each rank reads its own stripe",
        "of KV that all ranks hold, a rank looks for all slots in one arena",
        (
            "kv.stripes",
            "return tuple(range(first, first + stripes))",
            "return (stage * ranks + rank,)",
        ),
    ),
    mutant(
        "stripes are saved by the next rank",
        "a slot is saved in another rank's arena than it is read from",
        (
            "kv.stripes",
            "own: NDArray[np.bool_] = owners == rank % stripes",
            "own: NDArray[np.bool_] = owners == (rank + 1) % stripes",
        ),
    ),
    mutant(
        "the first head for all",
        "of more ranks than KV heads, all read the slots of the first head",
        (
            "kv.stripes",
            "first = stage * ranks + rank - rank % stripes",
            "first = stage * ranks + (rank if stripes == 1 else 0)",
        ),
    ),
    mutant(
        "the head beside it",
        "of more ranks than KV heads, ranks read the slots of the next head",
        (
            "kv.stripes",
            "first = stage * ranks + rank - rank % stripes",
            "turned = rank if stripes == 1 else (rank + stripes) % ranks\n"
            "first = stage * ranks + turned - rank % stripes",
        ),
    ),
    mutant(
        "as many heads as the model says",
        "layers with other numbers of heads than the model's are read as if they had as many",
        ("kv.shapes", "if not told:", "if not told or kv_heads:"),
    ),
    mutant(
        "stripes as of the last group",
        "slots are spread over ranks that hold the same of the last group, and not of all",
        (
            "kv.compatibility",
            "return gcd(ranks, *(group.num_copies(ranks) for group in groups))",
            "return gcd(ranks, *(group.num_copies(ranks) for group in list(groups)[-1:]))",
        ),
    ),
    mutant(
        "copies are taken for stripes",
        "slots of an engine whose ranks keep all of them are read as if they were spread",
        ("kv.compatibility", "and self.num_stripes == reader.num_stripes", ""),
    ),
    mutant(
        "the next rank's shard",
        "of blocks that are divided, ranks load the shards of the rank beside them",
        (
            "copy.load_plans",
            "shard = rank % self._shards if divided else 0",
            "shard = (rank + 1) % self._shards if divided else 0",
        ),
    ),
    mutant(
        "the first shard for all",
        "of a peer with other ranks, the first shard of a state is read for all",
        ("copy.load_plans", "shard=of_stage % shards,", "shard=0,"),
    ),
    mutant(
        "siblings are neighbours",
        "a load of the own blocks does not wait until the arenas of the other ranks are attached",
        ("copy.loading", "waits=spec.own or spec.keys is None", "waits=spec.keys is None"),
        (
            "prefix.neighbours",
            "return [self.arenas] if max(self.stripes, default=1) > 1 else []",
            "return []",
        ),
    ),
    mutant(
        "slots are rewritten as the first stage's",
        "of a peer with other blocks or ranks, the first pipeline stage is read by all",
        (
            "copy.load_plans:LoadPlans._by_heads",
            "source.arenas_of(source_stage, of_stage),",
            "source.arenas_of(0, of_stage),",
        ),
    ),
    mutant(
        "stages with as many layers are the same",
        "of a peer with other pipeline stages, a stage with as many layers is read as ours",
        (
            "copy.load_plans",
            "there[group].layers == ours.layers",
            "len(there[group].pages) == len(ours.pages)",
        ),
    ),
    mutant(
        "one stage of the peer is read",
        "layers that the peer keeps in further pipeline stages are left out",
        (
            "copy.load_plans",
            "for each in found.read_by(ours)]",
            "for each in found.read_by(ours)[:1]]",
        ),
    ),
    mutant(
        "pages keep their places",
        "whole pages of a slot are copied to where they were",
        (
            "kv.convert",
            "self._runs.append((offsets[0], offsets[1],",
            "self._runs.append((offsets[0], offsets[0] % self.target_bytes,",
        ),
    ),
    mutant(
        "pages of slots with other layers are not checked",
        "bytes that changed on their way to an engine with other layers are served",
        ("copy.loading:_Load._copy_pages", "self._compare(part, checksums, slots)", ""),
    ),
    mutant(
        "a job ends with the ranks of a stage",
        "a copy counts as done before all pipeline stages have made it",
        (
            "vllm_v1.assembly",
            "CopyLedger(manager.block_pool, self._ours.num_arenas,",
            "CopyLedger(manager.block_pool, self._ours.ranks,",
        ),
    ),
    mutant(
        "all stages store the same",
        "entries of a store are those of the first pipeline stage that stores them",
        (
            "stores.shared_blocks",
            "return rank - rank % copies if copies else None",
            "return rank % ranks - rank % copies if copies else None",
        ),
    ),
    mutant(
        "an answer that stops early is none",
        "a prefill that ends at a stop token is not handed off",
        (
            "handoff.sender",
            '{"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION"}',
            '{"FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}',
        ),
    ),
    mutant(
        "a shortened prompt is answered on",
        "a prefill of a model with windows or states goes on behind the prompt that it hands off",
        ("handoff.truncation:truncate", "answer_one_token(request)", ""),
    ),
    mutant(
        "a session is handed off",
        "the first prompt of a streaming session is handed off, while the session goes on",
        ("handoff.sender", "if refusal is None and request.resumable:", "if False:"),
    ),
    mutant(
        "drafters have KV of their own",
        "speculative decoding without KV of its own is refused",
        (
            "vllm_v1.drafter",
            '{"mlp_speculator", "medusa", "ngram", "ngram_gpu", "suffix"}',
            '{"mlp_speculator", "medusa", "suffix"}',
        ),
    ),
    mutant(
        "a block's name ends with it",
        "a drafter's KV of a block's last position is shared with other next tokens",
        ("kv.block_names", "if not tokens_ahead:", "if True:"),
    ),
    mutant(
        "the next token is no part of a prompt",
        "hand-offs of prompts that differ in their last token alone share slots, with a drafter's "
        "KV of their last positions",
        ("vllm_v1.requests", "if tokens_ahead:", "if False:"),
    ),
    mutant(
        "modules read one token ahead",
        "MTP of several modules is handed off with KV that was computed from proposed tokens",
        ("handoff.prompt", "return max(1, self.tokens_ahead)", "return 1"),
    ),
    mutant(
        "a shortened prompt is answered as it likes",
        "a drafter computes its KV of the last token from an answer that is not what follows",
        ("handoff.truncation", "if drafts and request.sampling_params is not None:", "if False:"),
    ),
    mutant(
        "blocks without the drafter's KV are shared",
        "an engine shares blocks that it has loaded from an engine without its drafter",
        ("vllm_v1.scheduler", "if self._undrafted.has(request, self._blocks_of):", "if False:"),
    ),
    mutant(
        "what vLLM's cache has is whole",
        "blocks without the drafter's KV are shared by requests that find them in vLLM's cache",
        ("vllm_v1.undrafted", "if block.block_hash == name:", "if False:"),
    ),
    mutant(
        "the drafter's pages are left as they were",
        "where the prefill engine has no drafter, its pages keep what another request left there",
        (
            "copy.loading",
            "made = np.zeros((len(step.block_ids), self._rank.layout.slot_bytes), np.uint8)",
            "made = np.full((len(step.block_ids), self._rank.layout.slot_bytes), 7, np.uint8)",
        ),
        (
            "copy.loading:_Load._copy_pages",
            "copier.zero(step.group, step.block_ids, fence=self._fence)",
            "pass",
        ),
    ),
    mutant(
        "a group of a drafter is left as it was",
        "where the prefill engine has no layer of a group, its blocks are not zeroed",
        (
            "handoff.receiver",
            "blocks.append((index, block_ids[lead:]))\nslots.append((0, []))",
            "blocks.append((index, []))\nslots.append((0, []))",
        ),
    ),
    mutant(
        "prompts end where the own drafter wants it",
        "of an engine with another drafter, or none, another prompt is asked for than it has",
        (
            "handoff.receiver",
            "ahead = rules.tokens_ahead if ahead is None else ahead",
            "ahead = rules.tokens_ahead",
        ),
    ),
    mutant(
        "answers grow by one token a step",
        "of an answer with drafts blocks fill, and may go, before they are looked at",
        (
            "vllm_v1.assembly",
            "tokens_a_step=1 + self._vllm_config.num_speculative_tokens,",
            "tokens_a_step=1,",
        ),
    ),
    mutant(
        "a chunk is a window",
        "of local attention other blocks are handed off than the next token reads",
        (
            "kv.shapes",
            "first = num_tokens // self.window * self.window // self.block_size",
            "first = max(0, num_tokens - self.window + 1) // self.block_size + 1",
        ),
    ),
    mutant(
        "states of mode all are those of all tokens",
        "the states at the ends of earlier blocks are handed off, too, which nobody has kept",
        (
            "vllm_v1.specs",
            'if kinds == {"mamba"}:',
            'if kinds == {"mamba"} and group.kv_cache_spec.mamba_cache_mode != "all":',
        ),
    ),
    mutant(
        "ranks report as one",
        "a job ends only if all ranks report it in one step",
        ("copy.held_blocks", "if job.ranks_left <= 0:", "if ranks >= self._ranks:"),
    ),
    mutant(
        "what a reset has let go of does not end",
        "ranks that report a copy after a reset has waited for it are not heard",
        ("copy.held_blocks", "if job is None:", "if job is None or not job.block_ids:"),
    ),
    mutant(
        "slots are voided under a copy",
        "at a reset slots are voided at once, also where a rank still copies into them",
        (
            "vllm_v1.worker",
            "self._threads.saves.submit(NO_JOB_ID, work, in_order=True)",
            "list(work(lambda: False))",
        ),
    ),
    mutant(
        "a hand-off of a short prompt stays",
        "a decode engine computes a prompt itself, and does not tell the prefill engine",
        ("handoff.receiver:HandoffReceiver.is_short", "self.reject(remote)", ""),
    ),
    mutant(
        "a hand-off of a short prompt is fetched",
        "a decode engine gives a hand-off up, and asks for it",
        ("handoff.receiver:HandoffReceiver.is_short", "return True", "return False"),
    ),
)
