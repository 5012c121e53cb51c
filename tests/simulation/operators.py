# SPDX-License-Identifier: Apache-2.0
"""What operators of a simulation order: drains, restarts after them, roles, drops and moves."""

import random
from dataclasses import replace
from typing import Any, Final

from omni_connector.net.orders import ROLES
from tests.simulation.plan import Event, Plan
from tests.simulation.scenes import hand_off

_OFTEN: Final = 0.15
_DROPS_OFTEN: Final = 0.3


def operated(plan: Plan, draw: random.Random) -> Plan:
    """The same with orders to its engines, for some of the plans; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _OFTEN:
        return plan
    names = [engine.name for engine in plan.engines if engine.role is not None]
    both = [engine.name for engine in plan.engines if engine.role == "kv_both"]
    # A streaming session is silent as long as its client likes, and only its end ends it.
    sessions = any(each.what == "converse" or each.how.get("session") for each in plan.events)
    kinds = ["order_role"] if sessions else ["drain", "drain", "leave", "leave", "order_role"]
    events = list(plan.events)
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind, engine = draw.choice(kinds), draw.choice(names)
        how: dict[str, Any] = {"engine": engine}
        if kind == "drain":
            how |= {"leaves": draw.random() < 0.5, "seconds": draw.choice((0.0, 1.0, 10.0))}
        elif kind == "leave":
            how |= {"timeout": draw.choice((2.0, 30.0, 300.0)), "seconds": draw.choice((0.0, 5.0))}
        else:
            how |= {"role": draw.choice(ROLES)}
        place = draw.randrange(1, len(events) + 1)
        acts = draw.choice((0, 1, 3, 10, 30, 100, 300))
        events.insert(place, Event(kind, how, acts, 0))
        if how.get("role") == "decode" and engine in both:
            # An engine that does not obey hands this off.
            prompt = draw.randrange(3), draw.choice((13, 20))
            other = draw.choice(both)
            events.append(Event("hand_off", hand_off(engine, other, prompt), 100, 0))
    numbered = (replace(each, number=number) for number, each in enumerate(events))
    return replace(plan, events=tuple(numbered))


def dropped(plan: Plan, draw: random.Random) -> Plan:
    """The same with operators that drop what arenas hold, or move it to another, for some of the
    plans whose engines share and whose requests give no hints; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    hinted = any(event.how.get("wish") for event in plan.events)
    if draw.random() >= _DROPS_OFTEN or hinted or not all(each.hosts for each in plan.engines):
        return plan
    events = list(plan.events)
    names = [each.name for each in plan.engines]
    for _ in range(draw.choice((1, 3, 6))):
        engine, other = draw.sample(names, 2)
        how: dict[str, Any] = {"engine": engine, "number": draw.choice((None, 0, 0, 1, 2))}
        event = Event("drop", how, draw.choice((1, 10, 100)), 0)
        place = draw.randrange(1, len(events) + 1)
        if draw.random() < 0.5:
            how = {"engine": engine, "to": other, "number": draw.choice((0, 0, 1))}
            event = Event("move", how, draw.choice((30, 300)), 0)
            place = draw.randrange(len(events) // 2 + 1, len(events) + 1)
        events.insert(place, event)
    numbered = (replace(each, number=number) for number, each in enumerate(events))
    return replace(plan, events=tuple(numbered))
