# SPDX-License-Identifier: Apache-2.0
"""What clients of a simulation ask of the prefix cache: hints and salts."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.simulation.plan import SLOW_S, Event, Plan, blocks_of, groups_of


@dataclass(frozen=True)
class Wish:
    """A hint of a request.

    Attributes:
        said: what stands under `omni` in its params.
        keeps: whether its blocks may be kept.
        pin_s: seconds for which they are pinned.
        prefetch: whether it only brings blocks.
        session: whose newer requests end the pins of older ones.
        over: whether the session ends with the request.
    """

    said: Any = None
    keeps: bool = True
    pin_s: float = 0.0
    prefetch: bool = False
    session: str = ""
    over: bool = False


NO_WISH: Final = Wish()

_PIN_S: Final = (0.05, 0.5, 3.0, 30.0, 600.0)

_NONSENSE: Final[tuple[Wish, ...]] = (
    Wish(7),
    Wish([]),
    Wish({"cache": "never"}),
    Wish({"pin_s": -1}),
    Wish({"pin_s": "long", "prefetch": "yes"}),
    Wish({"lasting": True, 5: None}),
    Wish({str(number): number for number in range(40)}),
    Wish({"cache": "no", "pin_s": 600.0}, keeps=False),
    Wish({"cache": "no", "prefetch": True}, keeps=False),
    Wish({"pin_s": 600.0, "cache": 0}, pin_s=600.0),
    Wish({"pin_s": 600.0, "over": True}),
    Wish({"pin_prefix": {"token_ids": [0], "ttl_seconds": 600.0}}),
)

_ASKED: Final = (
    Wish({"pin_s": 600.0}, pin_s=600.0),
    Wish({"prefetch": True}, prefetch=True),
)

_OFTEN: Final = 0.5
_OVERLONG_OFTEN: Final = 0.1
_SALTED_OFTEN: Final = 0.4
_SESSIONS_OFTEN: Final = 0.2


def hinted(plan: Plan, draw: random.Random) -> Plan:
    """The same with hints in a part of the requests, for about half of the plans whose engines
    share prefixes and whose scene has none of its own; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    first = plan.engines[0]
    own = any("wish" in event.how for event in plan.events)
    if own or not (first.hosts or first.shares) or draw.random() >= _OFTEN:
        return plan
    salts = (None, "a", "b") if draw.random() < _SALTED_OFTEN else (None,)
    often = draw.choice((0.3, 0.7, 1.0))
    if draw.random() < _SESSIONS_OFTEN:
        plan, salts, often = _of_one_engine(plan), (None,), 1.0
        wish = _of_a_session
    else:
        wish = _wish
    events = tuple(_hinted(event, draw, salts, often, wish) for event in plan.events)
    return replace(plan, events=events, pin_part=draw.choice((4, 4, 2, 1)))


def overlong(plan: Plan, draw: random.Random) -> Plan:
    """The same with an engine that is asked to pin or fetch prompts of which its own cache has more
    blocks than may be copied at once, for some of the plans whose engines share their arenas; the
    plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    if not plan.engines[0].hosts or draw.random() >= _OVERLONG_OFTEN:
        return plan
    engine = draw.choice(plan.engines)
    least = blocks_of(engine.family, engine.block_size, draw.choice((2, 3, 4)))
    groups = groups_of(engine.family)
    few = replace(engine, blocks=least, slots=groups * draw.choice((10, 20, 40)), step_s=0.0)
    events = list(plan.events[:4])
    for family in draw.sample(range(3), 3):
        how = {"engine": engine.name, "tokens": 1, "priority": 0, "salt": None}
        prompt = family, draw.choice((33, 37))
        for acts, wish in (
            (draw.choice((0, 100)), Wish({"cache": "no"}, keeps=False)),
            (draw.choice((30, 300)), draw.choice(_ASKED)),
        ):
            served = how | {"prompt": prompt, "wish": wish}
            events.append(Event("serve", served, acts, len(events)))
        if draw.random() < 0.3:
            reset = {"engine": engine.name, "connector": True}
            events.append(Event("reset", reset, draw.choice((3, 10, 30)), len(events)))
        if draw.random() < 0.3:
            events.append(Event("abort", {"number": 0}, draw.choice((3, 10, 30)), len(events)))
    return replace(
        plan,
        engines=tuple(few if each is engine else each for each in plan.engines),
        events=tuple(replace(each, number=number) for number, each in enumerate(events)),
        trouble=plan.trouble | {"slow_copies": draw.choice((SLOW_S, 0.1))},
    )


def _of_one_engine(plan: Plan) -> Plan:
    """The same with all requests that are served at the first engine."""
    first = plan.engines[0].name
    events = tuple(
        replace(each, how=each.how | {"engine": first}) if each.what == "serve" else each
        for each in plan.events
    )
    return replace(plan, events=events)


def _of_a_session(draw: random.Random) -> Wish:
    """A request of one of two sessions, or one that pins by itself."""
    session = draw.choice(("a", "a", "b", ""))
    if session and draw.random() < 0.2:
        return Wish({"session": session, "over": True}, keeps=False, session=session, over=True)
    said: dict[str, Any] = {"session": session} if session else {}
    seconds = draw.choice((0.0, 600.0, 600.0))
    return Wish({**said, "pin_s": seconds}, pin_s=seconds, session=session)


def _hinted(
    event: Event,
    draw: random.Random,
    salts: tuple[str | None, ...],
    often: float,
    wished: Callable[[random.Random], Wish],
) -> Event:
    if event.what not in ("serve", "hand_off"):
        return event
    wish = wished(draw) if draw.random() < often else NO_WISH
    return replace(event, how=event.how | {"wish": wish, "salt": draw.choice(salts)})


def _wish(draw: random.Random) -> Wish:
    kind = draw.choice(("no", "normal", "pin", "pin", "pin", "prefetch", "nonsense", "session"))
    if kind == "no":
        return Wish({"cache": "no"}, keeps=False)
    if kind == "normal":
        return Wish({"cache": kind})
    if kind == "nonsense":
        return draw.choice(_NONSENSE)
    said: dict[str, Any] = {}
    session = draw.choice(("a", "b")) if kind == "session" or draw.random() < 0.4 else ""
    if session:
        said["session"] = session
    if kind == "session" and draw.random() < 0.5:
        return Wish({**said, "over": True}, keeps=False, session=session, over=True)
    if draw.random() < 0.3:
        said["cache"] = draw.choice(("high", "normal"))  # of which the first is none any more
    seconds = draw.choice(_PIN_S) if kind == "pin" or draw.random() < 0.3 else 0.0
    if seconds:
        said["pin_s"] = seconds
    if kind == "prefetch":
        said["prefetch"] = True
    return Wish(said, pin_s=seconds, prefetch=kind == "prefetch", session=session)
