# SPDX-License-Identifier: Apache-2.0
"""An engine is killed with SIGKILL before, during or after a hand-off; the other one goes on."""

import http.client
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_connector.testing.engines import Engine

from .harness import ROUNDING, Case, Pair, StartEngine, connector_config, new_salt

pytestmark = pytest.mark.e2e

# The decode engine's own deadlines are 5 s for the answer and 5 s for the bytes.
LOAD_TIMEOUT_S = 5.0
ANSWER_S = 60.0


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    """What is left of the engines of earlier tests, by role."""
    return {}


@pytest.fixture
def pair(start_engine: StartEngine, engines: dict[str, Engine], runtime: Path) -> Pair:
    """A pair that recomputes what cannot be loaded; only what is dead is started anew."""
    extra = {"handoff_ttl_s": 8.0, "load_timeout_s": LOAD_TIMEOUT_S}
    for role in ("kv_producer", "kv_consumer"):
        engine = engines.get(role)
        if engine is None or not engine.alive:
            config = {**connector_config(role, **extra), "kv_load_failure_policy": "recompute"}
            engines[role] = start_engine(role, config)
    for engine in engines.values():
        engine.wait_ready()
    return Pair(engines["kv_producer"], engines["kv_consumer"], runtime)


def sockets(runtime: Path) -> list[Path]:
    """Every socket below the runtime folder."""
    return [path for path in runtime.rglob("*") if path.is_socket()]


def wait_for_no_sockets(runtime: Path, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while left := sockets(runtime):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def test_decode_answers_when_prefill_is_killed(pair: Pair, cases: dict[str, Case]) -> None:
    before, during, after = (
        cases[name] for name in ("two-thousand", "shares-a-prefix", "not-aligned")
    )
    salts = [new_salt() for _ in range(3)]
    shared_memory = set(os.listdir("/dev/shm"))
    params = [
        pair.prefill(case.prompt, salt)
        for case, salt in zip((before, during, after), salts, strict=True)
    ]
    assert sockets(pair.runtime)
    pair.decode(before.prompt, salts[0], params[0]).require_same(before.reference)
    failures = pair.count(pair.decode_engine, "failures")
    # Stopped, the prefill engine can be asked and does not answer; then it is gone for good.
    assert pair.prefill_engine.process is not None
    os.killpg(pair.prefill_engine.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.decode, during.prompt, salts[1], params[1])
        time.sleep(0.5)
        assert not asked.done()
        pair.prefill_engine.kill()
        asked.result(timeout=ANSWER_S).require_same(during.reference, tolerance=ROUNDING)
    answer = pair.decode(after.prompt, salts[2], params[2], timeout=ANSWER_S)
    answer.require_same(after.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures") == failures + 2
    pair.wait_until_idle(pair.decode_engine)
    wait_for_no_sockets(pair.runtime)
    left = {name for name in os.listdir("/dev/shm") if "omni" in name} - shared_memory
    assert not left


def test_a_new_prefill_engine_takes_the_place_of_the_dead_one(pair: Pair, case: Case) -> None:
    pair.hand_off(case.prompt).require_same(case.reference)


@pytest.mark.parametrize("delay", [0.004])
def test_decode_answers_when_prefill_is_killed_while_bytes_move(
    pair: Pair, cases: dict[str, Case], delay: float
) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.decode, case.prompt, salt, params)
        time.sleep(delay)
        pair.prefill_engine.kill()
        asked.result(timeout=ANSWER_S).require_same(case.reference, tolerance=ROUNDING)
    pair.wait_until_idle(pair.decode_engine)
    wait_for_no_sockets(pair.runtime)


@pytest.mark.parametrize("delay", [0.01])
def test_prefill_frees_everything_when_decode_is_killed(
    pair: Pair, cases: dict[str, Case], delay: float
) -> None:
    case, salt = cases["two-thousand"], new_salt()
    params = pair.prefill(case.prompt, salt)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.decode, case.prompt, salt, params, max_tokens=500)
        time.sleep(delay)
        pair.decode_engine.kill()
        with pytest.raises((OSError, http.client.HTTPException)):
            asked.result(timeout=ANSWER_S)
    pair.wait_until_idle(pair.prefill_engine)
    assert pair.prefill(case.prompt, new_salt())["do_remote_prefill"] is True


def test_stopped_engines_leave_nothing(pair: Pair) -> None:
    pair.hand_off(list(range(3, 300)))
    # vLLM kills its engine core a moment after asking it to end, so a socket may stay: the
    # decode engine, which was connected to it, removes it.
    pair.prefill_engine.stop()
    wait_for_no_sockets(pair.runtime)
    pair.decode_engine.stop()
    assert not sockets(pair.runtime)
    assert not [name for name in os.listdir("/dev/shm") if "omni" in name]
