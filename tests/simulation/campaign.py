# SPDX-License-Identifier: Apache-2.0
"""Many seeds, one after the other; and of a schedule that fails, a smaller one that fails alike."""

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from tests.simulation.draws import plan_of
from tests.simulation.plan import Plan
from tests.simulation.run import Failure, laboratory, run, told

_COLLECT_EVERY = 25
_ORDERS = 6
_TRIES = 250

SHRINK_S: Final = 120.0
"""Seconds after which failing schedules are told as they are."""


@dataclass(frozen=True)
class Verdict:
    """How a seed went.

    Attributes:
        plan: what was run, shrunk if it failed.
        order: which of the orders of that plan; 0 is the seed's own.
        failure: None when all held.
        story: what happened, a line each.
    """

    seed: int
    plan: Plan
    order: int
    failure: Failure | None
    story: tuple[str, ...] = ()

    def lines(self, *, story: bool) -> list[str]:
        """The verdict in words."""
        if self.failure is None:
            lines = [f"seed {self.seed}: all holds"]
        else:
            lines = [f"seed {self.seed}: {self.failure.text}"]
        if not story:
            return lines
        numbers = ",".join(str(event.number) for event in self.plan.events)
        lines += [f"  engine  {engine}" for engine in self.plan.engines]
        lines += [f"  event   {event}" for event in self.plan.events]
        if self.plan.trouble:
            lines.append(f"  trouble {self.plan.trouble}")
        lines += [f"  {line}" for line in (self.failure.story if self.failure else self.story)]
        lines.append(
            f"  again: python -m tests.simulation --seeds {self.seed} "
            f"--only {numbers} --order {self.order}"
        )
        return lines


def campaign(seeds: Iterable[int], *, shrink: bool = True) -> Iterator[Verdict]:
    """The verdicts of those seeds that fail.

    Args:
        shrink: whether smaller schedules are looked for, for `SHRINK_S` in all.
    """
    left = SHRINK_S if shrink else 0.0
    with laboratory():
        for number, seed in enumerate(seeds):
            if number % _COLLECT_EVERY == 0:
                gc.collect()
                gc.freeze()  # what is left is cached: no later collection has to look at it
            plan = plan_of(seed)
            failure = run(plan)
            if failure is not None:
                started = time.monotonic()
                verdict = shrunk(seed, failure, left)
                left -= time.monotonic() - started
                yield verdict


def replayed(seed: int, only: set[int] | None, order: int) -> Verdict:
    """One seed, or some of its events, in one of their orders."""
    plan = plan_of(seed)
    if only is not None:
        plan = _ordered(plan.only(only), order)
    with laboratory():
        return Verdict(seed, plan, order, *told(plan))


def shrunk(seed: int, failure: Failure, seconds: float = SHRINK_S) -> Verdict:
    """A schedule with fewer events that fails in the same way, as far as one is found in time."""
    end = time.monotonic() + seconds
    best = Verdict(seed, plan_of(seed), 0, failure)
    tries = 0
    size = max(1, len(best.plan.events) // 2)
    while size and tries < _TRIES:
        smaller = None
        events = [event.number for event in best.plan.events]
        for at in range(0, len(events), size):
            kept = set(events[:at] + events[at + size :])
            if not kept:
                continue
            for order in range(_ORDERS):
                if time.monotonic() >= end:
                    return best
                tries += 1
                plan = _ordered(plan_of(seed).only(kept), order)
                found = run(plan)
                if found is not None and found.kind == failure.kind:
                    smaller = Verdict(seed, plan, order, found)
                    break
            if smaller is not None:
                break
        gc.collect()
        if smaller is None:
            size //= 2
        else:
            best = smaller
            size = min(size, max(1, len(best.plan.events) // 2))
    return best


def _ordered(plan: Plan, order: int) -> Plan:
    return plan if order == 0 else replace(plan, seed=f"{plan.seed}/{order}")
