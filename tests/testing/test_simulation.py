# SPDX-License-Identifier: Apache-2.0
"""The simulation: a seed is the same schedule each time, and it sees what it is there to see."""

import pytest

from omni_connector.testing.simulation.campaign import replayed
from omni_connector.testing.simulation.plan import plan_of
from omni_connector.testing.simulation.run import laboratory, run

pytestmark = pytest.mark.vllm


def test_a_seed_is_the_same_schedule_each_time():
    first, again = (replayed(3, None, 0) for _ in range(2))
    assert first.failure == again.failure
    assert first.plan == again.plan == plan_of(3)


def test_the_plans_of_seeds_differ_and_hold_all_kinds_of_engines_and_events():
    plans = [plan_of(seed) for seed in range(300)]
    assert len({str(plan.events) for plan in plans}) == 300
    shapes = [engine for plan in plans for engine in plan.engines]
    for name in ("family", "ranks", "runner", "overlap", "policy", "shares", "caching"):
        assert len({getattr(shape, name) for shape in shapes}) > 1, name
    assert {plan.mapped for plan in plans} == {True, False}
    assert len({event.what for plan in plans for event in plan.events}) == 13


def test_the_time_that_passes_is_virtual():
    with laboratory():
        assert run(plan_of(1).only({0})) is None
