# SPDX-License-Identifier: Apache-2.0
"""Mutants of what requests ask of the prefix cache: pins, and what is kept out of it."""

from typing import Final

from tests.simulation.mutants.faults import mutant

HINTS: Final = (
    mutant(
        "a pin does not end",
        "slots whose pins are past their time stay pinned",
        ("arena.slot_pool", "due = slot_ids[ends <= now]", "due = slot_ids[:0]"),
    ),
    mutant(
        "a pinned slot is evicted",
        "pinned slots are in the order of eviction as others are",
        (
            "arena.eviction",
            "self.num_pinned += len(slot_ids) if kind == _PINNED else 0",
            "kind %= _PINNED",
        ),
    ),
    mutant(
        "pinned slots are thought to be available",
        "hand-offs and saves take as many slots as if no cached slot were pinned",
        (
            "arena.slot_pool",
            "return self._num_free + self.num_cached - self._order.num_pinned",
            "return self._num_free + self.num_cached",
        ),
    ),
    mutant(
        "slots that leave the cache stay counted as pinned",
        "a pinned slot that a hand-off takes out of the cache still counts among those in it",
        ("arena.eviction", "self.num_pinned -= count if stamp % KINDS == _PINNED else 0", ""),
    ),
    mutant(
        "a pinned slot lacks twice",
        "a hand-off that uses pinned slots again is thought to need room for them",
        (
            "arena.slot_pool",
            "lost = len(from_cache) - np.count_nonzero(self.pinned(from_cache))",
            "lost = len(from_cache)",
        ),
    ),
    mutant(
        "a later pin ends an earlier one",
        "a pin that is asked for last counts, even if it ends sooner",
        ("arena.slot_pool", "np.maximum(until_of[pinned] * self.pinned(pinned), asked)", "asked"),
    ),
    mutant(
        "a newer state of a session ends all of its pins",
        "blocks that the newer state asks for, too, are not pinned any more",
        (
            "prefix.sessions",
            "_without(former.keys, keys if pins and not over else ())",
            "former.keys",
        ),
    ),
    mutant(
        "a newer state of a session ends pins of requests that run",
        "blocks that a running request of another session pins are not pinned any more",
        (
            "prefix.sessions",
            "self._running[number] = pinned",
            "self._running[number] = pinned = []",
        ),
    ),
    mutant(
        "a session that is forgotten loses its pins",
        "of more sessions than are remembered the pins end with those of others",
        ("prefix.sessions", "self._host.fix_session_pins(forgotten.keys)", "pass"),
    ),
    mutant(
        "a session ends the pins of others",
        "blocks that were pinned by requests without a session are not pinned any more",
        (
            "arena.slot_pool",
            "over = slot_ids[self._pinned_until[slot_ids] <= now]",
            "over = slot_ids",
        ),
    ),
    mutant(
        "a session that is over takes pinned blocks with it",
        "blocks that others have pinned are let go",
        (
            "prefix.host_blocks",
            "self._pool.drop(slots[~self._pool.pinned(slots)])",
            "self._pool.drop(slots)",
        ),
    ),
    mutant(
        "pins that have ended stay counted",
        "what was pinned once is taken from what may be pinned, for ever",
        (
            "arena.eviction",
            "(len(slot_ids) if pinned else 0) - self._pins_among(slot_ids)",
            "(len(slot_ids) - self._pins_among(slot_ids) if pinned else 0)",
        ),
    ),
    mutant(
        "pins go beyond the part of the arena",
        "requests may pin any number of blocks",
        (
            "arena.slot_pool",
            "granted = ~new | (new.cumsum() <= room)",
            "granted = np.ones(len(new), bool)",
        ),
    ),
    mutant(
        "a pin is for one block",
        "of the blocks of a step only the first is pinned",
        (
            "arena.slot_pool",
            "granted = ~new | (new.cumsum() <= room)",
            "granted = ~new | (new.cumsum() <= min(room, 1))",
        ),
    ),
    mutant(
        "a pin outlives its block",
        "a slot that becomes free stays pinned, with whatever it holds next",
        ("arena.eviction", "= self.pinned[slot_ids] = False", "= False"),
    ),
    mutant(
        "a pin outlives its weights",
        "what is held when the weights change stays pinned",
        ("arena.eviction", "self.pinned[:] = False", ""),
    ),
    mutant(
        "defect: what nobody finds any more stays pinned",
        "the slots of a copy whose request has gone take room for pins until the copy has ended",
        ("arena.slot_pool", "self._order.unused(lost)", ""),
    ),
    mutant(
        "what shall not be kept is kept",
        "`cache: no` changes nothing",
        ("prefix.saves", 'if prompt.hints.cache != "no":', "if True:"),
    ),
    mutant(
        "what a neighbour has is not brought",
        "blocks in another arena of the host are neither pinned nor fetched ahead",
        ("prefix.hints", "return self.prefetch or pins", "return False"),
    ),
    mutant(
        "a prefetch answers on",
        "a request that only brings blocks computes its whole answer",
        (
            "vllm_v1.requests",
            "if hints.prefetch and request.kv_transfer_params is None:",
            "if False:",
        ),
    ),
    mutant(
        "a wrong hint ends the engine",
        "hints of a wrong type are not caught",
        (
            "prefix.hints",
            "except (msgspec.ValidationError, UnicodeError, RecursionError):",
            "except (UnicodeError, RecursionError):",
        ),
    ),
    mutant(
        "new blocks that are asked for are passed over",
        "where new blocks are kept at second sight only, so are those that a request asks to keep",
        (
            "prefix.host_blocks",
            "admitted = new.keeps_here\nothers = new.at(np.flatnonzero(~admitted))",
            "admitted = np.zeros(len(new), bool)\nothers = new",
        ),
    ),
    mutant(
        "of a long prompt only a part is pinned",
        "blocks that are asked for do not wait for the end of the copies under way",
        ("prefix.saves", "self._waiting += waiting", "waiting = []"),
    ),
    mutant(
        "what waits is saved whatever its block holds",
        "blocks whose turn it is are copied although vLLM has given them to others",
        (
            "prefix.saves",
            "self._finds(self._group_ids[group], block_ids, blocks.cached_as)",
            "[True] * len(blocks)",
        ),
    ),
    mutant(
        "what waits is forgotten at rest",
        "an engine without requests and copies makes no further step for blocks that wait",
        ("vllm_v1.scheduler", "or any(product.has_work() for product in self._products)", ""),
    ),
    mutant(
        "what waits outlives its weights",
        "blocks that waited when the weights changed are kept as those of the new ones",
        ("prefix.saves", "self._waiting.clear()", ""),
    ),
    mutant(
        "what waits takes its turn early",
        "copies of blocks that have waited hold more KV blocks than copies may",
        (
            "prefix.saves",
            "left = room = min(_AT_ONCE, self._room(host))",
            "left = room = host.room(_AT_ONCE)",
        ),
    ),
    mutant(
        "what is being loaded is saved",
        "blocks of a request that vLLM does not schedule yet are saved, too",
        (
            "prefix.saves",
            "if tokens := scheduled.get(request.request_id):",
            "if (tokens := scheduled.get(request.request_id, 0)) >= 0:",
        ),
    ),
)
