# SPDX-License-Identifier: Apache-2.0
"""The mutants: where, what instead, and what is wrong then."""

from typing import Final

from tests.simulation.mutants.alike import ALIKE
from tests.simulation.mutants.device import DEVICE
from tests.simulation.mutants.faults import Mutant, mutant
from tests.simulation.mutants.features import FEATURES
from tests.simulation.mutants.files import FILES
from tests.simulation.mutants.hints import HINTS
from tests.simulation.mutants.inputs import INPUTS
from tests.simulation.mutants.mended import MENDED
from tests.simulation.mutants.operators import OPERATORS
from tests.simulation.mutants.sharing import SHARING
from tests.simulation.mutants.weights import WEIGHTS

OWN: Final = (
    mutant(
        "saves do not step back",
        "a save that nobody waits for is copied beside a load",
        (
            "copy.threads",
            "if not waited_for and not (self._first is not None and self._first.copies):",
            "if True:",
        ),
    ),
    mutant(
        "saves step back for ever",
        "a save that nobody waits for waits until no load is copied",
        ("copy.threads", "if now >= self._steps_back_until:", "if False:"),
    ),
    mutant(
        "saves to the store hold no blocks",
        "what is copied for the store is not held",
        (
            "prefix.saves",
            "self._ledger.start(spec.blocks, ended,",
            "self._ledger.start(BlockSpans.of(()), ended,",
        ),
    ),
    mutant(
        "a slot keeps its generation",
        "what a slot held before is taken for what it holds",
        ("arena.slot_pool:SlotPool._renew", "self.generation[slot_ids] += 1", ""),
    ),
    mutant(
        "nothing is leased after a reset",
        "an engine that was reset once takes all its hand-offs for void",
        (
            "vllm_v1.assembly",
            "valid=self._weights.holds,",
            "valid=lambda: self._weights.holds() and not self._weights.number,",
        ),
    ),
    mutant(
        "early save",
        "blocks are saved before they are full",
        (
            "handoff.sender",
            "else computed // group.block_size",
            "else -(-computed // group.block_size)",
        ),
    ),
    mutant(
        "early state",
        "a recurrent state is saved before its last token",
        (
            "handoff.sender",
            "whole = 0 if moves_on else",
            'whole = end if group.attention_type == "last" else',
        ),
    ),
    mutant(
        "saves before the forward pass",
        "saves start with the loads, which older runners start first",
        (
            "vllm_v1.connector",
            "if self._worker.loads_left:",
            "self._worker.start_saves()\nif self._worker.loads_left:",
        ),
    ),
    mutant(
        "a layer is copied too soon",
        "layers are copied before they are computed, once one of them is",
        (
            "copy.layered",
            "if left and self._forward.has(left[0].layers):",
            "if left and self._forward._computed:",
        ),
    ),
    mutant(
        "a layer is not hashed",
        "the checksum of a slot omits what was copied first",
        (
            "copy.layered",
            "of_these = None if states is None else states[some]",
            "of_these = None if states is None else states[some].copy()",
        ),
        (
            "copy.layered",
            "states[some] = of_these\nself._sums[some] = copied",
            "self._sums[some] = copied\nif layer_range.first:\n    states[some] = of_these",
        ),
    ),
    mutant(
        "a layer is not hashed in Python",
        "where machine code makes no checksums, that of a slot omits what was copied first",
        ("copy.layered", "elif self._checksum:", "elif self._checksum and layer_range.first:"),
    ),
    mutant(
        "a run of blocks is a run of slots",
        "without machine code, blocks that follow each other are copied as if their slots did",
        ("copy.copier", "and slots[first + count] == slot + count", ""),
    ),
    mutant(
        "a prefix goes on behind a gap",
        "all blocks are taken to be where the first of them is",
        (
            "arena.block_index",
            "run = int(lacks.argmax()) if lacks.any() else len(batch)",
            "run = 0 if lacks[0] else len(batch)",
        ),
    ),
    mutant(
        "layers are missing",
        "a slot is published without the layers that told nothing",
        ("copy.layered", "for layer_range in layer_ranges[done:]:", "for layer_range in ():"),
    ),
    mutant(
        "a layer is copied once",
        "where a batch is computed in two halves, the layers of the second are not copied again",
        ("copy.layered", "return not layers.isdisjoint(self.again)", "return False"),
    ),
    mutant(
        "checksums are not compared",
        "bytes that changed on their way are served",
        ("copy.loading", "if self._checks(slots):", "if False:"),
    ),
    mutant(
        "generations are not compared",
        "a slot that was reused is read",
        (
            "arena.format",
            "(states == SlotState.PUBLISHED)\n& (words[:, 0] == generations.astype(np.uint64))",
            "(states < 4)",
        ),
    ),
    mutant(
        "shared slots are not held",
        "a slot that two hand-offs share goes with the first",
        ("arena.slot_pool", "self._users[shared] += 1", ""),
    ),
    mutant(
        "nothing expires",
        "a hand-off that nobody leases stays",
        ("handoff.leases", "self._ends[each] <= now", "False"),
    ),
    mutant(
        "any prompt will do",
        "a hand-off is leased for another prompt",
        (
            "handoff.leases",
            "if prompt.num_tokens != num_tokens or not secrets.compare_digest(\n"
            "    prompt.digest(kind), digest\n"
            "):",
            "if False:",
        ),
    ),
    mutant(
        "the last, partial block is shared",
        "a block that is not full has the key of a full one",
        (
            "handoff.sender",
            "named =",
            "if prompt.block_hashes:\n"
            "    return [prompt.block_hashes[min(i, len(prompt.block_hashes) - 1)] for i "
            "in needed]\n"
            "full =",
        ),
    ),
    mutant(
        "bad blocks are good",
        "a load that failed names no bad block",
        ("vllm_v1.outcomes", "self._bad_block_ids |= outcome.bad_block_ids", "pass"),
    ),
    mutant(
        "the end of a failed load is not told",
        "its request waits for ever",
        (
            "vllm_v1.outcomes",
            "if spec.request_id:",
            "if spec.request_id and outcome.failure is None:",
        ),
    ),
    mutant(
        "one rank is enough",
        "a job ends with the first rank that has copied",
        ("copy.held_blocks", "if job.ranks_left <= 0:", "if True:"),
    ),
    mutant(
        "references are kept",
        "blocks of a failed job are not given back",
        (
            "copy.held_blocks:CopyLedger.report",
            "self._let_go(job)",
            "job.failure or self._let_go(job)",
        ),
    ),
    mutant(
        "given back twice",
        "a revoked job gives its blocks back at once, and again at its end",
        (
            "copy.held_blocks",
            "self.revoked.update(job_id for job_id in job_ids if job_id in self._jobs)",
            "for each in [job_id for job_id in job_ids if job_id in self._jobs]:\n"
            "    self.revoked.add(each)\n"
            "    self._pool.free_blocks([self._pool.blocks[i] for i in "
            "self._jobs[each].block_ids])",
        ),
    ),
    mutant(
        "no release",
        "a lease stays until its time is over, although its load has ended",
        ("handoff.receiver", "self._channel.release(lease)", "pass"),
    ),
    mutant(
        "an aborted load is forgotten",
        "a request that is aborted before its lease is used leaves the lease behind",
        ("handoff.receiver:HandoffReceiver.finish", "self._release(load)", "pass"),
    ),
    mutant(
        "answers are believed",
        "what a peer answers is not checked",
        ("handoff.receiver", "problem = self._check(lease, load.prompt)", "problem = None"),
    ),
    mutant(
        "no deadline of loads",
        "bytes that do not come are waited for",
        (
            "copy.loading:_Sources.seconds_left",
            "left = self.deadline - self._rank.clock()",
            "left = 0.01",
        ),
    ),
    mutant(
        "an answer twice",
        "a lease that comes twice is used twice",
        (
            "handoff.client:PeerSession._lease_granted",
            "pending = self._waiting.pop(message.sequence, None)",
            "pending = self._waiting.get(message.sequence)",
        ),
    ),
    mutant(
        "a restarted peer is the old one",
        "an arena is read although its owner has another by now",
        (
            "transports.peer_arenas:PeerArenas.take",
            "known = self._known.get(endpoint)",
            "same = [e for e in self._known if e.address == endpoint.address]\n"
            "known = self._known.get(same[0] if same else endpoint)",
        ),
    ),
    mutant(
        "windows are those of all tokens",
        "a prompt is handed off with the window of a token too many",
        (
            "vllm_v1.scheduler",
            "self._stops_early = not attends_to_all(kv_cache_config)",
            "self._stops_early = False",
        ),
    ),
    mutant(
        "entries of the store are believed",
        "bytes that changed in the store are served",
        ("prefix.store_jobs", "verify(row, size, checksum, key)", "pass"),
    ),
    mutant(
        "busy slots are free",
        "a slot that is being filled is given to another prompt",
        ("arena.slot_pool", "idle = unheld[~self._busy[unheld]]", "idle = unheld"),
    ),
    mutant(
        "names outlive their slots",
        "a slot that holds another block by now is found by its former key",
        (
            "arena.slot_pool",
            "self._ready[slot_ids] = self._keyed[slot_ids] = False",
            "self._ready[slot_ids] = False",
        ),
    ),
    mutant(
        "copies of others are cancelled",
        "with an aborted request goes the copy that its twin waits for",
        ("handoff.sender", "if not self._directory.wanted(send.handoff, blocks):", "if True:"),
    ),
    mutant(
        "half a prefill is handed off",
        "a request that ended before its prompt did is offered",
        (
            "handoff.sender",
            "if send.copied != ends or not well or handoff is None",
            "if handoff is None",
        ),
    ),
    mutant(
        "nobody commits",
        "a finished prefill cannot be leased",
        ("handoff.sender", "self._directory.commit(handoff)", ""),
    ),
    mutant(
        "leases that nobody awaits are kept",
        "a request that is given up while its answer is under way leaves a lease",
        ("handoff.client", "return [Release(pending.token, message.sequence)]", "return []"),
    ),
    mutant(
        "one rank's failure is forgotten",
        "a job counts as done when its last rank has copied",
        (
            "copy.held_blocks",
            "job.failure = job.failure or failed.get(job_id)",
            "job.failure = failed.get(job_id)",
        ),
    ),
    mutant(
        "lookups are waited for",
        "a request waits for the answer of a store that is gone",
        ("prefix.shared_prefix", "prompt.waits = now < asked.deadline", "prompt.waits = True"),
    ),
    mutant(
        "a failed load of the store counts",
        "its blocks are computed with, as if they were there",
        (
            "prefix.shared_prefix",
            "[(each, False) for each in self.loads.take_failed()]",
            "[(each, True) for each in self.loads.take_failed()]",
        ),
    ),
    mutant(
        "older runners' failed loads count",
        "where the runner does not tell vLLM of a failed load, nobody does",
        (
            "handoff.receiver",
            "learns = self._fails_by_block or request.request_id in told",
            "learns = True",
        ),
    ),
    mutant(
        "a peer must be known",
        "a peer that was forgotten and requests a lease is not introduced again",
        (
            "handoff.server",
            "introduced[connection.name] = None",
            "introduced[connection.name] = None\nintroduced.popitem(last=False)",
        ),
    ),
    mutant(
        "a drop ends leases",
        "who rejects one child's request takes the slots from its siblings",
        (
            "handoff.leases",
            "if handoff is not None and handoff.committed and not handoff.leases:",
            "if handoff is not None and handoff.committed:",
        ),
    ),
    mutant(
        "slots are skipped by blocks of one's own",
        "of a peer with other block sizes too many slots or too few are left out",
        (
            "handoff.receiver",
            "index * ours.block_size // theirs.block_size - first)",
            "index - first)",
        ),
    ),
    mutant(
        "states are counted in blocks of one's own",
        "a state is skipped where the peer counts fewer blocks before it",
        ("handoff.receiver", 'if ours.attention_type == "last":', "if False:"),
    ),
)

MUTANTS: Final[tuple[Mutant, ...]] = (
    *MENDED,
    *OWN,
    *SHARING,
    *WEIGHTS,
    *HINTS,
    *INPUTS,
    *ALIKE,
    *DEVICE,
    *FEATURES,
    *FILES,
    *OPERATORS,
)
