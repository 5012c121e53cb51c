# SPDX-License-Identifier: Apache-2.0
"""Looks inside running connectors, for tests.

Harnesses and tests that have to see, or change, what no public name tells ask here, so that the
connector's private names stand in one place. Nothing here is needed to use the connector.
"""

import copy
import hashlib
import mmap
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omni_connector.identity.epochs import RankWeights, WeightsDigest

if TYPE_CHECKING:
    from omni_connector.arena.arena import Arena
    from omni_connector.arena.block_index import BlockIndex, Tags
    from omni_connector.arena.slot_index import Ints
    from omni_connector.copy.threads import CopyThread
    from omni_connector.handoff.channel import ControlChannel
    from omni_connector.handoff.leases import Handoff, SlotDirectory
    from omni_connector.handoff.serving import ServingState
    from omni_connector.kv.compatibility import CompatibilityKey
    from omni_connector.objects.exchange import Exchange
    from omni_connector.objects.mooncake import MooncakeTransferEngineConnector
    from omni_connector.objects.object_store import ObjectStore
    from omni_connector.objects.shm import SharedMemoryConnector
    from omni_connector.prefix.store_jobs import StoreJobs
    from omni_connector.stores.block_store import BlockStore
    from omni_connector.transports.base import ArenaTransport
    from omni_connector.transports.choice import Transports
    from omni_connector.vllm_v1.connector import OmniKVConnector
    from omni_connector.vllm_v1.scheduler import OmniScheduler
    from omni_connector.vllm_v1.worker import OmniWorker


def scheduler_half(connector: "OmniKVConnector") -> "OmniScheduler":
    """Return the half of a connector that vLLM's scheduler made."""
    return connector._scheduler


def weight_files(scheduler: "OmniScheduler") -> str:
    """Return the digest of the weights' files that peers are told; "" until it is made."""
    return scheduler._channel._compatibility.weight_files or ""


def compatibility(scheduler: "OmniScheduler") -> "CompatibilityKey":
    """Return what an engine tells prefill engines of itself."""
    return scheduler._channel._compatibility


def learn(scheduler: "OmniScheduler", **fields: Any) -> None:
    """Have an engine tell prefill engines other things of itself from now on."""
    scheduler._channel.learn(**fields)


def say(scheduler: "OmniScheduler", **fields: Any) -> None:
    """Have an engine tell decode engines other things of its slots from now on. Nothing checks
    these: they may be what no engine can have."""
    server = scheduler._channel._server
    assert server is not None
    told = copy.copy(server._handshake_reply)
    key = copy.copy(told.compatibility)
    for name, value in fields.items():
        msgspec.structs.force_setattr(key, name, value)
    msgspec.structs.force_setattr(told, "compatibility", key)
    server._handshake_reply = told


def offers_shared(scheduler: "OmniScheduler", request_id: str) -> bool:
    """Whether what an engine offers to load for a request is a shared prefix, and no hand-off."""
    prefix = scheduler._states[request_id].prefix
    return prefix is not None and prefix.offered > 0


def worker_half(connector: "OmniKVConnector") -> "OmniWorker":
    """Return the half of a connector that a worker made."""
    return connector._worker


def halves(scheduler: Any, workers: Sequence[Any]) -> list[Any]:
    """Return the scheduler half, then the worker halves; none of connectors that are not ours."""
    from omni_connector.vllm_v1.connector import OmniKVConnector

    if not isinstance(scheduler, OmniKVConnector):
        return []
    ours = [each for each in workers if isinstance(each, OmniKVConnector)]
    return [scheduler_half(scheduler), *map(worker_half, ours)]


def halves_beside(scheduler: Any, workers: Sequence[Any]) -> list[Any]:
    """Return the same of ours among the children of MultiConnector, where it is one of them."""
    from omni_connector.vllm_v1.connector import OmniKVConnector

    def ours(connector: Any) -> Any:
        children = getattr(connector, "sub_connectors", [connector])
        return next((each for each in children if isinstance(each, OmniKVConnector)), connector)

    return halves(ours(scheduler), [ours(each) for each in workers])


def stands_beside(half: "OmniScheduler") -> None:
    """Have a scheduler half know that another connector stands beside it. It learns that from
    workers in processes of their own, which leave their handshake out."""
    half._alone = False
    if half._shared is not None:
        half._shared.saves.alone = False


def waiting_jobs(turn: Callable[[], object]) -> Callable[[], int]:
    """Return what counts the jobs of the copy thread whose turn this is, if all of them wait for
    something, and nobody has to hear of one that has ended; 0 of any other thread."""
    from omni_connector.copy.threads import CopyThread

    thread = getattr(turn, "__self__", None)
    if not isinstance(thread, CopyThread):
        return lambda: 0

    def count() -> int:
        jobs = thread._queue
        only_wait = all(job.looks and not job.cancelled for job in jobs)
        return len(jobs) if only_wait and not thread.has_ended else 0

    return count


def watch_choices(
    turn: Callable[[], object], chosen: Callable[[bool | None, bool, bool, bool, float], None]
) -> None:
    """Have it told of each choice of a copy thread that lets another one's jobs go first, whose
    turn this is; of other threads nothing.

    Args:
        chosen: told whether the job that makes the next piece is a background job, None for no job;
            whether it need let nobody go first, as it was cancelled or keeps an order; whether one
            that could make a piece lets others go first; whether one of these could; and the time.
    """
    from omni_connector.copy.threads import CopyThread

    thread = getattr(turn, "__self__", None)
    if not isinstance(thread, CopyThread) or thread._first is None:
        return
    first, choose = thread._first, thread._next

    def watched(now: float) -> int | None:
        due = [each for each in thread._queue if each.is_due(now)]
        back = [each for each in due if each.background and not each.cancelled]
        if any(each.in_order for each in thread._queue):
            back = []
        others = len(due) > len(back) or first.copies
        place = choose(now)
        job = None if place is None else thread._queue[place]
        background = None if job is None else job.background
        chosen(background, bool(background) and job not in back, bool(back), others, now)
        return place

    thread._next = watched  # type: ignore[method-assign]


def directory(half: "OmniScheduler") -> "SlotDirectory | None":
    """Return what an engine keeps of its slots; None where it hands nothing off."""
    return half._directory


def serving(half: "OmniScheduler") -> "ServingState":
    """Return which hand-offs an engine takes part in now."""
    return half._serving


def handoffs(half: "OmniScheduler") -> "list[Handoff]":
    """Return the hand-offs that are open, oldest first."""
    found = directory(half)
    return [] if found is None else list(found._handoffs.values())


def twins(half: "OmniScheduler") -> "list[list[Handoff]]":
    """Return the open hand-offs of an engine, those of one prompt together."""
    found = directory(half)
    return [] if found is None else [list(each.values()) for each in found._twins.values()]


def sender(half: "OmniScheduler") -> Any:
    """Return what hands prompts off; None on an engine that hands none off."""
    return next((each for each in half._products if hasattr(each, "waiting")), None)


def sends(half: "OmniScheduler") -> dict[str, Any]:
    """Return what a prefill engine knows of the requests that it hands off, by request id."""
    return {each: state.send for each, state in half._states.items() if state.send is not None}


def first_waiting(half: "OmniScheduler") -> Any:
    """Return what a prefill engine knows of the first request that waits for room; None: nobody."""
    return None if sender(half) is None else next(iter(sender(half).waiting), None)


def fetches(half: "OmniScheduler") -> dict[str, Any]:
    """Return what a decode engine knows of the hand-offs that it loads, by request id."""
    return {each: state.fetch for each, state in half._states.items() if state.fetch is not None}


TOO_LATE = "too_late"


def hear_refusals(half: "OmniScheduler", heard: Callable[[str, str], object]) -> None:
    """From now on be told of each hand-off that an engine refuses or gives up, or whose load fails:
    the request's id and the kind of failure; and with "" as the kind of each lease that ends. Where
    leases were too old each time that they could be used, the kind is `TOO_LATE`."""
    sends, fetches = sender(half), receiver(half)
    if sends is not None:
        refuse = sends._refuse

        def refused(send: Any, reason: str, text: str) -> None:
            heard(send.request.request_id, reason)
            refuse(send, reason, text)

        sends._refuse = refused
    if fetches is not None:
        give_up, job_ended, release = fetches._give_up, fetches._job_ended, fetches._release

        def released(load: Any) -> None:
            if load.lease is not None:
                heard(load.request.request_id, "")
            release(load)

        fetches._release = released

        def given_up(load: Any, kind: str, text: str) -> None:
            heard(load.request.request_id, TOO_LATE if "too late to be used" in text else kind)
            give_up(load, kind, text)

        def ended(load: Any, num_tokens: int, failure: str | None) -> None:
            if failure not in (None, "cancelled"):
                heard(load.request.request_id, str(failure))
            job_ended(load, num_tokens, failure)

        fetches._give_up = given_up
        fetches._job_ended = ended


def refuse_handoffs(
    half: "OmniScheduler", refuses: Callable[[], bool], told: Callable[[str], object]
) -> None:
    """Have a decode engine refuse hand-offs as of short prompts where `refuses` says so, however
    long they are; `told` is called with the id of each request."""
    fetches = receiver(half)
    if fetches is None:
        return
    take, is_short = fetches._take, fetches.is_short
    decided: dict[bytes, int] = {}  # requests of one hand-off are equally long

    def taken(state: Any, *rest: Any) -> None:
        def asked(*args: Any) -> bool:
            token = args[0].token
            if token not in decided:
                decided[token] = sys.maxsize if refuses() else 0
            fetches._min_tokens = decided[token]
            if not is_short(*args):
                return False
            told(state.request.request_id)
            return True

        fetches.is_short = asked
        take(state, *rest)

    fetches._take = taken


def watch_loads(half: "OmniScheduler", ends: "Callable[[Any, str | None], object]") -> None:
    """Have a decode engine tell of each hand-off whose load ends, with the kind of failure, before
    its lease is released."""
    fetches = receiver(half)
    if fetches is None:
        return
    ended = fetches._job_ended

    def tell(load: Any, num_tokens: int, failure: str | None) -> None:
        ends(load, failure)
        ended(load, num_tokens, failure)

    fetches._job_ended = tell


def shares(half: "OmniScheduler") -> bool:
    """Whether an engine lists its blocks for the other engines of its host."""
    return half._shared is not None and half._shared._host is not None


def tell_hits(half: "OmniScheduler") -> None:
    """Have an engine tell the others of its host soon what it has read, not with its next look."""
    if shares(half):
        half._shared._host._neighbours._thread.wake()  # type: ignore[union-attr]


def listed(half: "OmniScheduler") -> "tuple[Ints, Ints, Ints]":
    """Return the slots in an engine's index, their generations there, and those that the slots
    have, -1 where nothing is in them yet."""
    assert half._shared is not None
    assert half._shared._host is not None
    index, pool = half._shared._host._own.index, half._shared._host._pool
    slots = (index._cell_of >= 0).nonzero()[0]  # type: ignore[union-attr]
    held = pool.generation[slots].copy()
    held[~pool._ready[slots]] = -1
    return slots, index._generations[slots], held


def key_beginnings(half: "OmniScheduler") -> tuple[bytes, ...]:
    """Return what the keys of an engine's blocks begin with, one entry for each slot group."""
    from omni_connector.arena.format import header_keys

    assert half._shared is not None
    assert half._shared._host is not None
    prefix = half._shared._host._key_prefix
    numbers = range(len(compatibility(half).slot_groups))
    return tuple(header_keys(prefix, number, [b""])[0] for number in numbers)


def prefix_of_nobody_else(half: "OmniScheduler") -> str | None:
    """Return what the keys of an engine's blocks begin with, if no other engine can have it."""
    shared = half._shared
    if shared is None or not shared._prefix.is_own:
        return None
    return shared._prefix.current


def shares_prefixes(half: "OmniScheduler") -> bool:
    """Whether an engine keeps blocks for other requests, in its arena or in a store."""
    return half._shared is not None


def block_sizes(half: "OmniScheduler") -> tuple[tuple[int, int], ...]:
    """Return for each group how many tokens, and how many of vLLM's hashes, a block has."""
    assert half._shared is not None
    return half._shared._block_sizes


def keeps_all(half: "OmniScheduler", group: int) -> bool:
    """Whether a group keeps all tokens."""
    assert half._shared is not None
    return half._shared._groups[group].attention_type == "all"


def group_id(half: "OmniScheduler", group: int) -> int:
    """Return the index of a group among vLLM's."""
    assert half._shared is not None
    return half._shared.saves._group_ids[group]


def tags_of_blocks(half: "OmniScheduler", group: int, keys: list[bytes]) -> "Tags":
    """Return the tags of blocks of a group, by shard `(shards, blocks)`."""
    import numpy as np

    assert half._shared is not None
    assert half._shared._host is not None
    return np.atleast_2d(half._shared._host._tags(group, keys))


def first_number(half: "OmniScheduler", group: int) -> int:
    """Return the number of the first slot group of a group."""
    return compatibility(half).slot_group_ranges[group].start


def in_arena(half: "OmniScheduler", group: int, key: bytes) -> bool:
    """Whether the arena of an engine has, or will have, a block with all its shards."""
    assert half._directory is not None
    pool = half._directory.pool
    return all(len(pool.find(n, [key])) > 0 for n in compatibility(half).slot_group_ranges[group])


def num_slots(half: "OmniScheduler") -> int:
    """Return how many slots the arena of an engine has."""
    assert half._directory is not None
    return half._directory.num_slots


def pinned(half: "OmniScheduler") -> "Ints":
    """Return the slots of an engine that are pinned."""
    assert half._directory is not None
    return half._directory.pool._order.pinned.nonzero()[0]


def num_pins(half: "OmniScheduler") -> int:
    """Return how many slots an engine counts as pinned."""
    assert half._directory is not None
    order = half._directory.pool._order
    return max(order.num_pins, order.num_pinned)


def free_for(half: "OmniScheduler", keys: "Sequence[Sequence[bytes | None]]") -> int:
    """Return how many slots are free, cached and not pinned, or cached and pinned with one of these
    blocks: in so many a hand-off of them has room."""
    assert half._directory is not None
    pool = half._directory.pool
    own = 0
    for g, group in enumerate(keys):
        slots = pool.find(g, [key for key in group if key is not None])
        own += int((pool.pinned(slots) & pool._order.here(slots)).sum())
    return half._directory.num_slots - half._directory.usage()[0] - pool.num_pinned + own


def has_shards(half: "OmniScheduler", keys: "Sequence[Sequence[bytes | None]]") -> bool:
    """Whether each stripe has room for the shards of a hand-off that must lie there.

    Args:
        keys: of the hand-off's blocks, by slot group.
    """
    assert half._directory is not None
    pool = half._directory.pool
    key = compatibility(half)
    available = (pool._users == 0) & ~pool._busy & ~pool._order.pinned
    stripes = available.nonzero()[0] % key.num_shards
    return all(
        len(of_group) <= (stripes == each.stripe).sum()
        for each, of_group in zip(key.slot_groups, keys, strict=True)
        if each.stripe is not None
    )


def free_slots(half: "OmniScheduler") -> int:
    """Return how many slots of an engine hold nothing."""
    assert half._directory is not None
    held, cached, _ = half._directory.usage()
    return half._directory.num_slots - held - cached


def counted(half: "OmniScheduler", name: str) -> int:
    """Return what a scheduler half has counted since vLLM took its counts last."""
    return int(half._report._stats.data["counts"].get(name, 0))


def tags(half: "OmniScheduler") -> "Tags":
    """Return the tag of the block that each slot of an engine holds or will hold; 0: none."""
    directory = half._directory
    assert directory is not None
    assert directory.pool.listing is not None
    return directory.pool.listing._tags


def generations(half: "OmniScheduler") -> "Ints":
    """Return the generation of each slot of an engine."""
    assert half._directory is not None
    return half._directory.pool.generation


def being_kept(half: "OmniScheduler") -> tuple[int, int]:
    """Return how many slots an engine takes to be filled with blocks for its host, and how many
    blocks to be copied from, for host and store."""
    shared = half._shared
    if shared is None:
        return 0, 0
    keeping = {} if shared._host is None else shared._host.keeping
    return sum(len(spec.slots) for spec in keeping.values()), shared.saves.num_held


def waiting_blocks(half: "OmniScheduler") -> list[tuple[int, Any]]:
    """Return the blocks that are to be kept when earlier copies have ended, with their groups."""
    waiting = () if half._shared is None else half._shared.saves._waiting
    return [each for each in waiting if isinstance(each, tuple)]


def waiting(half: "OmniScheduler") -> set[tuple[int, bytes]]:
    """Return the group and key of each block that is to be kept when earlier copies have ended."""
    return {(group, key) for group, blocks in waiting_blocks(half) for key in blocks.keys}


def looked_at(half: "OmniScheduler", request_id: str) -> list[int]:
    """Return for each group how many blocks of a request were looked at. A request that waits for
    its adapter has none."""
    shared = shared_parts(half)
    state = half._states.get(request_id)
    prompt = None if state is None else state.prefix
    return prompt.sent if prompt is not None else [0] * len(shared._groups)


def tail(half: "OmniScheduler", request: Any, end: int) -> list[bytes]:
    """Return the names under which an engine may keep or store the tail of the first `end` tokens
    of a request, without adapter; none if it keeps none."""
    from omni_connector.prefix.hints import NO_HINTS
    from omni_connector.prefix.prompts import SharedPrompt

    shared = half._shared
    if shared is None or shared._tails is None:
        return []
    prompt = SharedPrompt(
        request=request,
        loads=False,
        hashed_tokens=None,
        adapter="",
        block_sizes=shared._block_sizes,
        sent=[],
        hints=NO_HINTS,
    )
    name = shared._tails.name(prompt, end)
    mark = shared._tails.mark(prompt, end)
    return [] if name is None or mark is None else [name, mark]


def prompt_ends(half: "OmniScheduler", request: Any) -> set[int]:
    """Return the tokens at which a tail may end that is kept of a prompt while its request runs."""
    unit, tokens = half._hash_block_size, request.num_prompt_tokens
    return {tokens, (tokens - 1) // unit * unit if unit else 0}


def now(half: "OmniScheduler") -> float:
    """Return what time it is for an engine."""
    return half._clock()


def shared_parts(half: "OmniScheduler") -> Any:
    """Return the shared prefix cache of an engine that has one."""
    assert half._shared is not None
    return half._shared


def pool(half: "OmniScheduler") -> Any:
    """Return the slots of an engine that shares them."""
    return shared_parts(half)._host._pool


def neighbours(half: "OmniScheduler") -> Any:
    """Return what finds the other engines of the host."""
    return shared_parts(half)._host._neighbours


def meets(half: "OmniScheduler") -> bool:
    """Look for other engines of the host, and return whether one is met."""
    found = neighbours(half)
    found.look()
    return bool(found.present())


def refused_neighbours(half: "OmniScheduler") -> list[str]:
    """Return why other engines of the host were not met."""
    return list(neighbours(half)._why_not.values())


def indexed(half: "OmniScheduler") -> int:
    """Return how many blocks the index of an engine lists."""
    return int((shared_parts(half)._host._own.index._cell_of >= 0).sum())


def explainer(half: "OmniScheduler") -> Any:
    """Return what answers `omni-connector explain` for an engine."""
    return shared_parts(half)._explainer


def prefix_saves(half: "OmniScheduler") -> Any:
    """Return what saves the blocks that an engine shares."""
    return shared_parts(half).saves


def doubt(half: "OmniScheduler", had: int) -> None:
    """Have an engine believe that another connector loads into the blocks that wait, from the
    token `had` of these on."""
    saves, blocks = prefix_saves(half), kv_blocks(half)
    of_groups: list[list[Any]] = [[] for _ in saves._groups]
    for group, waits in waiting_blocks(half):
        of_groups[group] += [blocks[each] for each in waits.block_ids]
    saves._doubt(of_groups, had)


def forget_sent(half: "OmniScheduler") -> None:
    """Have an engine forget what it has sent to the store, and what it will send."""
    sent = prefix_saves(half)._sent
    sent._seconds = 0.0
    sent._until.clear()


def used_again(half: "OmniScheduler") -> bool:
    """Whether a cached slot of an engine counts as used again."""
    return bool(pool(half)._order._again.any())


def know_neighbours(half: "OmniScheduler", present: Any) -> None:
    """Have an engine know these neighbours, until it looks for some."""
    neighbours(half)._present = present


def begin_epoch(half: "OmniScheduler") -> None:
    """Count up the epoch of an engine's weights, and tell no other part of the engine."""
    half._weights.begin()


def receiver(half: "OmniScheduler") -> Any:
    """Return what fetches hand-offs; None on an engine that fetches none."""
    return next((each for each in half._products if hasattr(each, "is_short")), None)


def periodic_tasks(half: "OmniScheduler") -> Any:
    """Return what an engine does beside its steps."""
    return half._periodic_tasks


def control_server(half: "OmniScheduler") -> Any:
    """Return what answers the peers of an engine."""
    return half._channel._server


def kv_events(half: "OmniScheduler") -> Any:
    """Return what makes KV events; None where vLLM publishes none."""
    return half._events


def waiting_for_adapters(half: "OmniScheduler") -> Any:
    """Return the requests whose adapter is being read."""
    return [each for each, state in half._states.items() if state.adapter_asked is not None]


def kv_blocks(half: "OmniScheduler") -> Any:
    """Return vLLM's KV blocks, by id."""
    return half._manager.block_pool.blocks


def traces(half: "OmniScheduler", worker: "OmniWorker") -> list[Any]:
    """Return the traces of both halves."""
    return [half._trace, worker._context.trace]


def stats(half: Any) -> Any:
    """Return where a half counts."""
    return half._stats


def lease_answer(half: "OmniScheduler", request_id: str, timeout: float) -> object:
    """Wait for the peer's answer to a request's lease request. Raises what it failed with."""
    return fetches(half)[request_id].future.result(timeout)


def channel(half: "OmniScheduler") -> "ControlChannel":
    """Return the control channel of an engine."""
    return half._channel


def channel_runs(channel: "ControlChannel") -> bool:
    """Whether the thread of a control channel runs, even if it serves nobody any more."""
    return channel._thread.is_alive()


def end_channel(channel: "ControlChannel") -> None:
    """Have the thread of a control channel end of an error, with its next tick."""
    channel._forget_failed = lambda: 1 // 0  # type: ignore[method-assign,assignment]


def engines_asked(channel: "ControlChannel") -> list[str]:
    """Return the addresses that a control channel has a session with, the oldest first."""
    return list(channel._peers)


def connections(channel: "ControlChannel") -> int:
    """Return how many connections the TCP listener of a control channel serves."""
    assert channel._listener is not None
    return len(channel._listener._connections)


def copies_under_way(half: "OmniScheduler") -> bool:
    """Whether a copy job of this engine has not ended."""
    return bool(half._ledger)


def last_started(half: "OmniWorker") -> int:
    """Return the highest number of a copy job that this rank was told of."""
    return half._last_started


def stripe(half: "OmniWorker") -> tuple[int, int]:
    """Return which of how many stripes of the slots a rank has; (0, 1) where each has all slots."""
    assert half._caches is not None
    assert half._caches.arena is not None
    stripes = half._caches.arena.stripes
    return half._rank % stripes, stripes


def arena(half: "OmniWorker") -> "Arena":
    """Return the arena of a rank."""
    assert half._caches is not None
    assert half._caches.arena is not None
    return half._caches.arena.arena


def mapped(arena: "Arena | BlockIndex") -> mmap.mmap:
    """Return the memory of an arena or index, headers included."""
    assert arena._map is not None
    return arena._map


def job_bodies(half: "OmniWorker") -> dict[type, Any]:
    """Return the thread and the body of a worker's jobs, by the type of their specs; a test may put
    others in their place."""
    assert half._caches is not None
    return half._caches.bodies


def loads_under_way(half: "OmniWorker") -> int:
    """Return of how many requests a rank loads KV."""
    return sum(bool(spec.request_id) for spec in half._under_way.values())


def copies_ended(half: "OmniWorker") -> bool:
    """Whether all copies to and from KV blocks have ended that a rank has started."""
    return all(map(_has_no_job, half._copy_threads))


def follows(half: "OmniWorker") -> bool:
    """Whether a rank's saves have copied all layers that the forward pass has told of."""
    thread = saves(half)
    with thread._changed:
        now = thread._clock()
        return thread._running is None and all(job.due_at > now for job in thread._queue)


def is_published(arena: "Arena", slot: int) -> bool:
    """Whether readers may read a slot."""
    from omni_connector.arena.format import SlotState, state_of

    words, first = arena._locate(slot)
    return state_of(words[first + 1]) == SlotState.PUBLISHED


def stored(half: "OmniWorker") -> bool:
    """Whether nothing is on its way from a rank to the shared store."""
    from omni_connector.prefix import store_jobs

    # A save that waits has yet to take its memory, and a put has that still.
    jobs = _store_jobs(half)
    return _has_no_job(saves(half)) and jobs._staging.qsize() == store_jobs._STAGING_BUFFERS


def _has_no_job(thread: "CopyThread") -> bool:
    with thread._changed:  # a job is moved from the queue in two steps
        return not (thread._queue or thread._running)


def store(half: "OmniWorker") -> "BlockStore":
    """Return a rank's client of the shared store."""
    return _store_jobs(half)._store


def _store_jobs(half: "OmniWorker") -> "StoreJobs":
    assert half._caches is not None
    assert half._caches.store_jobs is not None
    return half._caches.store_jobs


def end_thread(thread: "CopyThread") -> None:
    """Have a thread of copies die."""
    turns: Any = thread._thread
    turns._turn = lambda: None
    turns.wake()
    turns.join(60.0)


def saves(half: "OmniWorker") -> "CopyThread":
    """Return the thread that copies a rank's blocks to slots and to the store."""
    return half._threads.saves


def loads(half: "OmniWorker") -> "CopyThread":
    """Return the thread that copies hand-offs to a rank's blocks."""
    return half._threads.loads


def sharing_threads(half: "OmniWorker") -> int:
    """Return how many threads share in a copy of a rank."""
    return half._threads.helpers.threads


def load_plans(half: "OmniWorker") -> Any:
    """Return how a rank plans its loads."""
    return loader(half)._rank.plans


def loader(half: "OmniWorker") -> Any:
    """Return what loads the slots of peers."""
    assert half._caches is not None
    return half._caches.loader


def peer_arenas(half: "OmniWorker") -> Any:
    """Return the arenas of peers that a rank has attached."""
    return loader(half).arenas


def attached(half: "OmniWorker", endpoints: Sequence[Any]) -> int:
    """Return how many of these arenas a rank has attached."""
    known = peer_arenas(half)._known
    return sum(known[each].attached for each in endpoints if each in known)


def copier(half: "OmniWorker") -> Any:
    """Return what copies a rank's blocks."""
    assert half._caches is not None
    return half._caches.copier


def followed(half: "OmniWorker") -> list[Any]:
    """Return what a rank's device is to pin, mapping by mapping."""
    caches = half._caches
    return [] if caches is None else caches.pinning._memories


def end_answers(connector: "OmniKVConnector") -> None:
    """Have a rank answer its scheduler half no more."""
    end = connector._worker._end_answers
    assert end is not None
    end()


def transports(half: "OmniWorker") -> "Transports":
    """Return the ways in which a rank reads arenas, and offers its own."""
    return half._transports


def readers(transports: "Transports") -> "Sequence[ArenaTransport]":
    """Return what reads the arenas of peers, the nearest first."""
    return transports._readers


def exporters(transports: "Transports") -> "Sequence[ArenaTransport]":
    """Return what an engine's own arena is offered through."""
    return transports._exporters


def arenas_attached(half: "OmniWorker") -> int:
    """Return to how many arenas of peers a rank is attached."""
    assert half._caches is not None
    return len(half._caches.loader.arenas._known)


def own_objects(connector: "Exchange[Any]") -> "ObjectStore":
    """Return the objects that were put through a connector."""
    assert connector._own is not None
    return connector._own.objects


def senders_asked(
    connector: "SharedMemoryConnector | MooncakeTransferEngineConnector",
) -> list[Any]:
    """Return the senders that a connector has a link or an arena of."""
    return list(connector._peers.values())


def compare_nothing(replace: Callable[[Any, str, Any], object]) -> None:
    """Have loads believe whatever they have copied.

    Args:
        replace: sets an attribute, as `setattr` or pytest's `monkeypatch.setattr`.
    """
    from omni_connector.copy import loading

    replace(loading._Load, "_compare", lambda *_: None)


def toy_digest(weights: bytes) -> WeightsDigest:
    """The digest of a toy model's weights."""
    return WeightsDigest(hashlib.blake2b(weights, digest_size=16).hexdigest(), "toy")


def hashed(weights: Callable[[], bytes]) -> Generator[None, None, WeightsDigest]:
    """The same, in two pieces; the weights are read after the first of them."""
    yield
    return toy_digest(weights())


def know_weights(half: "OmniScheduler", ranks: int, weights: bytes) -> None:
    """Let an engine know its weights as if it had served a request."""
    half._follow_weights()
    half._weights.ask()
    question = half._weights.asked
    half._take_weights([RankWeights(r, question, toy_digest(weights)) for r in range(ranks)])


def read_weights(worker: "OmniWorker", read: Callable[[], Any]) -> None:
    """Let a worker read its weights by this from now on."""
    worker._weights._read = read


def present(half: Any) -> Sequence[object]:
    """The engines whose arenas an engine reads."""
    found: Sequence[object] = half._shared._host._neighbours.present()
    return found


def awaits_first_weights(half: "OmniScheduler") -> bool:
    """Whether requests wait for an engine to learn for the first time which weights it has."""
    return half._weights.waits and not half._weights.begun


def weights_known(half: "OmniScheduler") -> bool:
    """Whether an engine knows which weights it has."""
    return half._weights.known


def resets(half: "OmniScheduler") -> object:
    """Changes whenever an engine notices that caches are to be reset."""
    return half._weights.number, half._weights._noticed_times


def has_known_weights(half: "OmniScheduler") -> bool:
    """Whether an engine has ever known its weights."""
    return half._weights._first is not None
