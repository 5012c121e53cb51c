# SPDX-License-Identifier: Apache-2.0
"""`omni-connector drain` and `role`, over files made by hand."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from omni_connector.cli import orders as module
from omni_connector.cli.main import main
from omni_connector.cli.orders import OrderedEngine
from omni_connector.net.orders import NO_ORDERS, Orders, Service
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE, runtime_dir
from omni_connector.net.status import EngineStatus, StatusFile, Usage, container
from omni_connector.testing import FakeClock

from ..patience import lengthen

ROLES = ("both", "prefill", "decode")
SERVING = Service(role="both", roles=ROLES, requests=1, arrived=1)


class StandIn:
    """An engine that obeys as a real one does, or says always the same.

    Args:
        answers: what it says at first, and what from its first order on, one after the other.
        orderly: whether each of these waits for an order of its own.
    """

    def __init__(
        self,
        name: str,
        answers: list[Service],
        kv_role: str,
        container: str,
        *,
        orderly: bool = False,
    ) -> None:
        self._container = container
        self.file = StatusFile(runtime_dir())
        self._answers = answers
        self._orderly = orderly
        self._name = name
        self._kv_role = kv_role
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self.write(SERVING if not answers else answers[0])

    def begin(self) -> None:
        self._thread.start()

    def write(self, service: Service) -> None:
        self.file.write(msgspec.json.encode(self.says(service)))

    def says(self, service: Service) -> EngineStatus:
        return EngineStatus(
            engine_id=self._name,
            role=self._kv_role,
            model="m",
            container=self._container,
            written=time.time(),
            service=service,
            usage=Usage(8, 2, 0, 0, 1),
        )

    def _live(self) -> None:
        orders = NO_ORDERS
        for number, answer in enumerate(self._answers[1:]):
            if self._orderly or not number:
                orders = self._next_orders(orders)
            self._ended.wait(0.05)
            self.write(answer)

    def _next_orders(self, former: Orders) -> Orders:
        while (orders := self.file.orders()) == former and not self._ended.wait(0.01):
            pass
        return orders

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.file.close()


Make = Callable[..., StandIn]


@pytest.fixture
def make(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place))
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    lengthen(monkeypatch, ["omni_connector.cli.orders.NOTICE_S"])
    made: list[StandIn] = []

    def make(
        name: str,
        *answers: Service,
        kv_role: str = "kv_both",
        container: str = "",
        orderly: bool = False,
    ) -> StandIn:
        made.append(StandIn(name, list(answers), kv_role, container, orderly=orderly))
        made[-1].begin()
        return made[-1]

    yield make
    for each in made:
        each.close()


def service(**changes: Any) -> Service:
    return msgspec.structs.replace(SERVING, **changes)


def test_an_engine_is_found_by_the_beginning_of_its_id(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make("prefill-1", SERVING, service(phase="draining"))
    make("prefill-2")
    assert main(["drain", "prefill-1"]) == 0
    assert capsys.readouterr().out == "prefill-1 drains\n"
    assert one.file.orders() == Orders(drain=True)


def test_a_whole_id_is_meant_although_another_begins_so(make: Make) -> None:
    one = make("prefill", SERVING, service(phase="draining"))
    two = make("prefill-2")
    assert main(["drain", "prefill"]) == 0
    assert (one.file.orders().drain, two.file.orders().drain) == (True, False)


def test_an_ambiguous_beginning_is_an_error(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    made = [make("prefill-1"), make("prefill-2")]
    assert main(["drain", "prefill"]) == 2
    assert "prefill-1, prefill-2" in capsys.readouterr().err
    assert main(["drain"]) == 2
    assert "several engines run here; name one of prefill-1, prefill-2" in capsys.readouterr().err
    assert all(each.file.orders() == NO_ORDERS for each in made)


def test_the_only_engine_needs_no_name(make: Make) -> None:
    make("one", SERVING, service(phase="draining"))
    assert main(["drain"]) == 0


def test_an_engine_that_is_gone_is_an_error(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "one"]) == 1
    assert "No engine of namespace default" in capsys.readouterr().err
    make("one").close()
    make("two")
    assert main(["drain", "one"]) == 1
    told = capsys.readouterr().err
    assert "'one'; it may have ended. There are two" in told
    assert main(["role", "one", "decode"]) == 1


def test_it_waits_until_the_engine_is_empty_and_quiet(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make(
        "one",
        SERVING,
        service(phase="draining"),
        service(phase="draining", arrived=2),
        service(phase="drained", requests=0, arrived=2),
    )
    before = time.monotonic()
    assert main(["drain", "one", "--wait", "30", "--quiet", "0.3"]) == 0
    assert time.monotonic() >= before + 0.3 + 0.1
    assert capsys.readouterr().out == "one is drained\n"


def test_a_drain_that_takes_too_long_says_what_is_left(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make("one", SERVING, service(phase="draining"))
    assert main(["drain", "one", "--wait", "0.3", "--quiet", "0.1"]) == 1
    told = capsys.readouterr().err
    assert "one is not drained after 0.3 s: 1 requests, 1 open hand-offs" in told


def test_a_drained_engine_that_still_gets_requests_is_not_quiet(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make("one", SERVING)
    numbers = itertools.count(2)

    def look(engine: OrderedEngine) -> bool:
        engine.status = one.says(service(phase="drained", requests=0, arrived=next(numbers)))
        return True

    monkeypatch.setattr(OrderedEngine, "look", look)
    assert main(["drain", "one", "--wait", "0.5", "--quiet", "0.3"]) == 1


def test_an_engine_that_ends_meanwhile_is_drained(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make("one", SERVING)
    threading.Timer(0.3, one.close).start()
    assert main(["drain", "one", "--wait", "30", "--quiet", "0.1"]) == 0
    assert capsys.readouterr().out == "one has ended\n"


def test_an_engine_whose_file_cannot_be_read_has_not_ended(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make("one", SERVING)
    clock = FakeClock()

    def sleep(seconds: float) -> None:
        one.file.write(b"?")
        clock.advance(seconds)

    fake = SimpleNamespace(monotonic=clock, sleep=sleep, time=time.time)
    monkeypatch.setattr(module, "time", fake)
    assert main(["drain", "one", "--wait", "0.6", "--quiet", "0.1"]) == 1
    assert "one is not drained after 0.6 s: its status file cannot be read" in (
        capsys.readouterr().err
    )
    assert main(["drain", "one"]) == 1
    assert "was skipped" in capsys.readouterr().err


def test_without_a_name_the_engine_of_the_own_container_drains(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each container of a pod has an engine, and runs this as its preStop hook."""
    other = make("one", container="mnt:[1]")
    make("two", SERVING, service(phase="drained", requests=0), container=container())
    assert main(["drain", "--wait", "30", "--quiet", "0.1"]) == 0
    assert capsys.readouterr().out == "two is drained\n"
    assert other.file.orders() == NO_ORDERS
    assert main(["drain", "o", "--undo"]) == 0  # a name may be of any container


@pytest.mark.parametrize("places", [("mnt:[1]", "mnt:[1]"), ("", ""), None])
def test_without_a_name_engines_that_are_equally_near_are_named(
    make: Make, capsys: pytest.CaptureFixture[str], places: tuple[str, str] | None
) -> None:
    for name, place in zip(("one", "two"), places or 2 * (container(),), strict=True):
        make(name, container=place)
    assert main(["drain"]) == 2
    assert "name one of one, two" in capsys.readouterr().err


def test_the_ranks_of_a_server_drain_together(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    drained = service(phase="drained", requests=0)
    ranks = [make(f"one_dp{rank}", SERVING, drained) for rank in (0, 1)]
    assert main(["drain", "one", "--wait", "30", "--quiet", "0.1"]) == 0
    assert capsys.readouterr().out == "one_dp0 is drained\none_dp1 is drained\n"
    assert [each.file.orders().drain for each in ranks] == [True, True]
    assert main(["role", "one_dp1", "both"]) == 0
    assert capsys.readouterr().out == "one_dp1 has the role both\n"


def test_a_drain_is_taken_back(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = make("one", SERVING)
    assert main(["drain", "one", "--wait", "0.1", "--quiet", "0.1"]) == 1
    assert main(["drain", "one", "--undo"]) == 0
    assert one.file.orders() == NO_ORDERS
    assert capsys.readouterr().out == "one serves\n"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_is_given_and_given_back(make: Make, role: str) -> None:
    one = make("one", SERVING, service(role=role), SERVING, orderly=True)
    assert main(["role", "one", role]) == 0
    assert one.file.orders() == Orders(role=role)
    assert main(["role", "one", "both"]) == 0
    assert one.file.orders() == NO_ORDERS


@pytest.mark.parametrize(("has", "said"), [("decode", "decode"), (None, "none")])
def test_an_engine_is_asked_for_its_role(
    make: Make, has: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make("one", service(role=has))
    assert main(["role", "one"]) == 0
    assert capsys.readouterr().out == f"one has the role {said}\n"
    assert one.file.orders() == Orders()


def test_a_role_that_the_configuration_lacks_is_an_error(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make("one", service(role="prefill", roles=("prefill",)), kv_role="kv_producer")
    assert main(["role", "one", "decode"]) == 2
    assert "its kv_role is kv_producer, which allows only prefill" in capsys.readouterr().err
    two = make("two", service(role=None, roles=()))
    assert main(["role", "two", "both"]) == 2
    assert "hands nothing off" in capsys.readouterr().err
    assert one.file.orders() == two.file.orders() == NO_ORDERS


def test_an_engine_that_does_not_obey_is_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "NOTICE_S", 0.1)
    make("one")
    assert main(["role", "one", "decode"]) == 1
    assert "has not obeyed within 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["role", "one", "kv_both"], ["role"], ["drain", "--wait", "x"]]
)
def test_a_wrong_command_line_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
