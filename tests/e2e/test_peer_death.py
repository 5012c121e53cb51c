# SPDX-License-Identifier: Apache-2.0
"""An engine is killed with SIGKILL before, during or after a hand-off; the other one goes on."""

import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from omni_connector.testing.engines import Engine

from ..stopping import stop_group
from .harness import Case, Pair
from .pool import Member, Pool
from .prompts import new_salt

pytestmark = pytest.mark.e2e

# The decode engine's own deadlines are 5 s for the answer and 5 s for the bytes.
ANSWER_S = 60.0


@dataclass
class Mortals:
    """Engines that are killed; each is started anew when the next test needs it.

    Their runtime folder is their own, so that what is left in it is theirs.
    """

    pool: Pool
    runtime: Path
    members: dict[str, Member]

    def pair(self) -> Pair:
        """Both of them."""
        starting: dict[str, Engine] = {}
        for name in ("hasty-prefill", "hasty-decode"):
            member = self.members.get(name)
            if member is None or not member.engine.alive:
                own = {"OMNI_CONNECTOR_RUNTIME_DIR": str(self.runtime)}
                starting[name] = self.pool.new(name, environment=own)
                starting[name].start()
        for name, engine in starting.items():
            self.members[name] = self.pool.adopt(engine)
        return Pair.of(self.members["hasty-prefill"], self.members["hasty-decode"])


@pytest.fixture(scope="module")
def mortals(engine_pool: Pool) -> Iterator[Mortals]:
    """What is left of the engines of earlier tests."""
    runtime = engine_pool.runtime.with_name("mortals")
    runtime.mkdir(mode=0o700)
    mortals = Mortals(engine_pool, runtime, {})
    yield mortals
    for member in mortals.members.values():
        member.engine.stop()


@pytest.fixture
def runtime(mortals: Mortals) -> Path:
    """The runtime folder of these engines alone."""
    return mortals.runtime


@pytest.fixture
def pair(mortals: Mortals) -> Pair:
    """A pair that computes what cannot be loaded."""
    return mortals.pair()


def sockets(runtime: Path) -> list[Path]:
    """Every socket below the runtime folder."""
    return [path for path in runtime.rglob("*") if path.is_socket()]


def wait_for_no_sockets(runtime: Path, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while left := sockets(runtime):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def test_decode_answers_when_prefill_is_killed(
    pair: Pair, runtime: Path, cases: dict[str, Case]
) -> None:
    before, during, after = (
        cases[name] for name in ("two-thousand", "shares-a-prefix", "not-aligned")
    )
    salts = [new_salt() for _ in range(3)]
    params = [
        pair.prefill(case.prompt, salt)
        for case, salt in zip((before, during, after), salts, strict=True)
    ]
    assert sockets(runtime)
    before.check(pair.decode(before.prompt, salts[0], params[0]))
    failures = pair.failures()
    # Stopped, the prefill engine can be asked and does not answer; then it is gone for good.
    assert pair.prefill_engine.process is not None
    stop_group(pair.prefill_engine.process.pid)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.decode, during.prompt, salts[1], params[1])
        time.sleep(0.5)
        assert not asked.done()
        left = pair.prefill_engine.left_behind()
        pair.prefill_engine.kill()
        # vLLM's own: ours has no name.
        assert not [path for path in left if path.exists()]
        during.check(asked.result(timeout=ANSWER_S))
    answer = pair.decode(after.prompt, salts[2], params[2], timeout=ANSWER_S)
    after.check(answer)
    assert pair.failures() == failures + 2
    pair.wait_until_idle(pair.decode_engine)
    wait_for_no_sockets(runtime)


def test_a_new_prefill_engine_takes_the_place_of_the_dead_one(pair: Pair, case: Case) -> None:
    case.check(pair.hand_off(case.prompt))


@pytest.mark.parametrize("delay", [0.004])
def test_decode_answers_when_prefill_is_killed_while_bytes_move(
    pair: Pair, runtime: Path, cases: dict[str, Case], delay: float
) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.decode, case.prompt, salt, params)
        time.sleep(delay)
        pair.prefill_engine.kill()
        case.check(asked.result(timeout=ANSWER_S))
    pair.wait_until_idle(pair.decode_engine)
    wait_for_no_sockets(runtime)


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


def test_stopped_engines_leave_nothing(pair: Pair, runtime: Path) -> None:
    pair.hand_off(list(range(3, 300)))
    # vLLM kills its engine core a moment after asking it to end, so a socket may stay: the
    # decode engine, which was connected to it, removes it.
    engines = (pair.prefill_engine, pair.decode_engine)
    left = [engine.left_behind() for engine in engines]
    temporary = [{path for path in each if path.parent != Path("/dev/shm")} for each in left]
    assert all(temporary), "vLLM's sockets lie elsewhere than in the engine's temporary folder"
    engines[0].stop()
    wait_for_no_sockets(runtime)
    engines[1].stop()
    assert not sockets(runtime)
    assert not [path for path in chain(*left) if path.exists()]
