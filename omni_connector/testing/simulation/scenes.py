# SPDX-License-Identifier: Apache-2.0
"""What chance alone brings about too seldom: a part of the seeds is aimed at it.

A scene keeps the engines that the seed drew, and puts events of its own in the place of the
seed's. Each was made for a mutant that no thousand seeds found. All its draws are its own, so that
seeds without a scene are as they were.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from omni_connector.testing.simulation.plan import SLOW_S, Event, Plan, blocks_of

_OFTEN: Final = 0.1
_SLOW_OFTEN: Final = 0.05
_AWHILE_S: Final = 30.0


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


def _restarted_peer(plan: Plan, draw: random.Random) -> Plan:
    """A prefill engine is started anew, and at once hands off another prompt, in the same slots."""
    prefill, decode = _pair(plan, draw)
    length = draw.choice((13, 20, 33, 37))
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for family in draw.sample(range(3), 3):
        happens += [
            (draw.choice((1, 3)), "hand_off", _hand_off(prefill, decode, (family, length))),
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
    happens = [(0, "hand_off", _hand_off(prefill, decode, (0, 5)))]  # so that they know each other
    for number in range(4):
        how = _hand_off(prefill, decode, (number % 3, draw.choice((13, 20))))
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
    """Other prompts take the blocks of requests that ended while their blocks are being copied to
    the shared store, from which another engine reads them."""
    if "state" in plan.engines[0].family or plan.engines[0].family == "all three":
        return _restarted_peer(plan, draw)
    engines = tuple(
        replace(
            engine,
            shares=True,
            caching=True,
            step_s=0.0,
            blocks=engine.blocks if number else blocks_of(engine.family, engine.block_size, 2),
        )
        for number, engine in enumerate(plan.engines)
    )
    first, other = (engine.name for engine in engines[:2])
    length = draw.choice((33, 37))
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for engine, acts, tokens in ((first, (30, 60), 20), (other, (300,), 1)):
        for family in draw.sample(range(3), 3):
            prompt = family, length
            how = {"engine": engine, "prompt": prompt, "tokens": tokens, "priority": 0}
            happens.append((draw.choice(acts), "serve", how))
    trouble = {"slow_copies": draw.choice((0.1, 0.3))}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0002, trouble=trouble)


def _leaving_twin(plan: Plan, draw: random.Random) -> Plan:
    """Of clients with one prompt the first goes away while the KV for all of them is copied."""
    prefill, decode = _pair(plan, draw)
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for family in draw.sample(range(3), 3):
        how = _hand_off(prefill, decode, (family, draw.choice((33, 37))))
        how |= {"leaves": True, "prefills": draw.choice((2, 4))}
        happens.append((draw.choice((0, 30, 100)), "hand_off", how))
    engines = tuple(replace(engine, step_s=0.0) for engine in plan.engines)
    trouble = {"slow_copies": SLOW_S}
    return replace(plan, engines=engines, events=_events(happens), pace=0.0, trouble=trouble)


_SCENES: Final[tuple[Callable[[Plan, random.Random], Plan], ...]] = (
    _restarted_peer,
    _late_lease,
    _slow_saves,
    _leaving_twin,
)


def _pair(plan: Plan, draw: random.Random) -> tuple[str, str]:
    """A prefill engine and a decode engine."""
    prefill = draw.choice([each.name for each in plan.engines if each.role != "kv_consumer"])
    others = [each for each in plan.engines if each.role != "kv_producer"]
    return prefill, draw.choice([each.name for each in others if each.name != prefill])


def _hand_off(prefill: str, decode: str, prompt: tuple[int, int]) -> dict[str, Any]:
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


def _events(happens: list[tuple[int, str, dict[str, Any]]]) -> tuple[Event, ...]:
    return tuple(Event(what, how, acts, number) for number, (acts, what, how) in enumerate(happens))
