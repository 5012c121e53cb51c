# SPDX-License-Identifier: Apache-2.0
"""Trainers of a simulation: each gives one engine other weights, well or badly, and maybe the first
ones again.

One element is another than before, as far as the toy's weights have any. Of two engines that are
trained alike, both have the same weights then.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState

from tests import inspection
from tests.simulation.clients import Clients
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.plan import Event, Plan
from tests.simulation.scenes import serve

_OFTEN: Final = 0.12

_ASKED_OFTEN: Final = 0.7

KINDS: Final = ("element", "half", "ranks", "ignored")
"""What a trainer does: an update; an update that is finished only after the engine has gone on; the
same, of one rank at first; an update whose reset fails, or that forgets to reset, which nobody
minds for a while."""


def trained(plan: Plan, draw: random.Random) -> Plan:
    """The same with trainers, for some of the plans; the plan itself for the others.

    Args:
        draw: of this, and of nothing else.
    """
    kinds = {each.what for each in plan.events}
    if draw.random() >= _OFTEN or kinds & {"converse", "update_weights"}:
        return plan
    if any(each.how.get("session") or each.how.get("resumable") for each in plan.events):
        return plan
    events = list(plan.events)
    for _ in range(draw.choice((1, 2, 2, 3))):
        engine = draw.choice([each for each in plan.engines if each.role is not None])
        kind = draw.choice(KINDS if engine.ranks > 1 else ("element", "half", "ignored"))
        how: dict[str, Any] = {
            "engine": engine.name,
            "kind": kind,
            "called": draw.random() < 0.5,
            "resets": draw.random() < 0.7,
            "first": draw.choice(("weights", "reset")),
            "running": draw.random() < 0.5,
            "connector": draw.random() < 0.5,
            "back": draw.random() < 0.5,
        }
        how["called"] |= not how["resets"]  # else nobody could notice
        place = draw.randrange(1, len(events) + 1)
        happens = [Event("train", how, draw.choice((0, 10, 30, 100, 300)), 0)]
        if draw.random() < _ASKED_OFTEN:  # it and then others are asked for the same
            prompt = draw.randrange(3), draw.choice((20, 33, 37))
            asked = [engine, *draw.sample(plan.engines, 2)]
            happens += [
                Event("serve", serve(each.name, prompt), draw.choice((10, 30, 100)), 0)
                for each in asked
            ]
        events[place:place] = happens
    numbered = (replace(each, number=number) for number, each in enumerate(events))
    return replace(plan, events=tuple(numbered))


def training(
    clients: Clients,
    engine: SimulatedEngine,
    kind: str,
    called: bool,
    resets: bool,
    first: str,
    running: bool,
    connector: bool,
    back: bool,
) -> Iterator[float]:
    """What a trainer does to an engine; yields seconds until the next thing.

    Args:
        kind: one of `KINDS`.
        called: whether the engine core is called for each change of weights.
        resets: whether a trainer that ignores what a reset returns tries one.
        first: what comes first, the `weights` or the `reset`.
        running: whether running requests are reset, too.
        connector: whether the connector is told of the reset.
        back: whether the engine gets its first weights again.
    """
    runner, before, draw = engine.runner, engine.runner.weights, clients.world.draw
    # Before the first request nothing else tells engines of other layouts.
    called |= not inspection.has_known_weights(engine.halves[0])
    new, half = before + b"'", before + b"-"

    def change(weights: bytes, of_ranks: dict[int, bytes]) -> None:
        runner.finish()
        clients.called(engine, called)
        runner.weights, runner.of_ranks = weights, of_ranks

    def well(weights: bytes, of_ranks: dict[int, bytes] | None = None) -> Iterator[float]:
        how = change, weights, of_ranks or {}, first, running, connector
        return _updated(clients, engine, *how)

    if kind == "ignored":
        clients.world.tell(f"{engine.name} is trained, and nobody minds its caches")

        def change_now() -> None:
            runner.judged = False  # vLLM goes on with KV of the former weights
            change(new, {})
            if resets:
                engine.scheduler.reset_prefix_cache(False, connector)

        engine.call(change_now)
        yield draw.choice((0.1, 1.0, 3.0))
    elif kind == "half":
        yield from well(half)
        yield draw.choice((0.1, 1.0, 3.0))
    elif kind == "ranks":
        yield from well(before + b"|" + new, {0: before, **dict.fromkeys(range(1, 8), new)})
        yield draw.choice((0.1, 1.0, 3.0))
    yield from well(new)
    if back:
        yield draw.choice((0.1, 1.0, 3.0))
        yield from well(before)


def _updated(
    clients: Clients,
    engine: SimulatedEngine,
    change: Any,
    weights: bytes,
    of_ranks: dict[int, bytes],
    first: str,
    running: bool,
    connector: bool,
) -> Iterator[float]:
    """An engine is paused, reset and given weights, and goes on."""
    clients.world.tell(f"{engine.name} is paused, and gets the weights {weights!r}")

    def pause() -> None:
        clients.abort_all(engine)
        engine.pause(PauseState.PAUSED_NEW)

    engine.call(pause)
    yield 0.01
    while engine.alive and (engine.has_inputs or not engine.idle):
        yield 0.01
    if first == "weights" and engine.alive:
        change(weights, of_ranks)
        yield clients.world.draw.choice((0.0, 0.01))
    while engine.alive and not engine.scheduler.reset_prefix_cache(running, connector):
        yield 0.01
    if engine.alive:
        engine.runner.judged = True
        if first != "weights":
            change(weights, of_ranks)
        engine.pause(PauseState.UNPAUSED)
        clients.world.tell(f"{engine.name} goes on")
    yield 0.0
