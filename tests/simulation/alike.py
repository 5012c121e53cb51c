# SPDX-License-Identifier: Apache-2.0
"""Things of one name that are not the same: versions of an adapter, and requests of one id.

All draws of a function are its own, so that seeds whose plans it leaves alone are as they were.
"""

import random
from dataclasses import replace
from typing import Any, Final

from tests.simulation.inputs import Inputs
from tests.simulation.plan import SLOW_S, Event, Plan, groups_of, has_states
from tests.simulation.scenes import hand_off, serve

_REPLACED_OFTEN: Final = 0.2
_AGAIN_OFTEN: Final = 0.15
_LEAVING_OFTEN: Final = 0.5


def with_replaced_adapters(plan: Plan, draw: random.Random) -> Plan:
    """The same with an adapter that is replaced in place, for some of the plans whose engines share
    their arenas; the plan itself for the others.

    Blocks of the former adapter wait for their copies, while vLLM computes the same prompts anew
    with the other one, in the same blocks and under the same hashes. Then another engine, which has
    the former adapter, is asked for them.

    Args:
        draw: of this, and of nothing else.
    """
    fits = all(
        each.hosts and each.caching and not (each.beside or each.drafter or has_states(each.family))
        for each in plan.engines
    )
    varies = any(event.how.get("inputs") for event in plan.events)
    if draw.random() >= _REPLACED_OFTEN or varies or not fits:
        return plan
    first, other = (each.name for each in plan.engines[:2])
    happens: list[tuple[int, str, dict[str, Any]]] = []
    length = draw.choice((33, 37))
    for number, family in enumerate(draw.sample(range(3), 3), 1):
        adapted: dict[str, Any] = {"inputs": Inputs(adapter=number)}
        # The short ones change which blocks the long ones get.
        lengths = [draw.choice((length, length, 5, 20)) for _ in range(12)]
        prompts = tuple((family, each) for each in lengths)
        how = {"engine": first, "number": number, "prompts": prompts}
        happens += [
            (300, "serve", serve(first, (family, length), 1) | adapted),
            (draw.choice((1, 3, 10)), "replace_adapter", how),
            (300, "serve", serve(other, (family, length)) | adapted),
        ]
    engines = tuple(
        replace(
            each,
            block_size=16,
            # Hardly more than one request needs.
            blocks=groups_of(each.family) * 3 + draw.choice((1, 1, 2)),
            step_tokens=max(each.step_tokens, 16),
            long_prefill=0,
            slots=40 * groups_of(each.family),  # by which all blocks are admitted
            step_s=0.0,
        )
        for each in plan.engines
    )
    events = tuple(Event(what, how, acts, i) for i, (acts, what, how) in enumerate(happens))
    trouble = {"slow_copies": draw.choice((0.1, 0.3))}
    return replace(plan, engines=engines, events=events, pace=0.0002, trouble=trouble)


def with_used_ids(plan: Plan, draw: random.Random) -> Plan:
    """The same with requests that have the ids of others which have just ended, for some of the
    plans without hints and sessions; the plan itself for the others. In some of them, clients leave
    while the KV of their prompts is copied.

    Args:
        draw: of this, and of nothing else.
    """
    plain = not any(
        event.what == "converse" or event.how.get("session") or "wish" in event.how
        for event in plan.events
    )
    if draw.random() >= _AGAIN_OFTEN or not plain:
        return plan
    varies = any(event.how.get("inputs") for event in plan.events)
    if draw.random() < _LEAVING_OFTEN and not varies:
        plan = _leaving(plan, draw)
    return replace(plan, trouble=plan.trouble | {"ids_again": draw.choice((0.5, 1.0))})


def _leaving(plan: Plan, draw: random.Random) -> Plan:
    """Clients leave while the KV of their prompts is copied, which takes a while, and others send
    other prompts."""
    prefills = [each.name for each in plan.engines if each.role != "kv_consumer"]
    decode = next(each.name for each in plan.engines[::-1] if each.role != "kv_producer")
    prefill = draw.choice([each for each in prefills if each != decode])
    happens: list[tuple[int, str, dict[str, Any]]] = []
    for _ in range(3):
        for family in draw.sample(range(3), 3):
            how = hand_off(prefill, decode, (family, draw.choice((20, 33, 37))))
            how["leaves"] = draw.random() < 0.6
            happens.append((draw.choice((3, 10, 30, 100)), "hand_off", how))
    engines = tuple(replace(each, step_s=0.0) for each in plan.engines)
    events = tuple(Event(what, how, acts, i) for i, (acts, what, how) in enumerate(happens))
    trouble = {"slow_copies": SLOW_S}
    return replace(plan, engines=engines, events=events, pace=0.0002, trouble=trouble)
