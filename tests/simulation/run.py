# SPDX-License-Identifier: Apache-2.0
"""One schedule from its plan to its end, and what must hold there."""

import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from vllm.v1 import kv_cache_interface

from omni_connector import config, plugin
from omni_connector.arena import arena, slot_pool
from omni_connector.copy import host, host_rows, jobs
from omni_connector.copy.native import native_copy
from omni_connector.net import runtime
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.prefix import neighbours, saves, store_jobs
from omni_connector.stores import file_folder, file_store
from omni_connector.stores.shared_blocks import CORRUPT
from omni_connector.transports import reading
from tests import inspection
from tests.simulation import HASHES_VARIABLE
from tests.simulation.check import held_by, leftovers, sizes
from tests.simulation.cluster import Cluster
from tests.simulation.engines.connector import IS_LATE
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.engines.settings import HANDOFF_TTL_S, ORPHAN_S, EngineShape
from tests.simulation.plan import LONGEST, Plan, groups_of
from tests.simulation.promises import arena_is_free
from tests.simulation.surroundings.world import Killed, Violation, World

_QUIET_S: Final = 700.0
"""Seconds after which everything that is remembered for a while is forgotten too."""

_TICKS_S: Final = 1.2

_RETRIES: Final = 4
"""How often, at most, a device is given `_QUIET_S` to pin what it has refused twice."""

_SENT_S: Final = 60.0
"""Longest time in seconds in which a slow store, or one whose files hang, takes what was computed
last, and in which a device pins what it has refused before."""

# Failures, as they are counted, that need something to go wrong.
_FAULTS: Final = {
    "checksum_mismatch",
    "copy_thread_died",
    "incompatible_peer",
    "job_failed",
    "load_failed",
    "malformed_answer",
    "no_device_memory",
    "not_computed",
    "not_introduced",
    "other_epoch",
    "peer_refused",
    "peer_unreachable",
    "save_failed",
}
# What an engine counts if a store has lost blocks since it said to have them.
_GONE: Final = "store_blocks_gone"
# Exceptions that nothing from outside causes; what is provoked raises others.
_BUGS: Final = (AssertionError, AttributeError, LookupError, NameError, TypeError)
# After so many new connections a peer may have given up to introduce itself.
_MANY: Final = 2
_STALE: Final = {"stale_slot", "weights_changed"}

# Where machine code is asked for, by which name, and what gives it.
_NATIVE: Final[list[tuple[Any, str, Any]]] = [
    (host, "native_copy", native_copy),
    (host_rows, "native_copy", native_copy),
]

# What says the same for each engine of a process: it is asked once.
_THE_SAME_FOR_ALL: Final[list[tuple[Any, str]]] = [
    (plugin, "installed_vllm"),
    (config, "get_type_hints"),
    (runtime, "of_kernel"),
    (kv_cache_interface, "get_dtype_size"),
]

_HANG_CPU_S: Final = 20
_HANG_S: Final = 300
# What a generator's end still reaches, one collection leaves for the next.
_COLLECTIONS: Final = 3
_MOST_ACTS: Final = 400_000


@dataclass(frozen=True)
class Failure:
    """What a schedule has shown.

    Attributes:
        kind: what should have held.
        text: what did not.
        story: what happened before, a line each.
    """

    kind: str
    text: str
    story: tuple[str, ...]


def run(plan: Plan) -> Failure | None:
    """Run a schedule; None when all held."""
    return told(plan)[0]


def told(plan: Plan) -> tuple[Failure | None, tuple[str, ...]]:
    """The same, and what happened, a line each; of schedules that agree in all of it no draw
    differs."""
    cluster: Cluster | None = None
    failure = None
    errors = _Errors()
    threads, descriptors = threading.active_count(), _descriptors()
    with _alarm(), errors:
        try:
            jobs.BATCH_BYTES = plan.piece_bytes  # type: ignore[misc]
            slot_pool.PIN_PART = plan.pin_part  # type: ignore[misc]
            for module, name, made in _NATIVE:
                setattr(module, name, made if plan.native else _nothing)
            cluster = Cluster(plan)
            _run(cluster, plan, errors)
            cluster.close()
            _nothing_of_the_process(cluster, threads, descriptors)
        except Violation as violation:
            failure = Failure(violation.kind, str(violation), _story(cluster))
            with contextlib.suppress(BaseException):
                if cluster is not None:
                    cluster.close()
        finally:
            if cluster is not None:
                cluster.shelf.close()
                for name in {owner for owner, _ in cluster.host.arenas.values()}:
                    cluster.host.kill(name)
                for owner in [*cluster.host.views, *cluster.host.neighbourhood.homes]:
                    cluster.host.kill(owner)
                cluster.host.close()
    return failure, _story(cluster) if failure is None else failure.story


def _run(cluster: Cluster, plan: Plan, errors: "_Errors") -> None:
    world = cluster.world
    # An error in a request keeps this frame, and so must not keep engines that were killed.
    before: MutableMapping[SimulatedEngine, dict[str, int]] = WeakKeyDictionary()

    def look() -> None:
        for engine in cluster.engines.values():
            if engine not in before:
                before[engine] = sizes(engine)
        late = cluster.overdue()
        if late is not None and (
            (late.engine.stalled and _stalls_by_itself(late.engine, plan))
            or late.engine.has_lost(late.request_id)
        ):
            cluster.give_up(late)
        elif late is not None:
            raise Violation("never_ends", f"{late.request_id} at {late.engine.name} does not end")
        errors.look(cluster)
        if world.acts > _MOST_ACTS * (1 + cluster.stalls):
            raise Violation("never_ends", f"nothing is quiet after {world.acts} acts")

    look()
    for event in plan.events:
        last = world.acts + event.acts
        world.run(lambda last=last: world.acts >= last, world.now + 5.0)  # type: ignore[misc]
        getattr(cluster, event.what)(**event.how)
        look()
    _settle(cluster, plan, look)
    _nothing_is_left(cluster, before)


def _stalls_by_itself(engine: SimulatedEngine, plan: Plan) -> bool:
    """Whether vLLM may give all blocks to requests that wait: to streaming sessions, or to loads of
    another connector. Before 0.31 a request of a higher priority for which there is no room also
    stands in the way of those whose KV was loaded."""
    sessions = any(event.what == "converse" or event.how.get("session") for event in plan.events)
    drains_loaded = hasattr(engine.scheduler, "kv_holding_waiting")
    overtaken = engine.shape.priorities and not drains_loaded
    return sessions or bool(engine.shape.beside) or overtaken


def _settle(cluster: Cluster, plan: Plan, look: Any) -> None:
    world = cluster.world

    def quieten() -> None:
        while not cluster.quiet:
            world.run(lambda: cluster.quiet, world.now + 5.0)
            look()

    quieten()
    IS_LATE.clear()  # in the end every rank has reported
    for liar in cluster.liars:
        liar.close()
    cluster.liars.clear()  # their sockets keep engines that were killed
    # Leases and whatever else has a time to live.
    times = [0.0, HANDOFF_TTL_S / 2, HANDOFF_TTL_S, HANDOFF_TTL_S, _QUIET_S]
    if cluster.kept is not None:  # then others miss it, keep it as an orphan, and unmap it
        times += [_QUIET_S] * 3
    for seconds in times:
        world.advance(seconds)
        cluster.lag += seconds + _TICKS_S
        _tick(world)
        look()
        if not seconds and not cluster.excuses:
            _nothing_waits_for_its_time(cluster, plan)
    for name in sorted(cluster.deaf):
        cluster.serve(name, (0, 1), 1, 0)
    quieten()
    if cluster.deaf:  # what that step has begun comes to its end
        _tick(world)
    while len(cluster.engines) < len(cluster.shapes):
        world.run(lambda: len(cluster.engines) == len(cluster.shapes), world.now + 5.0)
        look()
    if _copies_under_way(cluster):  # of a block whose first copy has failed, say
        world.run(lambda: not _copies_under_way(cluster), world.now + _SENT_S)
        _tick(world)
    if plan.trouble.get("store_slow") or plan.trouble.get("file_hangs"):
        world.run(lambda: _stores_have_all(cluster), world.now + _SENT_S)
    for _ in range(_RETRIES):  # what was refused twice is asked for again after a while
        if world.run(lambda: _never_pinned(cluster) is None, world.now + _SENT_S):
            break
        world.advance(_QUIET_S)
        cluster.lag += _QUIET_S


def _tick(world: World) -> None:
    """Let actors act for `_TICKS_S`."""
    end = world.now + _TICKS_S
    world.run(lambda: world.now >= end, end)


def _stores_have_all(cluster: Cluster) -> bool:
    """Whether stores have what was computed last."""
    return not _copies_under_way(cluster) and all(
        inspection.stored(half)
        for engine in cluster.engines.values()
        if engine.shape.shares
        for half in engine.halves[1:]
    )


def _copies_under_way(cluster: Cluster) -> bool:
    """Whether an engine has a copy job that has not ended."""
    return any(
        inspection.copies_under_way(engine.halves[0])
        for engine in cluster.engines.values()
        if engine.halves
    )


def _never_pinned(cluster: Cluster) -> str | None:
    """An engine with memory that its device has not pinned, and does not refuse for ever."""
    for engine in cluster.engines.values():
        if (device := engine.device) is None:
            continue
        for memory in [each for half in engine.halves[1:] for each in inspection.followed(half)]:
            refused = [each.slots.ctypes.data for each in memory.refused]
            if memory.tried < memory.ready or not all(map(device.refuses_for_ever, refused)):
                return engine.name
    return None


def _nothing_waits_for_its_time(cluster: Cluster, plan: Plan) -> None:
    """Where nothing went wrong, leases and slots end with their requests, not with their time to
    live; and nothing fails as it does where something goes wrong."""
    for engine in cluster.engines.values():
        slots, leases = held_by(engine)
        if leases:
            raise Violation("left_behind", f"{engine.name} has {leases} leases, and no requests")
        # Ranks that report late do so in some later step, and an idle engine makes few.
        if slots and not cluster.lingers and not engine.shape.late_reports:
            raise Violation("left_behind", f"{engine.name} holds {slots} slots for nobody")
        # Where nothing is leased, a slot may be used again before it is read.
        faults = _FAULTS if cluster.voids or engine.shape.hosts else _FAULTS | _STALE
        if cluster.left:  # what it offered may be asked for again
            faults = faults - {"other_epoch", "peer_unreachable"}
        if cluster.liars:  # an index that lies may name a slot of another group, of another length
            faults = faults - {"peer_refused"}
        if _pins_take_room(engine.shape, plan):  # its lease gets too old meanwhile
            faults = faults - {"peer_unreachable"}
        if plan.trouble.get("slow_loads") and engine.name in cluster.refusals.too_late:
            # Its steps take as long as pieces of loads, and it is idle all the time.
            faults = faults - {"peer_unreachable"}
        if failures := engine.failures & faults:
            raise Violation(
                "request_failed", f"{engine.name} counts {sorted(failures)}, and nothing went wrong"
            )


def _pins_take_room(shape: EngineShape, plan: Plan) -> bool:
    """Whether a prompt that is to be handed on may wait for slots until a pin has ended."""
    left = shape.slots - shape.slots // plan.pin_part
    return left < groups_of(shape.family) * -(-LONGEST // shape.block_size) and any(
        event.how["wish"].pin_s for event in plan.events if event.how.get("wish")
    )


def _nothing_is_left(cluster: Cluster, before: Mapping[SimulatedEngine, dict[str, int]]) -> None:
    cluster.shelf.look()
    if cluster.kept is not None:
        cluster.kept.look()
    if (name := _never_pinned(cluster)) is not None:
        raise Violation("left_behind", f"{name} has memory that it never pins")
    for engine in cluster.engines.values():
        if CORRUPT in engine.failures and not cluster.spoiled:
            raise Violation("wrong_bytes", f"{engine.name} finds other bytes than were stored")
        if _GONE in engine.failures and cluster.shelf.is_steady and not cluster.spoiled:
            raise Violation("wrong_look_up", f"{engine.name} asks for what the store has not")
    for engine in cluster.engines.values():
        if engine.shape.role == "kv_consumer" and "draining" in engine.failures:
            raise Violation("refused", f"{engine.name} drains, and does not fetch what it needs")
        left = leftovers(engine, before.get(engine, {}))
        if left:
            raise Violation("left_behind", f"{engine.name} keeps {'; '.join(left[:6])}")
        for half in engine.halves[1:] if engine.device is not None else ():
            inspection.copier(half).look()
        if engine.halves and not arena_is_free(engine.halves[0]):
            raise Violation("left_behind", f"{engine.name} has slots that nothing can use")
        for view in cluster.host.views.get(str(engine.owner), ()):
            if not view.alive:
                raise Violation("left_behind", f"{engine.name} maps an arena whose owner is gone")
        if cluster.host.neighbourhood.mapped_of_the_gone(str(engine.owner)):
            gc.collect()  # the index is unmapped with the last object that looks things up in it
        if gone := cluster.host.neighbourhood.mapped_of_the_gone(str(engine.owner)):
            raise Violation("left_behind", f"{engine.name} maps the indexes of {gone}")
        if "not_introduced" in engine.failures and cluster.reconnects < _MANY:
            raise Violation("request_failed", f"{engine.name} is not introduced anew")
        if lost := cluster.net.lost_by(str(engine.owner)):
            raise Violation("left_behind", f"{engine.name} has {lost} links to who is gone")


def _nothing_of_the_process(cluster: Cluster, threads: int, descriptors: int) -> None:
    alive = [
        actor.name
        for actor in cluster.world.actors
        if actor.owner is not None and getattr(actor, "is_alive", lambda: False)()
    ]
    if alive:
        raise Violation("left_behind", f"threads that do not end: {alive}")
    views = {owner: len(views) for owner, views in cluster.host.views.items() if views}
    if views:
        raise Violation("left_behind", f"mappings after the end: {views}")
    if cluster.net.routers or cluster.net.links:
        raise Violation("left_behind", "sockets after the end")
    if threading.active_count() > threads:
        raise Violation("left_behind", "threads of the process")
    for owner in {owner for owner, _ in cluster.host.arenas.values()}:
        raise Violation("left_behind", f"the arena of {owner}")
    for error in cluster.world.told_to_vllm:
        error.__traceback__ = None  # its frames are those of all threads, which wait in each other
    for _ in range(_COLLECTIONS):  # what a killed engine was in the middle of
        if _descriptors() > descriptors:
            gc.collect()
    if _descriptors() > descriptors:
        raise Violation("left_behind", f"{_descriptors() - descriptors} descriptors")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _story(cluster: Cluster | None) -> tuple[str, ...]:
    if cluster is None:
        return ()
    world = cluster.world
    start = world.story[0][0] if world.story else 0.0
    lines = [f"{when - start:9.4f}  {text}" for when, text in world.story]
    end = f"{world.now - start:9.4f}  the end, after {world.acts} acts"
    return (*lines, f"{end} (the next draw would be {world.draw.random():.4f})")


class _Errors(logging.Handler):
    """What the connector itself calls an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._lines: list[str] = []
        self._bugs: list[str] = []
        self._loggers = [
            logging.getLogger(name) for name in ("vllm.omni_connector", "omni_connector")
        ]

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Killed):
            return  # no process writes a log after its SIGKILL
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
            if isinstance(record.exc_info[1], _BUGS):
                self._bugs.append(text)
        self._lines.append(text)

    def look(self, cluster: Cluster) -> None:
        """Raise for what was not provoked."""
        lines, self._lines = self._lines, []
        if cluster.expected_errors:
            lines = self._bugs
        if lines:
            raise Violation("exception", lines[0])

    def __enter__(self) -> "_Errors":
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """End what hangs, where signals can be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Violation("hangs", "an act does not end")

    former = [signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, _HANG_CPU_S)
    signal.alarm(_HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), former, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def laboratory() -> Iterator[None]:
    """What holds while schedules run: a runtime folder of one's own, small pieces, no sleep."""
    folder = tempfile.mkdtemp(prefix="omni-sim-")
    variables = {
        RUNTIME_DIR_VARIABLE: folder,
        HASHES_VARIABLE: "0",  # else vLLM draws what its hashes of blocks begin with
    }
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    patched: list[tuple[Any, str, Any]] = [
        (jobs, "BATCH_BYTES", 1),
        (slot_pool, "PIN_PART", slot_pool.PIN_PART),
        (neighbours, "ORPHAN_S", ORPHAN_S),
        (arena, "_MANY", 0),  # loads are of few blocks
        *_NATIVE,
        (store_jobs, "_MAX_ROWS", 2),
        (store_jobs, "_STAGING_BUFFERS", 2),
        (file_store, "_A_THREAD", 2),
        (file_folder, "_PARTS", 1),
        (saves, "_AT_ONCE", 5),  # fewer blocks than most prompts have
        (reading, "_FETCH_AGAIN_S", 0.02),  # each time, several threads act
        (time, "sleep", _no_sleep),
        *(
            (module, name, functools.cache(getattr(module, name)))
            for module, name in _THE_SAME_FOR_ALL
        ),
    ]
    unraisable = sys.unraisablehook
    sys.unraisablehook = lambda _: None  # of generators that ended with a killed engine
    kept = [(module, name, getattr(module, name)) for module, name, _ in patched]
    levels = []
    for name in ("vllm", "vllm.omni_connector", "omni_connector"):
        logger = logging.getLogger(name)
        levels.append((logger, logger.level, logger.propagate))
        logger.setLevel(logging.ERROR)
        logger.propagate = False  # whoever keeps a record keeps the frames of its exception
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    for module, name, value in patched:
        setattr(module, name, value)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        gc.collect()
        sys.unraisablehook = unraisable
        gc.enable()
        if not frozen:
            gc.unfreeze()
        for module, name, value in kept:
            setattr(module, name, value)
        for logger, level, propagate in levels:
            logger.setLevel(level)
            logger.propagate = propagate
        for variable, content in former.items():
            if content is None:
                del os.environ[variable]
            else:
                os.environ[variable] = content
        shutil.rmtree(folder)


def _nothing() -> None:
    """What there is of machine code where llvmlite is missing."""


def _no_sleep(seconds: float) -> None:
    raise Violation("engine_waits", f"something sleeps for {seconds} s")
