# SPDX-License-Identifier: Apache-2.0
"""Which hand-offs an engine takes part in, by its configuration and by order."""

from types import SimpleNamespace

import pytest

from omni_connector.handoff.serving import ServingState, roles_of
from omni_connector.net.orders import NO_ORDERS, Orders, Role, Service
from omni_connector.prefix.hints import Hints
from omni_connector.requests.state import Requests
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def both(clock: FakeClock, requests: Requests) -> ServingState:
    return ServingState(roles_of("kv_both", handoff=True), EngineContext(clock), requests)


def test_the_configuration_says_which_roles_there_are() -> None:
    assert roles_of("kv_both", handoff=True) == ("both", "prefill", "decode")
    assert roles_of("kv_producer", handoff=True) == ("prefill",)
    assert roles_of("kv_consumer", handoff=True) == ("decode",)
    assert roles_of("kv_both", handoff=False) == ()


@pytest.mark.parametrize(
    ("role", "offers", "fetches"),
    [("both", None, None), ("prefill", None, "prefill_role"), ("decode", "decode_role", None)],
)
def test_a_role_says_what_is_refused(
    both: ServingState, role: Role, offers: str | None, fetches: str | None
) -> None:
    assert not both.follow(Orders(role=role))
    assert (both.offer_refusal(), both.fetch_refusal()) == (offers, fetches)
    assert not both.follow(NO_ORDERS)
    assert (both.offer_refusal(), both.fetch_refusal()) == (None, None)


@pytest.mark.parametrize(
    ("kv_role", "order"),
    [("kv_producer", "decode"), ("kv_producer", "both"), ("kv_consumer", "prefill")],
)
def test_a_role_that_the_configuration_lacks_is_refused_once(
    kv_role: str, order: Role, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    serving = ServingState(roles_of(kv_role, handoff=True), EngineContext(clock), Requests())
    before = serving.role
    assert serving.follow(Orders(role=order))
    assert not serving.follow(Orders(role=order))
    assert not serving.follow(Orders(drain=True, role=order))
    assert serving.role == before
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [
        f"An order to this engine is not obeyed: role {order}: its configuration allows {before}"
    ]


def test_an_engine_without_hand_offs_has_no_role_and_can_drain(clock: FakeClock) -> None:
    serving = ServingState((), EngineContext(clock), Requests())
    assert serving.follow(Orders(drain=True, role="both"))
    assert serving.role is None
    assert serving.phase == "drained"


def test_an_order_that_is_refused_changes_nothing(both: ServingState) -> None:
    both.follow(Orders(drain=True, role="decode"))
    assert both.follow(Orders(drain=None, role=None, refused=("a", "b")))
    assert (both.draining, both.role) == (True, "decode")
    assert not both.follow(Orders(drain=False, role=None, refused=("a",)))
    assert (both.draining, both.role) == (False, "decode")


def test_it_is_drained_when_nothing_is_left(both: ServingState, requests: Requests) -> None:
    held = [True]
    both.busy = lambda: held[0]
    requests.arrive(SimpleNamespace(request_id="one"), Hints())
    assert both.service() == Service("serving", "both", ("both", "prefill", "decode"), 1, 1)
    both.follow(Orders(drain=True))
    assert both.phase == "draining"
    assert both.offer_refusal() == "draining"
    assert both.fetch_refusal() is None  # else finished prefills would be lost
    held[0] = False
    assert both.phase == "draining"
    requests.end("one")
    assert both.phase == "drained"
    requests.arrive(SimpleNamespace(request_id="two"), Hints())
    assert both.phase == "draining"
    both.follow(NO_ORDERS)
    assert both.phase == "serving"
    assert both.offer_refusal() is None


def test_who_is_shut_down_stays_for_what_is_held_and_no_longer(
    both: ServingState, clock: FakeClock
) -> None:
    held = [True]
    both.busy = lambda: held[0]
    assert not both.stays()
    both.leave(60.0)
    assert both.stays()
    assert both.offer_refusal() == "draining"
    held[0] = False
    assert not both.stays()
    held[0] = True
    clock.advance(57.9)
    assert both.stays()
    both.leave(60.0)  # a second signal gives it no more time
    clock.advance(0.1)
    assert not both.stays()


def test_without_a_time_out_nobody_stays(both: ServingState) -> None:
    both.busy = lambda: True
    both.leave(0.0)
    assert not both.draining
    assert not both.stays()


def test_a_short_time_out_leaves_time_to_end(both: ServingState, clock: FakeClock) -> None:
    both.busy = lambda: True
    both.leave(2.0)
    clock.advance(1.4)
    assert both.stays()
    clock.advance(0.2)
    assert not both.stays()
