# SPDX-License-Identifier: Apache-2.0
"""A prefill engine on one host, a decode engine on another, and Mooncake over TCP in between.

The hosts are network namespaces: each engine has an address of its own, and the cable between them
can be cut. Everything but the network they could share (kernel, user), they do not find: the
runtime folders are apart, as those of two machines.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_connector.net.keys import write_new_key
from omni_connector.testing import reference
from omni_connector.testing.engines import Engine

from . import netns
from .harness import Case, Pair
from .pool import Member, Pool
from .prompts import new_salt

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or ""),
]

LOAD_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 3.0
# A lease request and the bytes have one deadline each, and one transfer under way ends by its own.
ANSWER_S = 2 * LOAD_TIMEOUT_S + TRANSFER_TIMEOUT_S + 20.0


@pytest.fixture(scope="module")
def cable() -> Iterator[netns.Cable]:
    with netns.two_hosts() as cable:
        yield cable


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "cluster.key"
    write_new_key(path)
    return path


@pytest.fixture(scope="module")
def members(engine_pool: Pool) -> Iterator[dict[str, Member]]:
    """What is left of the engines of earlier tests, by configuration."""
    members: dict[str, Member] = {}
    yield members
    for member in members.values():
        member.engine.stop()


@pytest.fixture
def pair(
    engine_pool: Pool,
    members: dict[str, Member],
    cable: netns.Cable,
    key_file: Path,
) -> Pair:
    """A producer and a consumer on hosts of their own; only what is dead is started anew."""
    hosts = {"hasty-prefill": (cable.left, cable.right), "hasty-decode": (cable.right, cable.left)}
    starting: dict[str, Engine] = {}
    for name, (own, other) in hosts.items():
        member = members.get(name)
        if member is not None and member.engine.alive:
            continue
        # As on another machine: nothing of it is seen from here.
        folder = engine_pool.runtime.with_name(own.name)
        folder.mkdir(mode=0o700, exist_ok=True)
        extra: dict[str, Any] = {
            "key_file": str(key_file),
            "peers": [other.address],
            "mooncake": {"timeout_s": TRANSFER_TIMEOUT_S},
        }
        if name == "hasty-prefill":
            extra["listen"] = f"{own.address}:7777"
        starting[name] = engine_pool.new(
            name,
            connector=extra,
            host=own.name,
            unix_socket=folder / "http",
            environment={"OMNI_CONNECTOR_RUNTIME_DIR": str(folder)},
        )
        starting[name].start()
    for name, engine in starting.items():
        members[name] = engine_pool.adopt(engine)
    return Pair.of(members["hasty-prefill"], members["hasty-decode"])


def test_tokens_are_those_of_one_engine(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case]
) -> None:
    received = pair.received()
    for case in cases.values():
        salt = new_salt()
        params = pair.prefill(case.prompt, salt)
        assert params["remote_host"] == cable.left.address
        assert params["remote_port"] == 7777
        case.check(pair.decode(case.prompt, salt, params))
    assert pair.received() - received == len(cases)
    chosen = {"transport": "mooncake", "reason": "nearer_ones_cannot"}
    assert pair.count(pair.decode_engine, "peers", **chosen) == 1
    assert not pair.failures()
    pair.wait_until_idle()


def test_an_address_that_peers_does_not_list_is_not_asked(
    pair: Pair, cases: dict[str, Case]
) -> None:
    case, salt = cases["two-thousand"], new_salt()
    params = pair.prefill(case.prompt, salt)
    elsewhere = {**params, "remote_host": "10.213.77.9"}
    answer = pair.decode(case.prompt, salt, elsewhere, timeout=ANSWER_S)
    case.check(answer)
    assert pair.count(pair.decode_engine, "failures", kind="disallowed_peer") == 1


def test_a_line_that_is_slow_and_loses(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case]
) -> None:
    received = pair.received()
    case = cases["not-aligned"]
    with cable.worse():
        case.check(pair.hand_off(case.prompt))
    assert pair.received() == received + 1


@pytest.mark.parametrize("when", ["before", "midway"])
def test_the_cable_is_cut(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case], when: str
) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    failures = pair.failures()
    with ThreadPoolExecutor(1) as pool, ExitStack() as troubles:
        if when == "midway":
            asked = answer_slowly(pair, cable, case, salt, params, pool, troubles)
        troubles.enter_context(cable.cut())
        if when == "before":
            asked = pool.submit(pair.decode, case.prompt, salt, params)
        case.check(asked.result(timeout=ANSWER_S))
    assert pair.failures() == failures + 1
    received = pair.received()
    # Whole again, it is used again: at the latest when the old connection was given up.
    deadline = time.monotonic() + 60.0
    while pair.received() == received:
        assert time.monotonic() < deadline
        case.check(pair.hand_off(case.prompt))
    pair.wait_until_idle()


def answer_slowly(
    pair: Pair,
    cable: netns.Cable,
    case: Case,
    salt: str,
    params: dict[str, Any],
    pool: ThreadPoolExecutor,
    troubles: ExitStack,
) -> "Future[reference.Answer]":
    """An answer for which bytes are on their way, over a line that needs 1.7 s for all of them."""
    troubles.enter_context(cable.worse())
    asked = pool.submit(pair.decode, case.prompt, salt, params)
    time.sleep(0.5)
    assert not asked.done()
    return asked


def test_decode_answers_when_prefill_is_killed_while_bytes_move(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case]
) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    failures = pair.failures()
    with ThreadPoolExecutor(1) as pool, ExitStack() as troubles:
        asked = answer_slowly(pair, cable, case, salt, params, pool, troubles)
        pair.prefill_engine.kill()
        case.check(asked.result(timeout=ANSWER_S))
    assert pair.failures() == failures + 1
    pair.wait_until_idle(pair.decode_engine)


def test_the_one_that_takes_its_place_is_read(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["two-thousand"]
    received = pair.received()
    case.check(pair.hand_off(case.prompt))
    assert pair.received() == received + 1


def test_prefill_frees_everything_when_decode_is_killed_while_bytes_move(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case]
) -> None:
    case, salt = cases["two-thousand"], new_salt()
    params = pair.prefill(case.prompt, salt)
    with ThreadPoolExecutor(1) as pool, ExitStack() as troubles:
        asked = answer_slowly(pair, cable, case, salt, params, pool, troubles)
        pair.decode_engine.kill()
        assert asked.exception(timeout=ANSWER_S) is not None
    pair.wait_until_idle(pair.prefill_engine)
    assert pair.prefill(case.prompt, new_salt())["do_remote_prefill"] is True
