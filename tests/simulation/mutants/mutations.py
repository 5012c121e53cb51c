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
            "omni_connector.copy.threads",
            "        if not waited_for and not (self._first is not None and self._first.copies):\n",
            "        if True:\n",
        ),
    ),
    mutant(
        "saves step back for ever",
        "a save that nobody waits for waits until no load is copied",
        (
            "omni_connector.copy.threads",
            "        if now >= self._steps_back_until:\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "saves to the store hold no blocks",
        "what is copied for the store is not held",
        (
            "omni_connector.prefix.saves",
            "self._ledger.start(spec.blocks, ended,",
            "self._ledger.start(BlockSpans.of(()), ended,",
        ),
    ),
    mutant(
        "a slot keeps its generation",
        "what a slot held before is taken for what it holds",
        (
            "omni_connector.arena.slot_pool",
            "        self.generation[slot_ids] += 1\n        self._ready[slot_ids] =",
            "        self._ready[slot_ids] =",
        ),
    ),
    mutant(
        "nothing is leased after a reset",
        "an engine that was reset once takes all its hand-offs for void",
        (
            "omni_connector.vllm_v1.assembly",
            "            valid=self._weights.holds,\n",
            "            valid=lambda: self._weights.holds() and not self._weights.number,\n",
        ),
    ),
    mutant(
        "early save",
        "blocks are saved before they are full",
        (
            "omni_connector.handoff.sender",
            "else computed // group.block_size",
            "else -(-computed // group.block_size)",
        ),
    ),
    mutant(
        "early state",
        "a recurrent state is saved before its last token",
        (
            "omni_connector.handoff.sender",
            "whole = 0 if moves_on else",
            'whole = end if group.attention_type == "last" else',
        ),
    ),
    mutant(
        "saves before the forward pass",
        "saves start with the loads, which older runners start first",
        (
            "omni_connector.vllm_v1.connector",
            "        if self._worker.loads_left:\n",
            "        self._worker.start_saves()\n        if self._worker.loads_left:\n",
        ),
    ),
    mutant(
        "a layer is copied too soon",
        "layers are copied before they are computed, once one of them is",
        (
            "omni_connector.copy.layered",
            "            if left and self._forward.has(left[0].layers):\n",
            "            if left and self._forward._computed:\n",
        ),
    ),
    mutant(
        "a layer is not hashed",
        "the checksum of a slot omits what was copied first",
        (
            "omni_connector.copy.layered",
            "of_these = None if states is None else states[some]\n",
            "of_these = None if states is None else states[some].copy()\n",
        ),
        (
            "omni_connector.copy.layered",
            "            states[some] = of_these\n            self._sums[some] = copied\n",
            "            self._sums[some] = copied\n"
            "            if layer_range.first:\n"
            "                states[some] = of_these\n",
        ),
    ),
    mutant(
        "a layer is not hashed in Python",
        "where machine code makes no checksums, that of a slot omits what was copied first",
        (
            "omni_connector.copy.layered",
            "        elif self._checksum:\n            for place, slot",
            "        elif self._checksum and layer_range.first:\n            for place, slot",
        ),
    ),
    mutant(
        "a run of blocks is a run of slots",
        "without machine code, blocks that follow each other are copied as if their slots did",
        (
            "omni_connector.copy.copier",
            "            and slots[first + count] == slot + count\n",
            "",
        ),
    ),
    mutant(
        "a prefix goes on behind a gap",
        "all blocks are taken to be where the first of them is",
        (
            "omni_connector.arena.block_index",
            "                run = int(lacks.argmax()) if lacks.any() else len(batch)\n",
            "                run = 0 if lacks[0] else len(batch)\n",
        ),
    ),
    mutant(
        "layers are missing",
        "a slot is published without the layers that told nothing",
        (
            "omni_connector.copy.layered",
            "        for layer_range in layer_ranges[done:]:\n",
            "        for layer_range in ():\n",
        ),
    ),
    mutant(
        "a layer is copied once",
        "where a batch is computed in two halves, the layers of the second are not copied again",
        (
            "omni_connector.copy.layered",
            "        return not layers.isdisjoint(self.again)\n",
            "        return False\n",
        ),
    ),
    mutant(
        "checksums are not compared",
        "bytes that changed on their way are served",
        (
            "omni_connector.copy.loading",
            "        if self._checks(slots):\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "generations are not compared",
        "a slot that was reused is read",
        (
            "omni_connector.arena.format",
            "            (states == SlotState.PUBLISHED)\n"
            "            & (words[:, 0] == generations.astype(np.uint64))\n",
            "            (states < 4)\n",
        ),
    ),
    mutant(
        "shared slots are not held",
        "a slot that two hand-offs share goes with the first",
        ("omni_connector.arena.slot_pool", "        self._users[shared] += 1\n", ""),
    ),
    mutant(
        "nothing expires",
        "a hand-off that nobody leases stays",
        ("omni_connector.handoff.leases", "self._ends[each] <= now", "False"),
    ),
    mutant(
        "any prompt will do",
        "a hand-off is leased for another prompt",
        (
            "omni_connector.handoff.leases",
            "        if prompt.num_tokens != num_tokens or not "
            "secrets.compare_digest(\n"
            "            prompt.digest(kind), digest\n"
            "        ):\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "the last, partial block is shared",
        "a block that is not full has the key of a full one",
        (
            "omni_connector.handoff.sender",
            "        return [None] * len(needed)\n    named =",
            "        return [None] * len(needed)\n"
            "    if prompt.block_hashes:\n"
            "        return [prompt.block_hashes[min(i, len(prompt.block_hashes) - 1)] "
            "for i in needed]\n"
            "    full =",
        ),
    ),
    mutant(
        "bad blocks are good",
        "a load that failed names no bad block",
        (
            "omni_connector.vllm_v1.outcomes",
            "                self._bad_block_ids |= outcome.bad_block_ids\n",
            "                pass\n",
        ),
    ),
    mutant(
        "the end of a failed load is not told",
        "its request waits for ever",
        (
            "omni_connector.vllm_v1.outcomes",
            "        if spec.request_id:\n            self._loads_left[spec.request_id] -= 1\n",
            "        if spec.request_id and outcome.failure is None:\n"
            "            self._loads_left[spec.request_id] -= 1\n",
        ),
    ),
    mutant(
        "one rank is enough",
        "a job ends with the first rank that has copied",
        (
            "omni_connector.copy.held_blocks",
            "            if job.ranks_left <= 0:\n",
            "            if True:\n",
        ),
    ),
    mutant(
        "references are kept",
        "blocks of a failed job are not given back",
        (
            "omni_connector.copy.held_blocks",
            "                self._let_go(job)\n                job.end(job.failure)\n",
            "                job.failure or self._let_go(job)\n"
            "                job.end(job.failure)\n",
        ),
    ),
    mutant(
        "given back twice",
        "a revoked job gives its blocks back at once, and again at its end",
        (
            "omni_connector.copy.held_blocks",
            "        self.revoked.update(job_id for job_id in job_ids if job_id in self._jobs)\n",
            "        for each in [job_id for job_id in job_ids if job_id in "
            "self._jobs]:\n"
            "            self.revoked.add(each)\n"
            "            self._pool.free_blocks([self._pool.blocks[i] for i in "
            "self._jobs[each].block_ids])\n",
        ),
    ),
    mutant(
        "no release",
        "a lease stays until its time is over, although its load has ended",
        (
            "omni_connector.handoff.receiver",
            "                self._channel.release(lease)\n",
            "                pass\n",
        ),
    ),
    mutant(
        "an aborted load is forgotten",
        "a request that is aborted before its lease is used leaves the lease behind",
        (
            "omni_connector.handoff.receiver",
            "        if load.job_id is None:\n            self._release(load)\n        else:",
            "        if load.job_id is None:\n            pass\n        else:",
        ),
    ),
    mutant(
        "answers are believed",
        "what a peer answers is not checked",
        (
            "omni_connector.handoff.receiver",
            "            problem = self._check(lease, load.prompt)\n",
            "            problem = None\n",
        ),
    ),
    mutant(
        "no deadline of loads",
        "bytes that do not come are waited for",
        (
            "omni_connector.copy.loading",
            "        left = self.deadline - self._rank.clock()\n        if left <= 0:\n",
            "        left = 0.01\n        if left <= 0:\n",
        ),
    ),
    mutant(
        "an answer twice",
        "a lease that comes twice is used twice",
        (
            "omni_connector.handoff.client",
            "    def _lease_granted(self, message: LeaseGranted) -> list[Request]:\n"
            "        pending = self._waiting.pop(message.sequence, None)\n",
            "    def _lease_granted(self, message: LeaseGranted) -> list[Request]:\n"
            "        pending = self._waiting.get(message.sequence)\n",
        ),
    ),
    mutant(
        "a restarted peer is the old one",
        "an arena is read although its owner has another by now",
        (
            "omni_connector.transports.peer_arenas",
            "            known = self._known.get(endpoint)\n            if known is None or",
            "            same = [e for e in self._known if e.address == endpoint.address]\n"
            "            known = self._known.get(same[0] if same else endpoint)\n"
            "            if known is None or",
        ),
    ),
    mutant(
        "windows are those of all tokens",
        "a prompt is handed off with the window of a token too many",
        (
            "omni_connector.vllm_v1.scheduler",
            "        self._stops_early = not attends_to_all(kv_cache_config)\n",
            "        self._stops_early = False\n",
        ),
    ),
    mutant(
        "entries of the store are believed",
        "bytes that changed in the store are served",
        (
            "omni_connector.prefix.store_jobs",
            "                verify(row, size, checksum, key)\n",
            "                pass\n",
        ),
    ),
    mutant(
        "busy slots are free",
        "a slot that is being filled is given to another prompt",
        (
            "omni_connector.arena.slot_pool",
            "        idle = unheld[~self._busy[unheld]]\n",
            "        idle = unheld\n",
        ),
    ),
    mutant(
        "names outlive their slots",
        "a slot that holds another block by now is found by its former key",
        (
            "omni_connector.arena.slot_pool",
            "        self._ready[slot_ids] = self._keyed[slot_ids] = False\n        self._users",
            "        self._ready[slot_ids] = False\n        self._users",
        ),
    ),
    mutant(
        "copies of others are cancelled",
        "with an aborted request goes the copy that its twin waits for",
        (
            "omni_connector.handoff.sender",
            "                if not self._directory.wanted(send.handoff, blocks):\n",
            "                if True:\n",
        ),
    ),
    mutant(
        "half a prefill is handed off",
        "a request that ended before its prompt did is offered",
        (
            "omni_connector.handoff.sender",
            "        if send.copied != ends or not well or handoff is None",
            "        if handoff is None",
        ),
    ),
    mutant(
        "nobody commits",
        "a finished prefill cannot be leased",
        ("omni_connector.handoff.sender", "        self._directory.commit(handoff)\n", ""),
    ),
    mutant(
        "leases that nobody awaits are kept",
        "a request that is given up while its answer is under way leaves a lease",
        (
            "omni_connector.handoff.client",
            "            # The caller has given up: end the lease.\n"
            "            return [Release(pending.token, message.sequence)]",
            "            return []",
        ),
    ),
    mutant(
        "one rank's failure is forgotten",
        "a job counts as done when its last rank has copied",
        (
            "omni_connector.copy.held_blocks",
            "            job.failure = job.failure or failed.get(job_id)\n",
            "            job.failure = failed.get(job_id)\n",
        ),
    ),
    mutant(
        "lookups are waited for",
        "a request waits for the answer of a store that is gone",
        (
            "omni_connector.prefix.shared_prefix",
            "            prompt.waits = now < asked.deadline\n",
            "            prompt.waits = True\n",
        ),
    ),
    mutant(
        "a failed load of the store counts",
        "its blocks are computed with, as if they were there",
        (
            "omni_connector.prefix.shared_prefix",
            "[(each, False) for each in self.loads.take_failed()]",
            "[(each, True) for each in self.loads.take_failed()]",
        ),
    ),
    mutant(
        "older runners' failed loads count",
        "where the runner does not tell vLLM of a failed load, nobody does",
        (
            "omni_connector.handoff.receiver",
            "            learns = self._fails_by_block or request.request_id in told\n",
            "            learns = True\n",
        ),
    ),
    mutant(
        "a peer must be known",
        "a peer that was forgotten and requests a lease is not introduced again",
        (
            "omni_connector.handoff.server",
            "        introduced[connection.name] = None\n",
            "        introduced[connection.name] = None\n        introduced.popitem(last=False)\n",
        ),
    ),
    mutant(
        "a drop ends leases",
        "who rejects one child's request takes the slots from its siblings",
        (
            "omni_connector.handoff.leases",
            "            if handoff is not None and handoff.committed and not handoff.leases:\n",
            "            if handoff is not None and handoff.committed:\n",
        ),
    ),
    mutant(
        "slots are skipped by blocks of one's own",
        "of a peer with other block sizes too many slots or too few are left out",
        (
            "omni_connector.handoff.receiver",
            "index * ours.block_size // theirs.block_size - first)",
            "index - first)",
        ),
    ),
    mutant(
        "states are counted in blocks of one's own",
        "a state is skipped where the peer counts fewer blocks before it",
        (
            "omni_connector.handoff.receiver",
            '            if ours.attention_type == "last":  # by',
            "            if False:  # by",
        ),
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
