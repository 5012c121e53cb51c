# SPDX-License-Identifier: Apache-2.0
"""Mutants that take a mend out: what was wrong once is wrong again."""

from typing import Final

from tests.simulation.mutants.faults import mutant

# One mutant of defect 2 is not here: that an engine's own loads are void at its reset. The engine
# requests older leases again anyway, and vLLM resets nothing while it loads. The case that the
# connector is told all the same is in tests/vllm_v1/test_epochs.
MENDED: Final = (
    mutant(
        "defect 1 and 5: no references",
        "blocks under a copy are not held",
        (
            "omni_connector.copy.held_blocks",
            "        self._pool.touch([self._pool.blocks[each] for each in block_ids])\n",
            "",
        ),
        (
            "omni_connector.copy.held_blocks",
            "        self._pool.free_blocks([self._pool.blocks[each] for each in "
            "reversed(block_ids)])\n",
            "",
        ),
    ),
    mutant(
        "defect 1: saves hold no blocks",
        "what is copied for a hand-off is not held; of other copies it is",
        (
            "omni_connector.handoff.sender",
            "            spec.blocks,\n",
            "            BlockSpans.of(()),\n",
        ),
    ),
    mutant(
        "what is loaded is passed on",
        "a model with windows or states shortens a prompt to what it loads of it",
        (
            "omni_connector.handoff.truncation",
            "    if wants_remote_kv(request.kv_transfer_params or {}):",
            "    if False:",
        ),
    ),
    mutant(
        "defect 2: a reset is not noticed",
        "a plain reset leaves hand-offs, leases and loads as they are",
        (
            "omni_connector.identity.epochs",
            "        if not self._may_differ:",
            "        if self._said.times == self._noticed:",
        ),
    ),
    mutant(
        "defect 2: slots stay",
        "after new weights what was handed off before can be leased",
        (
            "omni_connector.vllm_v1.scheduler",
            "            slots, generations = self._directory.void()\n",
            "            slots, generations = [], []\n",
        ),
    ),
    mutant(
        "defect 2: the store's keys stay",
        "prefixes of other weights are found in the shared store",
        (
            "omni_connector.prefix.key_prefix",
            "        prefixes = self._named(f",
            "        prefixes = self._named('') if weights else self._named(f",
        ),
    ),
    mutant(
        "defect 2: an old lease is used",
        "a lease that the peer has voided since, while it was idle, is loaded from",
        (
            "omni_connector.handoff.receiver",
            "        if self._is_old(load):",
            "        if False:",
        ),
    ),
    mutant(
        "a lease is as young as its arrival",
        "one that was given before the peer's reset, and comes late, is used after it",
        (
            "omni_connector.handoff.receiver",
            "        return self._idle_time() - load.idle_before > _FRESH_S",
            "        age = self._clock() - load.lease.received\n"
            "        return min(age, self._idle_time() - load.idle_before) > _FRESH_S",
        ),
    ),
    mutant(
        "a lease ages while its engine computes",
        "where steps are long, the same lease is requested again for ever",
        (
            "omni_connector.handoff.receiver",
            "        return self._idle_time() - load.idle_before > _FRESH_S",
            "        return self._clock() - load.asked_at > _FRESH_S",
        ),
    ),
    mutant(
        "a second load after a failed hand-off",
        "requests whose hand-offs failed wait for each other's loads from the store",
        (
            "omni_connector.vllm_v1.scheduler",
            '                        each.takes_nothing(state, "load_failed", _LOAD_FAILED)\n',
            "                        pass\n",
        ),
    ),
    mutant(
        "defect 2: cached slots keep their names",
        "after new weights a hand-off shares slots that were filled before",
        (
            "omni_connector.handoff.leases",
            "        self.pool.forget()\n",
            "",
        ),
    ),
    mutant(
        "defect 3: a group of no pages",
        "a handshake with a group that has no pages is accepted",
        (
            "omni_connector.kv.compatibility",
            "            if not any(shape.pages for shape in group):\n",
            "            if False:\n",
        ),
        (
            "omni_connector.kv.shapes",
            '    return next(iter(shape.pages), "")\n',
            "    return shape.pages[0]\n",
        ),
    ),
    mutant(
        "defect 3: a message ends the thread",
        "and one that cannot be handled is nobody's to catch",
        (
            "omni_connector.kv.compatibility",
            "            if not any(shape.pages for shape in group):\n",
            "            if False:\n",
        ),
        (
            "omni_connector.kv.shapes",
            '    return next(iter(shape.pages), "")\n',
            "    return shape.pages[0]\n",
        ),
        (
            "omni_connector.handoff.server",
            "            return self._handle(connection, message)\n        except Exception:",
            "            return self._handle(connection, message)\n"
            "        except StopAsyncIteration:",
        ),
    ),
    mutant(
        "defect 3: expiry ends with the thread",
        "without the control thread no hand-off's time ends",
        (
            "omni_connector.handoff.periodic_tasks",
            "            self._next_expiry = self._clock() + TICK_S\n            self._expire()\n",
            "            self._next_expiry = self._clock() + TICK_S\n",
        ),
    ),
    mutant(
        "a message ends a listener",
        "a peer that hangs up before it is refused is forgotten twice, which raises",
        (
            "omni_connector.net.unix",
            "        if watched.fileno() >= 0:  # the selector knows no socket that was closed\n",
            "        if True:\n",
        ),
        (
            "omni_connector.net.unix",
            "            call(*watched)\n        except Exception:\n",
            "            call(*watched)\n        except StopAsyncIteration:\n",
        ),
    ),
    mutant(
        "defect 4: a job ends its thread",
        "what a load raises ends the thread of all loads",
        (
            "omni_connector.copy.loading",
            "        except Exception as error:  # noqa: BLE001 - the request "
            "must not wait for ever",
            "        except StopAsyncIteration as error:",
        ),
        (
            "omni_connector.copy.threads",
            "        except BaseException:  # it is this job's, and the others go on\n",
            "        except StopAsyncIteration:\n",
        ),
    ),
    mutant(
        "defect 4: nobody sees a dead thread",
        "jobs of a thread that has ended are waited for",
        (
            "omni_connector.copy.threads",
            "        if under_way and not self._closing and not self._thread.is_alive():\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "defect 6: the first release ends all",
        "with the first child of n > 1 the slots of its siblings go",
        (
            "omni_connector.handoff.leases",
            "            if not handoff.leases:\n"
            "                self._close(handoff)\n"
            "\n"
            "    def drop",
            "            self._close(handoff)\n\n    def drop",
        ),
    ),
    mutant(
        "defect 6: twins have slots of their own",
        "identical prefills take the arena's room several times",
        (
            "omni_connector.handoff.leases",
            "            if twins:\n                slots = next",
            "            if False:\n                slots = next",
        ),
    ),
    mutant(
        "defect 6: slots being filled are not shared",
        "two hand-offs both copy into the slot that they share",
        (
            "omni_connector.arena.slot_pool",
            "= ~(self._busy[slot_ids] | self._ready[slot_ids])",
            "= ~self._ready[slot_ids]",
        ),
    ),
    mutant(
        "defect 7: arenas stay mapped",
        "an arena whose owner has gone is kept",
        (
            "omni_connector.transports.peer_arenas",
            "not (self.ready(now) if self.mapped",
            "not (True if self.mapped",
        ),
    ),
    mutant(
        "defect 7: idle arenas stay",
        "of arenas that are fetched nobody lets go",
        ("omni_connector.transports.peer_arenas", "now < self.used_at + IDLE_S", "True"),
    ),
    mutant(
        "defect 8: loads wait for a peer",
        "the one thread of all loads attaches, and waits for who is silent",
        (
            "omni_connector.transports.peer_arenas",
            "                self._threads.submit(endpoint.address, partial(self._attach, "
            "transport, known))\n",
            "                self._attach(transport, known)\n",
        ),
    ),
    mutant(
        "defect 14: no checksum of what travels",
        "with integrity `generation` a fetch that brings other bytes is believed",
        (
            "omni_connector.copy.loading",
            "        if self._checks(slots):\n",
            "        if self._rank.checksum:\n",
        ),
    ),
    mutant(
        "defect 17: links to the dead stay",
        "a connection to an engine that has gone is kept",
        (
            "omni_connector.handoff.channel",
            "                    self._poller.unregister(socket)\n            peer.link.close()\n",
            "                    self._poller.unregister(socket)\n",
        ),
    ),
    mutant(
        "defect 25: a rejected request keeps its hand-off",
        "its slots are held until their time is over",
        (
            "omni_connector.handoff.receiver",
            "            # server has refused.\n            self.reject(remote)\n",
            "            # server has refused.\n            pass\n",
        ),
    ),
    mutant(
        "waiters: the last comes first",
        "small prompts overtake large ones that wait for room",
        (
            "omni_connector.handoff.sender",
            "            self.waiting[send] = None\n",
            "            self.waiting[send] = None\n"
            "            self.waiting.move_to_end(send, last=False)\n",
        ),
    ),
    mutant(
        "waiters: nobody wakes them",
        "slots come free, and who waits for some is not given them",
        (
            "omni_connector.arena.slot_pool",
            "            self.num_cached += len(kept)\n        self.releases += 1\n",
            "            self.num_cached += len(kept)\n",
        ),
    ),
    mutant(
        "waiters: who has gone still waits",
        "a request that was aborted keeps its place in the queue for room",
        (
            "omni_connector.handoff.sender",
            "        self._waits_no_more(send)\n        handoff = send.handoff\n",
            "        handoff = send.handoff\n",
        ),
    ),
    mutant(
        "waiters: the next is not tried",
        "room for two was released, and the second waits until slots are released again",
        (
            "omni_connector.handoff.sender",
            "            del self.waiting[send]\n            self._tried = None\n",
            "            del self.waiting[send]\n",
        ),
    ),
    mutant(
        "a failed load refuses other hand-offs",
        "with any failed load an engine gives up what it hands off itself",
        (
            "omni_connector.handoff.sender",
            "            if send.refusal is None and not send.block_ids.isdisjoint(block_ids):\n",
            "            if send.refusal is None and send.block_ids:\n",
        ),
    ),
    mutant(
        "a lease is read without its lock",
        "a hand-off that ends while its lease is answered costs the peer its connection",
        (
            "omni_connector.handoff.server",
            "until - self._clock()",
            "handoff.leases[lease] - self._clock()",
        ),
    ),
    mutant(
        "windows in part are found",
        "a block of a window whose first tokens were not loaded has a hash, and vLLM finds it",
        (
            "omni_connector.vllm_v1.scheduler",
            "        for fetch in list(self._incomplete):\n",
            "        for fetch in list[Any]():\n",
        ),
    ),
    mutant(
        "windows in part are not noted",
        "where blocks of a peer begin elsewhere, the first of a window counts as loaded",
        (
            "omni_connector.handoff.receiver",
            "        if noted := set(block_ids) - {NULL_BLOCK_ID}:\n",
            "        if noted := set():\n",
        ),
    ),
    mutant(
        "windows in part are found in the same step",
        "the next request of the step in which vLLM hashed the block finds it",
        (
            "omni_connector.vllm_v1.scheduler",
            "        if self._incomplete and self._uncache_incomplete():\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "windows in part are kept",
        "a block whose first tokens were not loaded is copied into the arena with its hash",
        (
            "omni_connector.kv.spans",
            '    if shape.attention_type == "all":\n        return block_ids\n',
            '    if shape.attention_type != "last":\n        return block_ids\n',
        ),
    ),
    mutant(
        "loads: the time runs in the queue",
        "a load's time begins with its arrival, and runs while others are copied",
        (
            "omni_connector.copy.loading",
            "        self._give_up_at = math.inf\n",
            "        self._arrived = rank.clock()\n",
        ),
        (
            "omni_connector.copy.loading",
            "        self._sources.deadline = min(self._lease_ends, give_up_at)\n",
            "        give_up_at = self._arrived + self._spec.timeout\n"
            "        self._sources.deadline = min(self._lease_ends, give_up_at)\n"
            "        self._sources.seconds_left()\n",
        ),
    ),
    mutant(
        "loads: the end of a lease is ignored",
        "a load that has queued longer than its lease reads what the peer may use again",
        (
            "omni_connector.copy.loading",
            "        self._lease_ends = math.inf if spec.lease is None else "
            "spec.lease.on(rank.clock)\n",
            "        self._lease_ends = math.inf\n",
        ),
    ),
    mutant(
        "loads: vLLM is told of late ones",
        "its policy ends a request whose lease was over before its load was",
        (
            "omni_connector.vllm_v1.outcomes",
            "        if type(spec) is LoadSpec and outcome.failure != LEASE_EXPIRED:\n",
            "        if type(spec) is LoadSpec:\n",
        ),
    ),
    mutant(
        "loads: late ones are good",
        "a request whose lease was over before its load was goes on as if all was there",
        (
            "omni_connector.handoff.receiver",
            "(*self._void, *self._late)",
            "self._void",
        ),
    ),
    mutant(
        "loads: no margin of leases",
        "a load begins in the last moment of its lease",
        (
            "omni_connector.handoff.receiver",
            "        if self._clock() > load.lease.expires - margin:\n",
            "        if self._clock() > load.lease.expires:\n",
        ),
    ),
    mutant(
        "loads: an unwanted lease is kept",
        "the lease of a request that loads nothing lasts as long as the request",
        (
            "omni_connector.handoff.receiver",
            "        if num_external <= 0:\n            self._release(load)\n",
            "        if num_external <= 0:\n",
        ),
    ),
    mutant(
        "reconnects: nobody is introduced again",
        "after a new connection a peer does not know us, and we leave it at that",
        (
            "omni_connector.handoff.client",
            '        if message.reason != "not_introduced" or pending.asked_again:\n',
            "        if True:\n",
        ),
    ),
    mutant(
        "others' loads: who goes on with their blocks",
        "a request goes on with blocks that another connector failed to load, and its KV is shared",
        (
            "omni_connector.vllm_v1.scheduler",
            '                    self._gives_nothing(state, "load_failed", _SPOILED)\n'
            "                    self._spoiled",
            "                    self._spoiled",
        ),
    ),
    mutant(
        "others' loads: who finds their blocks",
        "blocks that another connector failed to load are found in vLLM's own cache, and shared",
        (
            "omni_connector.vllm_v1.scheduler",
            "        self._manager.evict_blocks(void)\n",
            "",
        ),
    ),
    mutant(
        "others' loads: who has ended",
        "what requests that end with a failed load have computed stays in vLLM's own cache",
        (
            "omni_connector.vllm_v1.scheduler",
            "        ended = [left for left, _ in self._left]\n",
            "        ended = []\n",
        ),
    ),
    mutant(
        "others' loads: who finds what was computed upon them",
        "with windows a request finds void blocks, and not the one that was not loaded",
        (
            "omni_connector.vllm_v1.scheduler",
            "first = next((i for i, each in enumerate(ids) if each in void), None)",
            "first = next((i for i, each in enumerate(ids) if each in block_ids), None)",
        ),
    ),
    mutant(
        "others' loads: what a window loses",
        "what a request computes upon them and its window loses stays in vLLM's cache, unmarked",
        (
            "omni_connector.vllm_v1.scheduler",
            "        self._spoiled.note(scheduled, self._blocks_of)\n",
            "",
        ),
    ),
)
