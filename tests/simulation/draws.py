# SPDX-License-Identifier: Apache-2.0
"""What a seed draws: the engines, what goes wrong in general, and what happens, in order."""

import random
from dataclasses import replace
from typing import Any, Final

from tests.simulation.alike import with_replaced_adapters, with_used_ids
from tests.simulation.engines.settings import EngineShape, Policy, Role
from tests.simulation.features import (
    failing_beside,
    featured,
    matched_within_blocks,
    next_turns,
    one_sided,
    piped,
    recut,
    replayed,
    replicated,
    selective,
    spoilt,
    with_copied_heads,
)
from tests.simulation.hints import hinted, overlong
from tests.simulation.inputs import varied
from tests.simulation.operators import dropped, operated
from tests.simulation.plan import Event, Plan, blocks_of, groups_of
from tests.simulation.scenes import (
    busy,
    filed,
    hosted,
    interrupted,
    sized,
    staged,
    with_holes,
)
from tests.simulation.surroundings.keep import kept
from tests.simulation.surroundings.listeners import hung_up_on
from tests.simulation.trainers import trained

_FAMILIES: Final = (
    "full",
    "full",
    "full",
    "window and full",
    "state and full",
    "all three",
    "latent",
    "window",
)

_WITHOUT_NATIVE_OFTEN: Final = 0.25

_ACCELERATED_OFTEN: Final = 0.3
_UNLIKE_ACCELERATED_OFTEN: Final = 0.6
"""Of engines with other layers: they are few, and devices load some pages of their slots."""

_POLICIES: Final[tuple[Policy, ...]] = ("fail", "recompute")


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(f"plan {seed}")
    engines = _engines(draw)
    trouble = _trouble(draw, shares=any(engine.shares for engine in engines))
    plan = Plan(
        seed=f"order {seed}",
        engines=engines,
        events=_events(draw, engines),
        pace=draw.choice((0.0, 0.0002, 0.002, 0.02)),
        mapped=draw.random() < 0.6,
        piece_bytes=draw.choice((1, 1, 1600)),
        trouble=trouble,
    )
    plan = sized(plan, random.Random(f"sizes {seed}"))
    scene = staged(plan, random.Random(f"scene {seed}"))
    if scene is plan:
        scene = hosted(plan, random.Random(f"host {seed}"))
        scene = busy(scene, random.Random(f"busy {seed}"))
    native = random.Random(f"native {seed}").random() >= _WITHOUT_NATIVE_OFTEN
    plan = filed(scene, random.Random(f"files {seed}"))
    plan = with_holes(plan, random.Random(f"holes {seed}"))
    plan = hinted(plan, random.Random(f"hints {seed}"))
    plan = overlong(plan, random.Random(f"overlong {seed}"))
    plan = varied(plan, random.Random(f"inputs {seed}"))
    plan = replicated(plan, random.Random(f"replicated {seed}"))
    plan = with_copied_heads(plan, random.Random(f"heads {seed}"))
    plan = recut(plan, random.Random(f"states {seed}"))
    plan = replace(featured(plan, random.Random(f"feature {seed}")), native=native)
    plan = one_sided(plan, random.Random(f"drafter {seed}"))
    plan = next_turns(plan, random.Random(f"turns {seed}"))
    plan = piped(plan, random.Random(f"stages {seed}"))
    plan = replayed(plan, random.Random(f"replay {seed}"))
    plan = matched_within_blocks(plan, random.Random(f"match {seed}"))
    plan = spoilt(plan, random.Random(f"spoilt {seed}"))
    plan = failing_beside(plan, random.Random(f"beside {seed}"))
    plan = with_replaced_adapters(plan, random.Random(f"adapters {seed}"))
    plan = with_used_ids(plan, random.Random(f"ids {seed}"))
    plan = accelerated(plan, random.Random(f"device {seed}"))
    plan = operated(plan, random.Random(f"operators {seed}"))
    plan = trained(plan, random.Random(f"trainers {seed}"))
    plan = selective(plan, random.Random(f"refuses {seed}"))
    plan = hung_up_on(plan, random.Random(f"listeners {seed}"))
    plan = interrupted(plan, random.Random(f"locks {seed}"))
    plan = kept(plan, random.Random(f"keep {seed}"))
    return dropped(plan, random.Random(f"drops {seed}"))


def accelerated(plan: Plan, draw: random.Random) -> Plan:
    """The same, or on accelerators, which may fail where other things do, too."""
    unlike = len({(each.family, each.stages) for each in plan.engines}) > 1
    if draw.random() >= (_UNLIKE_ACCELERATED_OFTEN if unlike else _ACCELERATED_OFTEN):
        return plan
    if any(engine.beside for engine in plan.engines):  # whose other connector knows of no device
        return plan
    trouble = dict(plan.trouble)
    if trouble and draw.random() < 0.3:
        trouble["failing_memory"] = draw.choice((0.01, 0.1))
    if trouble and draw.random() < 0.2:
        trouble["failing_device"] = draw.choice((0.002, 0.02))
    return replace(
        plan,
        trouble=trouble,
        buffers=draw.choice((1, 1, 2, 5)),
        piece_bytes=draw.choice((1, 1600, 1 << 20)),  # so that a copy takes several buffers
    )


def _engines(draw: random.Random) -> tuple[EngineShape, ...]:
    family = draw.choice(_FAMILIES)
    caching = draw.random() < 0.9
    shares = caching and "state" not in family and family != "all three" and draw.random() < 0.5
    # A page must hold a rank's state.
    block_size = draw.choice((4, 4, 8)) if family not in ("state and full", "all three") else 8
    ranks = draw.choice((1, 1, 1, 2))
    integrity = "full" if draw.random() < 0.8 else "generation"
    roles: tuple[Role, ...] = draw.choice(
        (
            ("kv_producer", "kv_consumer"),
            ("kv_producer", "kv_consumer"),
            ("kv_both", "kv_both"),
            ("kv_producer", "kv_producer", "kv_consumer"),
            ("kv_producer", "kv_consumer", "kv_consumer"),
        )
    )
    engines = []
    for number, role in enumerate(roles):
        letter = {"kv_producer": "P", "kv_consumer": "D", "kv_both": "B"}[role]
        engines.append(
            EngineShape(
                name=f"{letter}{number}",
                role=role,
                family=family,
                # One request always fits, as vLLM makes sure at its start.
                blocks=blocks_of(family, block_size, draw.choice((2, 3, 6, 20))),
                block_size=block_size,
                ranks=ranks,
                step_tokens=draw.choice((8, 16, 32, 128)),
                long_prefill=draw.choice((0, 0, 8)),
                seqs=draw.choice((2, 4, 8)),
                overlap=draw.random() < 0.4,
                priorities=draw.random() < 0.2,
                policy=draw.choice(_POLICIES),
                runner=draw.choice(("v1", "v1", "v2", "v2", "older", "older")),
                caching=caching,
                slots=groups_of(family) * draw.choice((6, 9, 16, 40)),
                shares=shares,
                integrity=integrity,
                zeroes=draw.random() < 0.3,
                step_s=0.7 if draw.random() < 0.1 else 0.0,
            )
        )
    return tuple(engines)


def _trouble(draw: random.Random, *, shares: bool) -> dict[str, float]:
    if draw.random() < 0.5:
        return {}
    often = (0.02, 0.1, 0.3)
    found: dict[str, float] = {}
    for name in ("lost", "doubled", "late", "failing", "raising_saves", "raising_loads"):
        if draw.random() < 0.25:
            found[name] = draw.choice(often)
    if draw.random() < 0.15:
        found["slow"] = draw.choice((0.01, 0.5, 2.0))
    if draw.random() < 0.4:
        found["garbled"] = draw.choice(often)
    if shares:
        if draw.random() < 0.3:
            found["store_absent"] = draw.choice(often)
        if draw.random() < 0.5:
            found["store_slow"] = draw.choice((0.05, 0.5, 3.0))
        if draw.random() < 0.3:
            found["store_forgets"] = draw.choice(often)
    return found


def _events(draw: random.Random, engines: tuple[EngineShape, ...]) -> tuple[Event, ...]:
    names = [engine.name for engine in engines]
    producers = [e.name for e in engines if e.role in ("kv_producer", "kv_both")]
    consumers = [e.name for e in engines if e.role in ("kv_consumer", "kv_both")]
    # A few kinds of events in each plan, so that each has company of its own.
    weights = {
        "hand_off": 10.0,
        "serve": draw.choice((1.0, 6.0)),
        "abort": draw.choice((0.0, 3.0, 6.0)),
        "update_weights": draw.choice((0.0, 0.0, 1.5)),
        "reset": draw.choice((0.0, 0.0, 1.0)),
        "preempt": draw.choice((0.0, 0.0, 2.0)),
        "kill": draw.choice((0.0, 0.0, 0.0, 2.0)),
        "restart": draw.choice((0.0, 0.0, 0.0, 2.0)),
        "stop": draw.choice((0.0, 0.0, 0.0, 1.0)),
        "jump": draw.choice((0.0, 0.0, 1.0)),
        "babble": draw.choice((0.0, 0.0, 1.0)),
        "mislead": draw.choice((0.0, 0.0, 1.0)),
        "spoil": draw.choice((0.0, 0.0, 0.0, 1.0)),
        "end_thread": draw.choice((0.0, 0.0, 0.0, 0.0, 1.0)),
    }
    kinds = [kind for kind, weight in weights.items() if weight]
    likely = [weights[kind] for kind in kinds]
    events = []
    for number in range(draw.choice((3, 6, 10, 16))):
        kind = draw.choices(kinds, likely)[0] if number else "hand_off"
        how: dict[str, Any] = {}
        if kind == "hand_off":
            how = {
                "prefill": draw.choice(producers),
                "decode": draw.choice(consumers),
                "prompt": _prompt(draw),
                "tokens": draw.choice((1, 3, 8)),
                "times": draw.choice((1, 1, 1, 2, 4)),
                "again": draw.choice((0, 0, 0, 1)),
                "prefills": draw.choice((1, 1, 1, 2, 4)),
                "pause": draw.choice((0.0, 0.0, 0.01, 0.5, 2.0)),
                "leaves": False,
                "priority": draw.randrange(3),
                "mixed_up": draw.random() < 0.05,
                "rejected": draw.random() < 0.05,
                "passed_on": draw.random() < 0.05,
            }
            if draw.random() < 0.15:  # while others wait for what is copied, which takes a while
                prompt = draw.randrange(3), draw.choice((33, 37))
                how |= {"leaves": True, "prompt": prompt, "prefills": draw.choice((2, 4))}
        elif kind == "serve":
            how = {
                "engine": draw.choice(names),
                "prompt": _prompt(draw),
                "tokens": draw.choice((1, 6, 20)),
                "priority": draw.randrange(3),
            }
        elif kind == "abort":
            how = {"number": draw.randrange(4)}
        elif kind == "update_weights":
            how = {
                "mode": draw.choice(("abort", "wait", "keep")),
                "running": draw.random() < 0.5,
                "connector": draw.random() < 0.5,
                "first": draw.choice(("reset", "weights")),
                "sleep": draw.random() < 0.3,
                "hasty": 0.3,
            }
        elif kind == "reset":
            how = {"engine": draw.choice(names), "connector": draw.random() < 0.5}
        elif kind == "preempt":
            how = {"engine": draw.choice(producers)}
        elif kind in ("kill", "restart", "stop"):
            how = {"engine": draw.choice(names), "seconds": draw.choice((0.0, 0.5, 5.0, 20.0))}
        elif kind == "jump":
            how = {"seconds": draw.choice((0.3, 1.0, 2.5, 5.0, 15.0, 300.0))}
        elif kind == "babble":
            how = {"engine": draw.choice(producers), "number": draw.randrange(1 << 30)}
        elif kind == "mislead":
            how = {"engine": draw.choice(consumers), "number": draw.randrange(1 << 30)}
        elif kind == "spoil":
            how = {"engine": draw.choice(producers)}
        elif kind == "end_thread":
            thread = draw.choice(("omni-control", "omni-load", "omni-save"))
            how = {"engine": draw.choice(names), "thread": thread}
        acts = draw.choice((0, 0, 1, 3, 10, 30, 100))
        events.append(Event(kind, how, acts, number))
    return tuple(events)


def _prompt(draw: random.Random) -> tuple[int, int]:
    """(family, length): prompts of one family begin alike."""
    return draw.randrange(3), draw.choice((1, 2, 5, 8, 13, 20, 33, 37))
