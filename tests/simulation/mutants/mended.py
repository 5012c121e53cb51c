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
            "copy.held_blocks",
            "self._pool.touch([self._pool.blocks[each] for each in block_ids])",
            "",
        ),
        (
            "copy.held_blocks",
            "self._pool.free_blocks([self._pool.blocks[each] for each in reversed(block_ids)])",
            "",
        ),
    ),
    mutant(
        "defect 1: saves hold no blocks",
        "what is copied for a hand-off is not held; of other copies it is",
        ("handoff.sender", "spec.blocks,", "BlockSpans.of(()),"),
    ),
    mutant(
        "what is loaded is passed on",
        "a model with windows or states shortens a prompt to what it loads of it",
        (
            "handoff.truncation",
            "if wants_remote_kv(request.kv_transfer_params or {}):",
            "if False:",
        ),
    ),
    mutant(
        "defect 2: a reset is not noticed",
        "a plain reset leaves hand-offs, leases and loads as they are",
        ("identity.epochs", "if not self._may_differ:", "if self._said.times == self._noticed:"),
    ),
    mutant(
        "defect 2: slots stay",
        "after new weights what was handed off before can be leased",
        (
            "vllm_v1.scheduler",
            "slots, generations = self._directory.void()",
            "slots, generations = [], []",
        ),
    ),
    mutant(
        "defect 2: the store's keys stay",
        "prefixes of other weights are found in the shared store",
        (
            "prefix.key_prefix",
            "prefixes = self._named(f",
            "prefixes = self._named('') if weights else self._named(f",
        ),
    ),
    mutant(
        "defect 2: an old lease is used",
        "a lease that the peer has voided since, while it was idle, is loaded from",
        ("handoff.receiver", "if self._is_old(load):", "if False:"),
    ),
    mutant(
        "a lease is as young as its arrival",
        "one that was given before the peer's reset, and comes late, is used after it",
        (
            "handoff.receiver",
            "return self._idle_time() - load.idle_before > _FRESH_S",
            "age = self._clock() - load.lease.received\n"
            "return min(age, self._idle_time() - load.idle_before) > _FRESH_S",
        ),
    ),
    mutant(
        "a lease ages while its engine computes",
        "where steps are long, the same lease is requested again for ever",
        (
            "handoff.receiver",
            "return self._idle_time() - load.idle_before > _FRESH_S",
            "return self._clock() - load.asked_at > _FRESH_S",
        ),
    ),
    mutant(
        "a second load after a failed hand-off",
        "requests whose hand-offs failed wait for each other's loads from the store",
        ("vllm_v1.scheduler", 'each.takes_nothing(state, "load_failed", _LOAD_FAILED)', "pass"),
    ),
    mutant(
        "defect 2: cached slots keep their names",
        "after new weights a hand-off shares slots that were filled before",
        ("handoff.leases", "self.pool.forget()", ""),
    ),
    mutant(
        "defect 3: a group of no pages",
        "a handshake with a group that has no pages is accepted",
        ("kv.compatibility", "if not any(shape.pages for shape in group):", "if False:"),
        ("kv.shapes", 'return next(iter(shape.pages), "")', "return shape.pages[0]"),
    ),
    mutant(
        "defect 3: a message ends the thread",
        "and one that cannot be handled is nobody's to catch",
        ("kv.compatibility", "if not any(shape.pages for shape in group):", "if False:"),
        ("kv.shapes", 'return next(iter(shape.pages), "")', "return shape.pages[0]"),
        ("handoff.server:ControlServer.receive", "except Exception:", "except StopAsyncIteration:"),
    ),
    mutant(
        "defect 3: expiry ends with the thread",
        "without the control thread no hand-off's time ends",
        ("handoff.periodic_tasks:PeriodicTasks.ended", "self._expire()", ""),
    ),
    mutant(
        "a message ends a listener",
        "a peer that hangs up before it is refused is forgotten twice, which raises",
        ("net.unix:Listener._forget", "if watched.fileno() >= 0:", "if True:"),
        ("net.unix:Listener._guarded", "except Exception:", "except StopAsyncIteration:"),
    ),
    mutant(
        "defect 4: a job ends its thread",
        "what a load raises ends the thread of all loads",
        ("copy.loading", "except Exception as error:", "except StopAsyncIteration as error:"),
        ("copy.threads", "except BaseException:", "except StopAsyncIteration:"),
    ),
    mutant(
        "defect 4: nobody sees a dead thread",
        "jobs of a thread that has ended are waited for",
        (
            "copy.threads",
            "if under_way and not self._closing and not self._thread.is_alive():",
            "if False:",
        ),
    ),
    mutant(
        "defect 6: the first release ends all",
        "with the first child of n > 1 the slots of its siblings go",
        (
            "handoff.leases",
            "if not handoff.leases:\n    self._close(handoff)",
            "self._close(handoff)",
        ),
    ),
    mutant(
        "defect 6: twins have slots of their own",
        "identical prefills take the arena's room several times",
        ("handoff.leases", "if twins:", "if False:"),
    ),
    mutant(
        "defect 6: slots being filled are not shared",
        "two hand-offs both copy into the slot that they share",
        (
            "arena.slot_pool",
            "= ~(self._busy[slot_ids] | self._ready[slot_ids])",
            "= ~self._ready[slot_ids]",
        ),
    ),
    mutant(
        "defect 7: arenas stay mapped",
        "an arena whose owner has gone is kept",
        (
            "transports.peer_arenas",
            "not (self.ready(now) if self.mapped",
            "not (True if self.mapped",
        ),
    ),
    mutant(
        "defect 7: idle arenas stay",
        "of arenas that are fetched nobody lets go",
        ("transports.peer_arenas", "now < self.used_at + IDLE_S", "True"),
    ),
    mutant(
        "defect 8: loads wait for a peer",
        "the one thread of all loads attaches, and waits for who is silent",
        (
            "transports.peer_arenas",
            "self._threads.submit(endpoint.address, partial(self._attach, transport, known))",
            "self._attach(transport, known)",
        ),
    ),
    mutant(
        "defect 14: no checksum of what travels",
        "with integrity `generation` a fetch that brings other bytes is believed",
        ("copy.loading", "if self._checks(slots):", "if self._rank.checksum:"),
    ),
    mutant(
        "defect 17: links to the dead stay",
        "a connection to an engine that has gone is kept",
        ("handoff.channel", "peer.link.close()", ""),
    ),
    mutant(
        "defect 25: a rejected request keeps its hand-off",
        "its slots are held until their time is over",
        (
            "handoff.receiver",
            "if prompt.num_tokens == 0:\n    self.reject(remote)",
            "if prompt.num_tokens == 0:\n    pass",
        ),
    ),
    mutant(
        "waiters: the last comes first",
        "small prompts overtake large ones that wait for room",
        (
            "handoff.sender",
            "self.waiting[send] = None",
            "self.waiting[send] = None\nself.waiting.move_to_end(send, last=False)",
        ),
    ),
    mutant(
        "waiters: nobody wakes them",
        "slots come free, and who waits for some is not given them",
        (
            "arena.slot_pool",
            "self.releases += 1\nif not len(gone):",
            "if not len(gone):",
        ),
    ),
    mutant(
        "waiters: who has gone still waits",
        "a request that was aborted keeps its place in the queue for room",
        ("handoff.sender:HandoffSender.finish", "self._waits_no_more(send)", ""),
    ),
    mutant(
        "waiters: the next is not tried",
        "room for two was released, and the second waits until slots are released again",
        ("handoff.sender", "self._tried = None", ""),
    ),
    mutant(
        "a failed load refuses other hand-offs",
        "with any failed load an engine gives up what it hands off itself",
        (
            "handoff.sender",
            "if send.refusal is None and not send.block_ids.isdisjoint(block_ids):",
            "if send.refusal is None and send.block_ids:",
        ),
    ),
    mutant(
        "a lease is read without its lock",
        "a hand-off that ends while its lease is answered costs the peer its connection",
        ("handoff.server", "until - self._clock()", "handoff.leases[lease] - self._clock()"),
    ),
    mutant(
        "windows in part are found",
        "a block of a window whose first tokens were not loaded has a hash, and vLLM finds it",
        ("vllm_v1.scheduler", "for fetch in list(self._incomplete):", "for fetch in list[Any]():"),
    ),
    mutant(
        "windows in part are not noted",
        "where blocks of a peer begin elsewhere, the first of a window counts as loaded",
        ("handoff.receiver", "if noted := set(block_ids) - {NULL_BLOCK_ID}:", "if noted := set():"),
    ),
    mutant(
        "windows in part are found in the same step",
        "the next request of the step in which vLLM hashed the block finds it",
        ("vllm_v1.scheduler", "if self._incomplete and self._uncache_incomplete():", "if False:"),
    ),
    mutant(
        "windows in part are kept",
        "a block whose first tokens were not loaded is copied into the arena with its hash",
        ("kv.spans", 'if shape.attention_type == "all":', 'if shape.attention_type != "last":'),
    ),
    mutant(
        "loads: the time runs in the queue",
        "a load's time begins with its arrival, and runs while others are copied",
        ("copy.loading", "self._give_up_at = math.inf", "self._arrived = rank.clock()"),
        (
            "copy.loading",
            "self._sources.deadline = min(self._lease_ends, give_up_at)",
            "give_up_at = self._arrived + self._spec.timeout\n"
            "self._sources.deadline = min(self._lease_ends, give_up_at)\n"
            "self._sources.seconds_left()",
        ),
    ),
    mutant(
        "loads: the end of a lease is ignored",
        "a load that has queued longer than its lease reads what the peer may use again",
        (
            "copy.loading",
            "self._lease_ends = math.inf if spec.lease is None else spec.lease.on(rank.clock)",
            "self._lease_ends = math.inf",
        ),
    ),
    mutant(
        "loads: vLLM is told of late ones",
        "its policy ends a request whose lease was over before its load was",
        (
            "vllm_v1.outcomes",
            "if type(spec) is LoadSpec and outcome.failure != LEASE_EXPIRED:",
            "if type(spec) is LoadSpec:",
        ),
    ),
    mutant(
        "loads: late ones are good",
        "a request whose lease was over before its load was goes on as if all was there",
        ("handoff.receiver", "(*self._void, *self._late)", "self._void"),
    ),
    mutant(
        "loads: no margin of leases",
        "a load begins in the last moment of its lease",
        (
            "handoff.receiver",
            "if self._clock() > load.lease.expires - margin:",
            "if self._clock() > load.lease.expires:",
        ),
    ),
    mutant(
        "loads: an unwanted lease is kept",
        "the lease of a request that loads nothing lasts as long as the request",
        ("handoff.receiver:HandoffReceiver.load", "self._release(load)", ""),
    ),
    mutant(
        "reconnects: nobody is introduced again",
        "after a new connection a peer does not know us, and we leave it at that",
        (
            "handoff.client",
            'if message.reason != "not_introduced" or pending.asked_again:',
            "if True:",
        ),
    ),
    mutant(
        "others' loads: who goes on with their blocks",
        "a request goes on with blocks that another connector failed to load, and its KV is shared",
        (
            "vllm_v1.scheduler:OmniScheduler._blocks_void",
            'self._gives_nothing(state, "load_failed", _SPOILED)',
            "",
        ),
    ),
    mutant(
        "others' loads: who finds their blocks",
        "blocks that another connector failed to load are found in vLLM's own cache, and shared",
        ("vllm_v1.scheduler", "self._manager.evict_blocks(void)", ""),
    ),
    mutant(
        "others' loads: who has ended",
        "what requests that end with a failed load have computed stays in vLLM's own cache",
        ("vllm_v1.scheduler", "ended = [left for left, _ in self._left]", "ended = []"),
    ),
    mutant(
        "others' loads: who finds what was computed upon them",
        "with windows a request finds void blocks, and not the one that was not loaded",
        (
            "vllm_v1.scheduler",
            "first = next((i for i, each in enumerate(ids) if each in void), None)",
            "first = next((i for i, each in enumerate(ids) if each in block_ids), None)",
        ),
    ),
    mutant(
        "others' loads: what a window loses",
        "what a request computes upon them and its window loses stays in vLLM's cache, unmarked",
        ("vllm_v1.scheduler", "self._spoiled.note(scheduled, self._blocks_of)", ""),
    ),
)
