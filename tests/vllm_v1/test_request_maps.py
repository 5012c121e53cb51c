# SPDX-License-Identifier: Apache-2.0
"""What is known of a request has one home: `Requests`. Nothing else finds it by its id."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from omni_connector.requests.state import Requests
from tests.simulation import check

from .harness import HANDOFF, prompt

pytestmark = pytest.mark.vllm

JOBS = "JobOutcomes._loads_left"
"""Of a worker half, which knows no requests: of each the loads that have not ended."""


def named(thing: Any, ids: set[str], path: str, seen: set[int]) -> Iterator[str]:
    """The containers that are reached from here and hold ids of requests, as keys or entries."""
    manner = check._manner(type(thing))
    if manner is None or id(thing) in seen:
        return
    seen.add(id(thing))
    if manner == "object":
        for name, value in check._attributes(thing):
            if value is not None:
                yield from named(value, ids, f"{type(thing).__name__}.{name}", seen)
        return
    entries = list(thing)
    parts = [part for each in entries for part in (each if isinstance(each, tuple) else (each,))]
    has_ids = any(isinstance(part, str) and part in ids for part in parts)
    if has_ids and not isinstance(thing, Requests | tuple):
        yield path
    for each in thing.values() if isinstance(thing, dict) else entries:
        yield from named(each, ids, f"{path}[]", seen)


@pytest.mark.parametrize("beside", [None, deque(["x"])])
def test_requests_are_found_by_id_in_one_place(engine, beside):
    prefill, decode = (engine("kv_both", extra={"share": True}) for _ in range(2))
    ids: set[str] = {"x"}
    found: set[str] = set()
    for each in (prefill, decode):
        if beside is not None:
            each.half.somewhere_else = beside

        def look(each: Any = each) -> None:
            ids.update(each.scheduler.requests)
            for half in each.halves:
                found.update(named(half, ids, type(half).__name__, set()))

        def step(former: Any = each.step, look: Any = look) -> Any:
            look()
            result = former()
            look()
            return result

        each.step = step
    answer = prefill.generate(prompt(100), params=HANDOFF).params
    decode.generate(prompt(100), 6, params=answer)
    decode.generate(prompt(100), 6)
    assert len(ids) == 4
    assert found - {JOBS} == ({"OmniScheduler.somewhere_else"} if beside is not None else set())
