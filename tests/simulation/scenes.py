# SPDX-License-Identifier: Apache-2.0
"""What chance alone brings about too seldom: a part of the seeds is aimed at it.

A scene keeps the engines that the seed drew, and puts events of its own in the place of the
seed's. Each was made for a mutant that no thousand seeds found. All its draws are its own, so that
seeds without a scene are as they were.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tests.simulation.engines.settings import EngineShape
from tests.simulation.hints import Wish
from tests.simulation.plan import (
    LONGEST,
    SLOW_S,
    Event,
    Plan,
    blocks_of,
    groups_of,
    has_states,
)
from tests.toy import GROUPS

_OFTEN: Final = 0.15
_SLOW_OFTEN: Final = 0.05
_SIZED_OFTEN: Final = 0.3
_FILED_OFTEN: Final = 0.5
_STORED_OFTEN: Final = 0.3
_HOLES_OFTEN: Final = 0.5
_LEFT_PINS_OFTEN: Final = 0.05
_INTERRUPTED_OFTEN: Final = 0.3
_BESIDE_OFTEN: Final = 0.06
_BUSY_OFTEN: Final = 0.08
_READ_OFTEN: Final = 0.5
_ASKING_S: Final = 0.02
_AWHILE_S: Final = 30.0

_Happens = list[tuple[int, str, dict[str, Any]]]


def sized(plan: Plan, draw: random.Random) -> Plan:
    """The same with engines of other block sizes, for some of the plans; the plan itself for the
    others.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _SIZED_OFTEN:
        return plan
    plan = replace(plan, engines=tuple(_resized(engine, draw) for engine in plan.engines))
    windowed = "window" in GROUPS[plan.engines[0].family]
    return _windows_again(plan, draw) if windowed and draw.random() < 0.5 else plan


def _windows_again(plan: Plan, draw: random.Random) -> Plan:
    """Engines are asked for prompts again whose windows they have loaded, maybe in part."""
    happens: _Happens = []
    for _ in range(4):
        family = draw.randrange(3)
        prefill, decode = _pair(plan, draw)
        prompt = family, draw.choice((20, 33, 37))
        happens.append((draw.choice((30, 100)), "hand_off", hand_off(prefill, decode, prompt)))
        for acts in (draw.choice((100, 300)), 300):
            happens.append((acts, "serve", serve(decode, prompt)))
    return replace(plan, events=_events(happens))


def _resized(engine: EngineShape, draw: random.Random) -> EngineShape:
    keeps_states = has_states(engine.family)
    # A page must hold a rank's state, and those who decode have the larger blocks mostly: then
    # they load the first block of a window in part.
    sizes = (8, 16) if keeps_states else (4, 8, 16)
    weights = {"kv_producer": (4, 2, 1), "kv_consumer": (1, 2, 4)}.get(str(engine.role), (1, 1, 1))
    size = draw.choices(sizes, weights[-len(sizes) :])[0]
    spare = engine.blocks // groups_of(engine.family) - LONGEST // engine.block_size
    least = size if keeps_states and engine.caching else 0  # a step has to reach a block's end
    return replace(
        engine,
        block_size=size,
        blocks=blocks_of(engine.family, size, spare),
        step_tokens=max(engine.step_tokens, least),
        long_prefill=engine.long_prefill and max(engine.long_prefill, least),
    )


def staged(plan: Plan, draw: random.Random) -> Plan:
    """A plan with a scene in it, for some of the plans; the plan itself for the others.

    Args:
        draw: of this plan's scene, and of nothing else.
    """
    if draw.random() < _OFTEN:
        return draw.choice(_SCENES)(plan, draw)
    if draw.random() < _SLOW_OFTEN:
        return replace(plan, trouble=plan.trouble | {"slow_copies": draw.choice((SLOW_S, 0.3))})
    return plan


def filed(plan: Plan, draw: random.Random) -> Plan:
    """The same with a store of files, for half of the plans with a store.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _FILED_OFTEN or not any(engine.shares for engine in plan.engines):
        return plan
    files = {"files": float(draw.choice((4, 12, 12, 1000)))}
    if draw.random() < 0.5:
        files["file_slow"] = draw.choice((0.01, 0.1, 0.5))
    if draw.random() < 0.3:
        files["file_hangs"] = draw.choice((0.05, 0.2))
    if draw.random() < 0.25:
        files["file_torn"] = draw.choice((0.02, 0.3))
    stored = ("store_absent", "store_slow")
    others = {name: often for name, often in plan.trouble.items() if name not in stored}
    plan = replace(plan, trouble=others | files)
    return _stored(plan, draw) if draw.random() < _STORED_OFTEN else plan


def with_holes(plan: Plan, draw: random.Random) -> Plan:
    """The same with a store that has some blocks of a prompt only, or loses some before they are
    read, for half of the plans whose store is of no files; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    stored = any(engine.shares for engine in plan.engines) and "files" not in plan.trouble
    if draw.random() >= _HOLES_OFTEN or not stored:
        return plan
    others = {name: often for name, often in plan.trouble.items() if not name.startswith("store_")}
    name = draw.choice(("store_holes", "store_vanishing"))
    plan = replace(plan, trouble=others | {name: draw.choice((0.1, 0.3))})
    if draw.random() < 0.5:
        return plan
    happens = [happen for happen in _stored_happens(plan, draw) if happen[1] == "serve"]
    engines = tuple(replace(engine, hosts=False, step_s=0.0) for engine in plan.engines)
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002)


def _stored(plan: Plan, draw: random.Random) -> Plan:
    """Prompts are served by one engine after the other, while the files come to their limit."""
    return replace(plan, events=_events(_stored_happens(plan, draw)), pace=0.0002)


def _stored_happens(plan: Plan, draw: random.Random) -> _Happens:
    happens: _Happens = []
    for _ in range(4):
        for engine in draw.sample(plan.engines, 2):
            prompt = draw.randrange(3), draw.choice((20, 33, 37))
            happens.append((draw.choice((30, 300)), "serve", serve(engine.name, prompt)))
        if draw.random() < 0.3:
            engine = draw.choice(plan.engines)
            happens.append((100, "reset", {"engine": engine.name, "connector": True}))
        # Sweeps come seconds after what was written.
        happens.append((10, "jump", {"seconds": draw.choice((1.0, 15.0))}))
    return happens


def _restarted_peer(plan: Plan, draw: random.Random) -> Plan:
    """A prefill engine is started anew, and at once hands off another prompt, in the same slots."""
    prefill, decode = _pair(plan, draw)
    length = draw.choice((13, 20, 33, 37))
    happens: _Happens = []
    for family in draw.sample(range(3), 3):
        happens += [
            (draw.choice((1, 3)), "hand_off", hand_off(prefill, decode, (family, length))),
            (
                draw.choice((30, 100, 300)),
                draw.choice(("kill", "restart")),
                {"engine": prefill, "seconds": 0.0},
            ),
        ]
    return replace(plan, events=_events(happens), pace=0.0, mapped=True, trouble={})


def _late_lease(plan: Plan, draw: random.Random) -> Plan:
    """Decode requests come between the resets of their engine and of the peer, whose answers are
    late: they bring leases from before its reset."""
    prefill, decode = _pair(plan, draw)
    happens = [(0, "hand_off", hand_off(prefill, decode, (0, 5)))]  # so that they know each other
    for number in range(4):
        how = hand_off(prefill, decode, (number % 3, draw.choice((13, 20))))
        happens.append((1000 if number == 0 else 30, "hand_off", how | {"pause": _AWHILE_S}))
    update = {
        "mode": draw.choice(("abort", "wait", "keep")),
        "running": False,
        "connector": draw.random() < 0.5,
        "first": draw.choice(("reset", "weights")),
        "sleep": draw.random() < 0.2,
        "hasty": 1.0,
    }
    happens.append((300, "update_weights", update))
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    return replace(
        plan, engines=engines, events=_events(happens), pace=0.0, trouble={"late_answers": 0.6}
    )


def _slow_saves(plan: Plan, draw: random.Random) -> Plan:
    """Blocks of requests that ended are being copied to the shared store, and other engines read
    them from there."""
    engines = tuple(replace(engine, shares=True, caching=True) for engine in plan.engines)
    return _slow_copies(replace(plan, engines=engines), draw)


def _slow_copies(plan: Plan, draw: random.Random) -> Plan:
    """Other prompts take the blocks of requests that ended while their blocks are being copied for
    other engines, one of which reads them later."""
    groups = groups_of(plan.engines[0].family)
    engines = tuple(
        replace(
            engine,
            slots=max(engine.slots, 40 * groups) if engine.hosts else engine.slots,
            step_s=0.0,
            blocks=engine.blocks if number else blocks_of(engine.family, engine.block_size, 2),
        )
        for number, engine in enumerate(plan.engines)
    )
    first, other = (engine.name for engine in engines[:2])
    length = draw.choice((33, 37))
    happens: _Happens = []
    soon = (0, 3) if plan.engines[0].hosts else (30, 60)
    for engine, acts, tokens in ((first, soon, 20), (other, (300,), 1)):
        for family in draw.sample(range(3), 3):
            prompt = family, length
            how = {"engine": engine, "prompt": prompt, "tokens": tokens, "priority": 0}
            happens.append((draw.choice(acts), "serve", how))
    trouble = {"slow_copies": draw.choice((0.1, 0.3))}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _leaving_twin(plan: Plan, draw: random.Random) -> Plan:
    """Of clients with one prompt the first goes away while the KV for all of them is copied."""
    prefill, decode = _pair(plan, draw)
    happens: _Happens = []
    for family in draw.sample(range(3), 3):
        how = hand_off(prefill, decode, (family, draw.choice((33, 37))))
        how |= {"leaves": True, "prefills": draw.choice((2, 4))}
        happens.append((draw.choice((0, 30, 100)), "hand_off", how))
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    trouble = {"slow_copies": SLOW_S}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0, trouble=trouble)


def _long_queues(plan: Plan, draw: random.Random) -> Plan:
    """Loads are slow, and so many that the last of them queue longer than their leases last."""
    prefill, decode = _pair(plan, draw)
    happens: _Happens = []
    for _ in range(draw.choice((5, 8))):
        prompt = draw.randrange(3), draw.choice((20, 33, 37))
        happens.append((draw.choice((0, 10, 30)), "hand_off", hand_off(prefill, decode, prompt)))
    engines = tuple(
        replace(
            engine,
            step_s=0.0,
            seqs=8,
            slots=max(engine.slots, 40 * groups_of(engine.family)),
            blocks=blocks_of(engine.family, engine.block_size, 150),  # nobody waits for room
        )
        for engine in plan.engines
    )
    trouble = {"slow_loads": draw.choice((0.3, 1.0))}
    return replace(
        plan,
        engines=engines,
        events=_events(happens),
        pace=0.0,
        mapped=True,
        piece_bytes=1,
        trouble=trouble,
    )


def _late_room(plan: Plan, draw: random.Random) -> Plan:
    """Decode requests wait for room until their leases are about to end; and what they want is
    there already, for some."""
    prefill, decode = _pair(plan, draw)
    happens: _Happens = []
    for _ in range(3):
        prompt = draw.randrange(3), draw.choice((33, 37))
        how = hand_off(prefill, decode, prompt) | {"tokens": 20, "times": 4}
        happens += [
            (draw.choice((30, 100)), "hand_off", how),
            (draw.choice((60, 100)), "jump", {"seconds": draw.choice((8.0, 10.5, 11.0, 11.5))}),
        ]
    engines = tuple(
        replace(
            engine,
            step_s=0.0,
            seqs=8,
            blocks=blocks_of(engine.family, engine.block_size, 2),
            slots=max(engine.slots, 40 * groups_of(engine.family)),
        )
        for engine in plan.engines
    )
    return replace(plan, engines=engines, events=_events(happens), pace=0.0, trouble={})


def _reconnected(plan: Plan, draw: random.Random) -> Plan:
    """The connections to a prefill engine are made anew between hand-offs, once."""
    prefill, decode = _pair(plan, draw)
    happens: _Happens = []
    for _ in range(5):
        prompt = draw.randrange(3), draw.choice((13, 20, 33))
        happens.append((draw.choice((3, 30, 300)), "hand_off", hand_off(prefill, decode, prompt)))
    how = {"engine": prefill, "number": draw.randrange(1 << 30)}
    happens.insert(draw.randrange(2, 5), (draw.choice((30, 100, 1000)), "reconnect", how))
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    return replace(plan, engines=engines, events=_events(happens), pace=0.0, trouble={})


_SCENES: Final[tuple[Callable[[Plan, random.Random], Plan], ...]] = (
    _restarted_peer,
    _late_lease,
    _slow_saves,
    _leaving_twin,
    _long_queues,
    _late_room,
    _reconnected,
)


def hosted(plan: Plan, draw: random.Random) -> Plan:
    """The same with engines that share their prefixes through their arenas, for about half of the
    plans whose engines can; the plan itself for the others. Where models keep states, here is also
    drawn whether there is a store.

    Args:
        draw: of this, and of nothing else.
    """
    first = plan.engines[0]
    if not first.caching:
        return plan
    if has_states(first.family) and draw.random() < 0.5:
        plan = replace(plan, engines=tuple(replace(each, shares=True) for each in plan.engines))
    if draw.random() < 0.5:
        return plan
    plan = replace(plan, engines=tuple(replace(engine, hosts=True) for engine in plan.engines))
    trouble = dict(plan.trouble)
    for name, choice in (
        ("met_late", (0.0, 5.0, 30.0)),
        ("hits_lost", (0.1, 0.5, 1.0)),
        ("hits_nonsense", (0.1, 1.0)),
        ("slow_copies", (SLOW_S,)),
    ):
        if draw.random() < 0.25:
            trouble[name] = draw.choice(choice)
    plan = replace(plan, trouble=trouble)
    if draw.random() < _HOST_SCENES_OFTEN:
        return draw.choice(_HOST_SCENES)(plan, draw)
    happens = [(event.acts, event.what, event.how) for event in plan.events]
    more = _served(plan, draw, draw.choice((2, 4, 8)))
    if draw.random() < 0.3:
        more += _lies(plan, draw)
    for each in more:
        happens.insert(draw.randrange(len(happens) + 1), each)
    if draw.random() < _LEFT_PINS_OFTEN:
        return _left_pins(plan, draw)
    return replace(plan, events=_events(happens))


def interrupted(plan: Plan, draw: random.Random) -> Plan:
    """The same with threads that are interrupted between two sections of a lock, for some of the
    plans; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() < _BESIDE_OFTEN:
        return draw.choice((_resets_beside_leases, _beside_failed_loads))(plan, draw)
    if draw.random() < _INTERRUPTED_OFTEN:
        return replace(plan, interrupts=draw.choice((0.02, 0.1, 0.3)))
    return plan


def _resets_beside_leases(plan: Plan, draw: random.Random) -> Plan:
    """A prefill engine is reset, connector included, while it answers lease requests, and hands off
    more when that is over."""
    prefill, decode = _pair(plan, draw)
    happens: _Happens = [(0, "hand_off", hand_off(prefill, decode, (0, 5)))]
    for _ in range(6):
        # The decode requests come when all is prefilled, and the reset while they ask for leases.
        for family in range(3):
            how = hand_off(prefill, decode, (family, draw.choice((5, 13))))
            happens.append((30, "hand_off", how | {"times": 4, "pause": 1.0}))
        seconds = 1.0 + draw.random() * _ASKING_S
        reset = {"engine": prefill, "connector": True, "seconds": seconds}
        happens += [(0, "reset", reset), (300, "serve", serve(decode, (0, 5)))]
    for acts in (1000, 30):
        how = hand_off(prefill, decode, (draw.randrange(3), draw.choice((13, 20))))
        happens.append((acts, "hand_off", how))
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    return replace(
        plan, engines=engines, events=_events(happens), pace=0.0002, trouble={}, interrupts=0.5
    )


def _beside_failed_loads(plan: Plan, draw: random.Random) -> Plan:
    """An engine hands prompts off, and loads others whose engine goes away or is reset meanwhile. A
    prefill that is preempted computes again what was copied before."""
    first, other = (each.name for each in plan.engines[:2])
    happens: _Happens = []
    for _ in range(4):
        loaded, handed = draw.sample(range(3), 2)
        gone = ("kill", {"engine": first, "seconds": 0.0})
        reset = ("reset", {"engine": first, "connector": True})
        happens += [
            (300, "hand_off", hand_off(first, other, (loaded, 37))),
            (draw.choice((10, 30)), "hand_off", hand_off(other, first, (handed, 37))),
            (draw.choice((10, 30)), "preempt", {"engine": other}),
            (draw.choice((1, 3, 10)), *draw.choice((gone, reset))),
        ]
    engines = tuple(
        replace(engine, role="kv_both", policy="recompute", step_tokens=8, step_s=0.0)
        for engine in plan.engines[:2]
    )
    trouble = {"slow_copies": SLOW_S}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _left_pins(plan: Plan, draw: random.Random) -> Plan:
    """Clients want a prompt pinned for which there is room once. One goes away while the KV is
    copied, and another asks for the same."""
    prefill, decode = _pair(plan, draw)
    length = draw.choice((33, 37))
    happens: _Happens = []
    for family in draw.sample(range(3), 3):
        seconds = draw.choice((0.5, 3.0, 600.0))
        wish = Wish({"pin_s": seconds}, pin_s=seconds)
        how = hand_off(prefill, decode, (family, length)) | {"wish": wish}
        happens.append((draw.choice((0, 300, 1000)), "hand_off", how | {"leaves": True}))
        for _ in range(2):
            happens.append((draw.choice((1, 10, 30)), "hand_off", how))
    engines = []
    for engine in plan.engines:
        groups = groups_of(engine.family)
        blocks = draw.choice((1.0, 1.5)) * groups * (length // engine.block_size)
        engines.append(replace(engine, slots=math.ceil(plan.pin_part * blocks), step_s=0.0))
    trouble = {"slow_copies": draw.choice((SLOW_S, 0.1))}
    return replace(
        plan, engines=tuple(engines), events=_events(happens), pace=0.0002, trouble=trouble
    )


def _evictions(plan: Plan, draw: random.Random) -> Plan:
    """Blocks leave small arenas while other engines are about to read them."""
    if draw.random() < _READ_OFTEN:
        return _read_while_evicted(plan, draw)
    plan = _small(plan, draw)
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    happens = _served(plan, draw, 14)
    trouble = {"slow": 0.05} if draw.random() < 0.5 else {}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _read_while_evicted(plan: Plan, draw: random.Random) -> Plan:
    """An engine reads slowly from an arena that has room for one prompt, while the arena's engine
    computes others."""
    owner, reader = plan.engines[0].name, plan.engines[1].name
    happens: _Happens = []
    for first in draw.sample(range(3), 3):
        others = [family for family in range(3) if family != first]
        happens.append((300, "serve", serve(owner, (first, 37), 1)))
        happens.append((draw.choice((100, 300)), "serve", serve(reader, (first, 37))))
        for family in others:
            happens.append((draw.choice((3, 10, 30)), "serve", serve(owner, (family, 37), 1)))
    groups, size = groups_of(plan.engines[0].family), plan.engines[0].block_size
    slots = 2 * groups * -(-(37 // size) // 2)
    engines = tuple(
        replace(
            each,
            block_size=size,
            blocks=blocks_of(each.family, size, 8),
            slots=slots if each.name == owner else 40 * groups,
            step_tokens=max(each.step_tokens, size),
            long_prefill=each.long_prefill and max(each.long_prefill, size),
            step_s=0.0,
        )
        for each in plan.engines
    )
    trouble = {"slow_loads": draw.choice((0.02, 0.1))}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _small(plan: Plan, draw: random.Random) -> Plan:
    """The same with arenas that are too small for all blocks."""
    groups = groups_of(plan.engines[0].family)
    return replace(
        plan,
        engines=tuple(
            replace(engine, slots=groups * draw.choice((3, 5, 10))) for engine in plan.engines
        ),
    )


def _one_by_one(plan: Plan, draw: random.Random) -> Plan:
    """Engines get other weights one after the other, and answer between that."""
    happens = _served(plan, draw, 4)
    for engine in draw.sample(plan.engines, len(plan.engines)):
        how = {
            "mode": draw.choice(("abort", "wait", "keep")),
            "running": draw.random() < 0.5,
            "connector": draw.random() < 0.5,
            "first": draw.choice(("reset", "weights")),
            "sleep": draw.random() < 0.2,
            "hasty": 0.0,
            "only": engine.name,
        }
        happens.append((draw.choice((30, 300)), "update_weights", how))
        for _, what, how in _served(plan, draw, 6):
            happens.append((draw.choice((100, 1000)), what, how))
    return replace(plan, events=_events(happens), pace=0.0, trouble={})


def _liars(plan: Plan, draw: random.Random) -> Plan:
    """Nothing goes wrong but that indexes lie: they have room for all blocks that have left the
    small arenas of others."""
    happens = _served(plan, draw, 4)
    for _ in range(3):
        happens += [*_lies(plan, draw), *_served(plan, draw, 4)]
    plan, large = _small(plan, draw), draw.choice(plan.engines).name
    slots = 40 * groups_of(plan.engines[0].family)
    engines = tuple(
        replace(engine, slots=slots if engine.name == large else engine.slots, step_s=0.0)
        for engine in plan.engines
    )
    happens = [
        (acts, what, how | {"engine": large} if what == "lie" else how)
        for acts, what, how in happens
    ]
    trouble = {"met_late": 0.0}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _parts(plan: Plan, draw: random.Random) -> Plan:
    """The blocks of a prompt lie in several arenas, one of which goes while it is read."""
    happens: _Happens = []
    for family in draw.sample(range(3), 2):
        for engine, length in zip(draw.sample(plan.engines, 2), (13, 37), strict=True):
            happens.append((300, "serve", serve(engine.name, (family, length))))
    for _ in range(6):
        how = serve(draw.choice(plan.engines).name, (draw.randrange(3), draw.choice((33, 37))))
        happens.append((draw.choice((30, 300)), "serve", how))
    gone = {"engine": draw.choice(plan.engines).name, "seconds": draw.choice((0.0, 0.5))}
    happens.insert(draw.randrange(5, 11), (draw.choice((1, 3, 10)), "kill", gone))
    engines = tuple(
        replace(engine, blocks=blocks_of(engine.family, engine.block_size, 2), step_s=0.0)
        for engine in plan.engines
    )
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble={})


def _resets(plan: Plan, draw: random.Random) -> Plan:
    """Caches are reset while blocks are being copied into the arenas."""
    happens: _Happens = []
    for _ in range(4):
        engine = draw.choice(plan.engines).name
        prompt = draw.randrange(3), draw.choice((20, 33, 37))
        happens += [
            (draw.choice((30, 300)), "serve", serve(engine, prompt, 20)),
            (draw.choice((10, 30, 60)), "reset", {"engine": engine, "connector": True}),
        ]
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    trouble = {"slow_copies": draw.choice((SLOW_S, 0.1))}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _stopped(plan: Plan, draw: random.Random) -> Plan:
    """An engine stands still, and others are asked for what it has; some have met it just now."""
    stopped, *others = draw.sample([engine.name for engine in plan.engines], len(plan.engines))
    happens = [(300, "serve", serve(stopped, (family, 37))) for family in range(3)]
    how = {"engine": stopped, "seconds": draw.choice((5.0, 20.0))}
    happens.append((draw.choice((0, 30)), "stop", how))
    if draw.random() < 0.5:
        anew = {"engine": others[0], "seconds": 0.0}
        happens.insert(3, (300, draw.choice(("kill", "restart")), anew))
    for _ in range(6):
        how = serve(draw.choice(others), (draw.randrange(3), draw.choice((33, 37))))
        happens.append((draw.choice((30, 300)), "serve", how))
    engines = tuple(replace(engine, step_s=0.0, shares=False) for engine in plan.engines)
    trouble = {"met_late": draw.choice((0.0, 1.0))}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0, trouble=trouble)


_HOST_SCENES_OFTEN: Final = 0.3
_HOST_SCENES: Final[tuple[Callable[[Plan, random.Random], Plan], ...]] = (
    _evictions,
    _one_by_one,
    _liars,
    _parts,
    _slow_copies,
    _resets,
    _stopped,
)


def busy(plan: Plan, draw: random.Random) -> Plan:
    """The same with an engine that always computes and has hardly room for two requests, for some
    of the plans whose engines share blocks of full attention; the plan itself for the others.

    What one request has filled is considered for the arena when others have its blocks, and another
    engine is asked for the same prompts later.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _BUSY_OFTEN or not all(
        each.hosts and set(GROUPS[each.family]) == {"full"} for each in plan.engines
    ):
        return plan
    first, other = (each.name for each in plan.engines[:2])
    happens: _Happens = []
    for _ in range(2):
        happens.append((300, "serve", serve(first, (draw.randrange(3), 5), 20)))
        for family in draw.sample(range(3), 3):
            happens.append((draw.choice((3, 10, 30)), "serve", serve(first, (family, 37), 1)))
            happens.append((3, "serve", serve(first, (draw.randrange(3), 5), 20)))
        if draw.random() < 0.3:
            happens.append((draw.choice((3, 10)), "preempt", {"engine": first}))
        for family in range(3):
            happens.append((draw.choice((100, 300)), "serve", serve(other, (family, 37))))
    engines = tuple(
        replace(
            each,
            blocks=blocks_of(each.family, each.block_size, draw.choice((2, 4, 8))),
            slots=max(each.slots, 40 * groups_of(each.family)),
            seqs=max(each.seqs, 4),
            step_s=0.0,
        )
        for each in plan.engines
    )
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble={})


def _served(plan: Plan, draw: random.Random, number: int) -> _Happens:
    """So many requests at any engines, whose prompts begin alike."""
    happens: _Happens = []
    for _ in range(number):
        prompt = draw.randrange(3), draw.choice((13, 20, 33, 37))
        how = serve(draw.choice(plan.engines).name, prompt, draw.choice((1, 6, 20)))
        happens.append((draw.choice((0, 10, 30, 100, 300)), "serve", how))
    return happens


def serve(engine: str, prompt: tuple[int, int], tokens: int = 3) -> dict[str, Any]:
    """How a prompt is sent to an engine, in the plainest way."""
    return {"engine": engine, "prompt": prompt, "tokens": tokens, "priority": 0}


def _lies(plan: Plan, draw: random.Random) -> _Happens:
    how = {"engine": draw.choice(plan.engines).name, "number": draw.randrange(1 << 30)}
    return [(draw.choice((0, 30, 300)), "lie", how)]


def _pair(plan: Plan, draw: random.Random) -> tuple[str, str]:
    """A prefill engine and a decode engine."""
    prefill = draw.choice([each.name for each in plan.engines if each.role != "kv_consumer"])
    others = [each for each in plan.engines if each.role != "kv_producer"]
    return prefill, draw.choice([each.name for each in others if each.name != prefill])


def hand_off(prefill: str, decode: str, prompt: tuple[int, int]) -> dict[str, Any]:
    """How a prompt is handed off, in the plainest way."""
    return {
        "prefill": prefill,
        "decode": decode,
        "prompt": prompt,
        "tokens": 3,
        "times": 1,
        "again": 0,
        "prefills": 1,
        "pause": 0.0,
        "leaves": False,
        "priority": 0,
        "mixed_up": False,
        "rejected": False,
    }


def _events(happens: _Happens) -> tuple[Event, ...]:
    return tuple(Event(what, how, acts, number) for number, (acts, what, how) in enumerate(happens))
