# SPDX-License-Identifier: Apache-2.0
"""How the engines of a simulation get other weights."""

from collections.abc import Iterator
from typing import Final

from vllm.v1.core.sched.interface import PauseState

from tests.simulation.clients import Clients
from tests.simulation.engines.engine import SimulatedEngine

_SETTLE_S: Final = 1.0


def updating(
    clients: Clients,
    mode: str,
    running: bool,
    connector: bool,
    first: str,
    sleep: bool,
    hasty: float,
    only: str | None = None,
) -> Iterator[float]:
    """What an operator does to all engines; yields seconds until the next thing.

    Args:
        mode: of vLLM's pause: `abort`, `wait` or `keep`.
        running: whether running requests are reset too.
        connector: whether the connector is told of the reset.
        first: what comes first, the `weights` or the `reset`.
        sleep: whether the engines sleep meanwhile.
        hasty: how often clients send their decode requests between two engines' resets.
        only: the engine that gets other weights; None: all of them.
    """
    world = clients.world
    # From 0.32 on a pause ends requests whose KV is being loaded (`prefix_replay_group_ids` came
    # with that). Before, they keep their blocks, and no cache can be reset until the engine goes
    # on.
    if mode == "wait" and not all(
        hasattr(each.scheduler, "prefix_replay_group_ids") for each in clients.engines.values()
    ):
        mode = "abort"
    state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
    if sleep:
        running = connector = True
    if mode == "keep":
        running, first = True, "reset"
    world.tell(
        f"new weights come: {only or 'engines'} paused ({mode}), caches reset "
        f"(running: {running}, connector: {connector}, {first} first{', asleep' * sleep})"
    )
    everybody = [each for each in clients.engines.values() if only in (None, each.name)]
    world.draw.shuffle(everybody)
    paused: set[SimulatedEngine] = set()
    for engine in everybody:
        _pause(clients, engine, mode, state, paused)
    while not all((e in paused and e.idle) or not e.alive for e in everybody):
        yield 0.01
    number = clients.new_weights()
    for engine in everybody:
        if first == "weights":
            engine.runner.weights = clients.weights
            yield world.draw.choice((0.0, 0.01))
        while engine.alive and not _reset(engine, running, connector):
            if mode == "keep":  # some requests wait for KV from elsewhere
                engine.pause(PauseState.UNPAUSED)
                yield 0.1
                engine.pause(state)
            while not engine.idle and engine.alive:
                yield 0.01
            yield 0.01
        world.tell(f"{engine.name} is reset")
        if sleep and engine.alive:
            engine.runner.spoil(list(range(engine.shape.blocks + 1)), number)
        if world.draw.random() < hasty:
            clients.hasten()
        yield world.draw.choice((0.0, 0.01, 0.5))
        engine.runner.weights = clients.weights
    yield _SETTLE_S
    for engine in everybody:
        engine.pause(PauseState.UNPAUSED)
    world.tell("engines go on")


def _pause(
    clients: Clients,
    engine: SimulatedEngine,
    mode: str,
    state: PauseState,
    paused: set[SimulatedEngine],
) -> None:
    def pause() -> None:
        if mode == "abort":
            clients.abort_all(engine)
        engine.pause(state)
        paused.add(engine)

    engine.call(pause)


def _reset(engine: SimulatedEngine, running: bool, connector: bool) -> bool:
    try:
        return bool(engine.scheduler.reset_prefix_cache(running, connector))
    except RuntimeError as error:
        if "running requests waiting for remote KV" not in str(error):
            raise
        return False
