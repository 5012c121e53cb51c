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

from omni_connector.network.keys import write_new_key
from omni_connector.testing import reference
from omni_connector.testing.engines import Engine

from . import netns
from .harness import (
    ROUNDING,
    Case,
    Pair,
    StartEngine,
    connector_config,
    fill_with_other_bytes,
    new_salt,
)

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or ""),
]

LOAD_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 3.0
# A claim and the bytes have one deadline each, and one transfer under way ends by its own.
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
def engines() -> dict[str, Engine]:
    """What is left of the engines of earlier tests, by role."""
    return {}


@pytest.fixture
def pair(
    start_engine: StartEngine,
    engines: dict[str, Engine],
    cable: netns.Cable,
    key_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """A producer and a consumer on hosts of their own; only what is dead is started anew."""
    hosts = {"kv_producer": (cable.left, cable.right), "kv_consumer": (cable.right, cable.left)}
    fresh = False
    for role, (own, other) in hosts.items():
        engine = engines.get(role)
        if engine is not None and engine.alive:
            continue
        folder = tmp_path_factory.mktemp(role)
        extra: dict[str, Any] = {
            "handoff_ttl_s": 20.0,
            "load_timeout_s": LOAD_TIMEOUT_S,
            "key_file": str(key_file),
            "peers": [other.address],
            "mooncake": {"timeout_s": TRANSFER_TIMEOUT_S},
        }
        if role == "kv_producer":
            extra["listen"] = f"{own.address}:7777"
        engines[role] = start_engine(
            role,
            {**connector_config(role, **extra), "kv_load_failure_policy": "recompute"},
            launcher=own.launcher,
            unix_socket=folder / "http",
            environment={"OMNI_CONNECTOR_RUNTIME_DIR": str(folder)},
        )
        fresh = fresh or role == "kv_consumer"
    for engine in engines.values():
        engine.wait_ready()
    if fresh:
        fill_with_other_bytes(engines["kv_consumer"])
    return Pair(engines["kv_producer"], engines["kv_consumer"], tmp_path_factory.getbasetemp())


def test_tokens_are_those_of_one_engine(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case]
) -> None:
    for case in cases.values():
        salt = new_salt()
        params = pair.prefill(case.prompt, salt)
        assert params["remote_host"] == cable.left.address
        assert params["remote_port"] == 7777
        pair.decode(case.prompt, salt, params).require_same(case.reference)
    assert pair.count(pair.decode_engine, "handoffs_received") == len(cases)
    chosen = {"transport": "mooncake", "reason": "nearer_ones_cannot"}
    assert pair.count(pair.decode_engine, "peers", **chosen) == 1
    assert not pair.count(pair.decode_engine, "failures")
    pair.wait_until_idle()


def test_an_address_that_peers_does_not_list_is_not_asked(
    pair: Pair, cases: dict[str, Case]
) -> None:
    case, salt = cases["two-thousand"], new_salt()
    params = pair.prefill(case.prompt, salt)
    elsewhere = {**params, "remote_host": "10.213.77.9"}
    started = time.monotonic()
    answer = pair.decode(case.prompt, salt, elsewhere, timeout=ANSWER_S)
    assert time.monotonic() - started < LOAD_TIMEOUT_S
    answer.require_same(case.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures", kind="disallowed_peer") == 1


def test_a_line_that_is_slow_and_loses(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case]
) -> None:
    received = pair.count(pair.decode_engine, "handoffs_received")
    case = cases["not-aligned"]
    with cable.worse():
        pair.hand_off(case.prompt).require_same(case.reference)
    assert pair.count(pair.decode_engine, "handoffs_received") == received + 1


@pytest.mark.parametrize("when", ["before", "midway"])
def test_the_cable_is_cut(
    pair: Pair, cable: netns.Cable, cases: dict[str, Case], when: str
) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    failures = pair.count(pair.decode_engine, "failures")
    with ThreadPoolExecutor(1) as pool, ExitStack() as troubles:
        if when == "midway":
            asked = answer_slowly(pair, cable, case, salt, params, pool, troubles)
        troubles.enter_context(cable.cut())
        if when == "before":
            asked = pool.submit(pair.decode, case.prompt, salt, params)
        asked.result(timeout=ANSWER_S).require_same(case.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures") == failures + 1
    received = pair.count(pair.decode_engine, "handoffs_received")
    # Whole again, it is used again: at the latest when the old connection was given up.
    deadline = time.monotonic() + 60.0
    while pair.count(pair.decode_engine, "handoffs_received") == received:
        assert time.monotonic() < deadline
        pair.hand_off(case.prompt).require_same(case.reference, tolerance=ROUNDING)
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
    failures = pair.count(pair.decode_engine, "failures")
    with ThreadPoolExecutor(1) as pool, ExitStack() as troubles:
        asked = answer_slowly(pair, cable, case, salt, params, pool, troubles)
        pair.prefill_engine.kill()
        asked.result(timeout=ANSWER_S).require_same(case.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures") == failures + 1
    pair.wait_until_idle(pair.decode_engine)


def test_the_one_that_takes_its_place_is_read(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["two-thousand"]
    received = pair.count(pair.decode_engine, "handoffs_received")
    pair.hand_off(case.prompt).require_same(case.reference)
    assert pair.count(pair.decode_engine, "handoffs_received") == received + 1


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
