# SPDX-License-Identifier: Apache-2.0
"""The mutants: where, what instead, and what is wrong then."""

from dataclasses import dataclass
from typing import Final

_V1: Final = "omni_connector.vllm_v1"
_CONTROL: Final = "omni_connector.control"


@dataclass(frozen=True)
class Change:
    """One place of a module's source."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: of it; those that begin with `defect` take the mend of one out.
        why: what is wrong.
    """

    name: str
    why: str
    changes: tuple[Change, ...]


def _mutant(name: str, why: str, module: str, old: str, new: str) -> Mutant:
    return Mutant(name, why, (Change(module, old, new),))


MUTANTS: Final = (
    Mutant(
        "defect 1 and 5: no references",
        "blocks under a copy are not held",
        (
            Change(
                f"{_V1}.ledger",
                "        self._pool.touch([self._pool.blocks[each] for each in blocks])\n",
                "",
            ),
            Change(
                f"{_V1}.ledger",
                "                self._pool.free_blocks("
                "[self._pool.blocks[i] for i in reversed(job.block_ids)])\n",
                "",
            ),
        ),
    ),
    _mutant(
        "defect 2: a reset is not noticed",
        "a plain reset leaves hand-offs, leases and loads as they are",
        f"{_V1}.epoch",
        "return self._pool.cached_block_hash_to_block is self._table",
        "return True",
    ),
    _mutant(
        "defect 2: slots stay",
        "after new weights what was handed off before can be claimed",
        f"{_V1}.scheduler",
        "            slots, generations = self._sender.void()\n",
        "            slots, generations = [], []\n",
    ),
    _mutant(
        "defect 2: loads stay",
        "what was granted before new weights is loaded after them",
        f"{_V1}.scheduler",
        "            self._receiver.void()\n",
        "            pass\n",
    ),
    _mutant(
        "defect 2: the store's keys stay",
        "prefixes of other weights are found in the shared store",
        f"{_V1}.shared_prefix",
        '        self._prefix = f"{self._engines_prefix}/{self._randbytes(8).hex()}"\n',
        "",
    ),
    _mutant(
        "defect 3: a group of no pages",
        "a Hello with a group that has no pages is taken for one",
        f"{_CONTROL}.shapes",
        "tuple[_Page, ...], Meta(min_length=1, max_length=1 << 14)]",
        "tuple[_Page, ...], Meta(max_length=1 << 14)]",
    ),
    _mutant(
        "defect 4: a job ends its thread",
        "what a job raises ends the thread, and its requests wait",
        f"{_V1}.copies",
        "        except BaseException:  # it is this job's, and the others go on\n",
        "        except StopAsyncIteration:\n",
    ),
    _mutant(
        "defect 7: arenas stay mapped",
        "an arena whose owner has gone is kept",
        f"{_V1}.arenas",
        "        return not self.arena.result().alive if self.mapped else",
        "        return False if self.mapped else",
    ),
    _mutant(
        "defect 6: the first release ends all",
        "with the first child of n > 1 the slots of its siblings go",
        f"{_CONTROL}.directory",
        "            if not handoff.leases:\n                self._close(handoff)\n\n    def drop",
        "            self._close(handoff)\n\n    def drop",
    ),
    _mutant(
        "early save",
        "blocks are saved before they are full",
        f"{_V1}.sender",
        "min(end, computed // group.block_size)",
        "min(end, -(-computed // group.block_size))",
    ),
    _mutant(
        "early state",
        "a recurrent state is saved before its last token",
        f"{_V1}.sender",
        'end = 0 if group.keeps == "last" else',
        "end =",
    ),
    _mutant(
        "saves before the forward pass",
        "saves start with the loads, which older runners start first",
        f"{_V1}.worker",
        "        self._loads_started = True\n        if metadata.loads",
        "        self._loads_started = True\n        self.start_saves()\n        if metadata.loads",
    ),
    _mutant(
        "checksums are not compared",
        "bytes that changed on their way are served",
        f"{_V1}.loading",
        "            if checksum != published and (self._checksum or not slots.in_place):\n",
        "            if False:\n",
    ),
    _mutant(
        "generations are not compared",
        "a slot that was reused is read",
        f"{_V1}.reading",
        "            _checksum(self._remote.verify(slot, generation), slot, self._length)\n",
        "            _checksum(self._remote._view.header(slot), slot, self._length)\n",
    ),
    _mutant(
        "an unfilled slot keeps its generation",
        "what a failed copy has left can be read",
        f"{_CONTROL}.directory",
        "            self._generation[numbers] += 1\n            unheld",
        "            unheld",
    ),
    _mutant(
        "shared slots are not held",
        "a slot that two hand-offs share goes with the first",
        f"{_CONTROL}.directory",
        "        self._holders[shared] += 1\n",
        "",
    ),
    _mutant(
        "nothing expires",
        "a hand-off that nobody claims stays",
        f"{_CONTROL}.directory",
        "if each.deadline <= now]",
        "if False]",
    ),
    _mutant(
        "any prompt will do",
        "a hand-off is granted for another prompt",
        f"{_CONTROL}.directory",
        "        if prompt.num_tokens != num_tokens or not secrets.compare_digest(\n"
        "            prompt.digest(kind), digest\n        ):\n",
        "        if False:\n",
    ),
    _mutant(
        "the last, partial block is shared",
        "a block that is not full has the key of a full one",
        f"{_V1}.sender",
        "        return [None] * len(needed)\n    full =",
        "        return [None] * len(needed)\n"
        "    if prompt.block_hashes:\n"
        "        return [prompt.block_hashes[min(i, len(prompt.block_hashes) - 1)] "
        "for i in needed]\n    full =",
    ),
    _mutant(
        "bad blocks are good",
        "a load that failed names no bad block",
        f"{_V1}.worker",
        "                self._bad_block_ids |= outcome.bad_block_ids\n",
        "                pass\n",
    ),
    _mutant(
        "a failed load is kept to itself",
        "with several groups a failed load counts as done",
        f"{_V1}.worker",
        "                self._failed_loads.add(request_id)\n",
        "                pass\n",
    ),
    _mutant(
        "the end of a failed load is not told",
        "its request waits for ever",
        f"{_V1}.worker",
        "            self._report.done[outcome.job_id] = 1\n"
        "            self._finished_loads.add(request_id)\n"
        "            if outcome.failure is None:\n"
        '                self._count("load", "loaded", outcome)\n',
        "            self._report.done[outcome.job_id] = 1\n"
        "            if outcome.failure is None:\n"
        "                self._finished_loads.add(request_id)\n"
        '                self._count("load", "loaded", outcome)\n',
    ),
    _mutant(
        "one rank is enough",
        "a job ends with the first rank that has copied",
        f"{_V1}.ledger",
        "            if job.ranks_left <= 0:\n",
        "            if True:\n",
    ),
    _mutant(
        "references are kept",
        "blocks of a failed job are not given back",
        f"{_V1}.ledger",
        "                self._pool.free_blocks(",
        "                job.failure or self._pool.free_blocks(",
    ),
    _mutant(
        "given back twice",
        "a revoked job gives its blocks back at once, and again at its end",
        f"{_V1}.ledger",
        "        self._revoked.update(job_id for job_id in job_ids if job_id in self._jobs)\n",
        "        for each in [job_id for job_id in job_ids if job_id in self._jobs]:\n"
        "            self._revoked.add(each)\n"
        "            self._pool.free_blocks("
        "[self._pool.blocks[i] for i in self._jobs[each].block_ids])\n",
    ),
    _mutant(
        "no release",
        "a lease stays until its time is over, although its load has ended",
        f"{_V1}.receiver",
        "            self._channel.release(load.grant)\n",
        "            pass\n",
    ),
    _mutant(
        "an aborted load is forgotten",
        "who aborts before the grant is used leaves its lease",
        f"{_V1}.receiver",
        "        if load.job_id is None:\n            self._release(load)\n        else:",
        "        if load.job_id is None:\n            pass\n        else:",
    ),
    _mutant(
        "answers are believed",
        "what a peer grants is not checked",
        f"{_V1}.receiver",
        "            problem = self._check(grant, load.prompt)\n",
        "            problem = None\n",
    ),
    _mutant(
        "no deadline of loads",
        "bytes that do not come are waited for",
        f"{_V1}.loading",
        "                    if self._clock() >= deadline:\n",
        "                    if False:\n",
    ),
    _mutant(
        "no deadline of room",
        "a prefill waits for room in a full arena for ever",
        f"{_V1}.sender",
        "                if self._clock() < send.wait_until:\n",
        "                if True:\n",
    ),
    _mutant(
        "an answer twice",
        "a grant that comes twice is used twice",
        f"{_CONTROL}.client",
        "    def _granted(self, message: Granted) -> list[ControlRequest]:\n"
        "        waiting = self._waiting.pop(message.sequence, None)\n",
        "    def _granted(self, message: Granted) -> list[ControlRequest]:\n"
        "        waiting = self._waiting.get(message.sequence)\n",
    ),
    _mutant(
        "a restarted peer is the old one",
        "an arena is read although its owner has another by now",
        f"{_V1}.arenas",
        "            if known is None or known.endpoint != endpoint or known.failed:\n",
        "            if known is None or known.failed:\n",
    ),
    _mutant(
        "windows are those of all tokens",
        "a prompt is handed off with the window of a token too many",
        f"{_V1}.scheduler",
        "        self._stops_early = not keeps_all(kv_cache_config)\n",
        "        self._stops_early = False\n",
    ),
    _mutant(
        "entries of the store are believed",
        "bytes that changed in the store are served",
        f"{_V1}.store_jobs",
        "            verify(row, size, checksum, key)\n",
        "            pass\n",
    ),
    _mutant(
        "a prefix with a gap",
        "what is loaded from the store may lack blocks",
        f"{_V1}.store_jobs",
        "        if not all(there):\n",
        "        if not any(there):\n",
    ),
)
