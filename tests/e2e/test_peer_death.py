# SPDX-License-Identifier: Apache-2.0
"""An engine is killed with SIGKILL before, during or after a hand-off; the other one goes on."""

import http.client
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from omni_connector.testing.engines import Engine
from tests import soak

from ..stopping import stop_group
from .harness import Case, Pair
from .pool import Member, Pool
from .prompts import new_salt

pytestmark = pytest.mark.e2e

# The decode engine's own deadlines are 5 s for the answer and 5 s for the bytes.
ANSWER_S = 60.0
# Engines look every 10 s for what dead ones have left.
SWEPT_S = 60.0


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


def listener(path: Path) -> int | None:
    """The process that listens at a Unix socket of whatever type; None where nobody does."""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(ANSWER_S)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                return None
            except OSError:  # it is of the other type
                continue
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return int(struct.unpack("3i", credentials)[0])
    raise AssertionError(f"{path} is a socket of another type")


def files_of(engine: Engine, runtime: Path) -> set[str]:
    """The files in the runtime folder that an engine lives with: sockets at which it listens, and
    others that it holds open."""
    processes = list(engine.processes())
    pids = {int(process.name) for process in processes}
    opened = set()
    for fd in chain.from_iterable((process / "fd").iterdir() for process in processes):
        try:
            opened.add(os.readlink(fd))
        except FileNotFoundError:  # closed meanwhile
            continue
    paths = {name: runtime / name for name in soak.files(runtime)}
    return {
        name
        for name, path in paths.items()
        if (listener(path) in pids if path.is_socket() else str(path) in opened)
    }


def has_all(engine: Engine, runtime: Path) -> bool:
    """Whether an engine has files of each kind: sockets, and its status."""
    suffixes = {Path(name).suffix for name in files_of(engine, runtime)}
    return suffixes >= {".sock", ".status"}


def wait_for_no_files_but_of(engine: Engine, runtime: Path) -> None:
    """Wait until nothing is left of any other engine, and look whether all is left of this one."""
    own = files_of(engine, runtime)
    assert any(name.endswith(".sock") for name in own), "its worker answers at a socket"
    deadline = time.monotonic() + SWEPT_S
    while left := soak.files(runtime) - files_of(engine, runtime):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)
    # It writes its status anew all the time.
    assert {name for name in own if name.endswith(".sock")} <= files_of(engine, runtime)


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
    soak.until(lambda: has_all(pair.prefill_engine, runtime), SWEPT_S, "no sockets and no status")
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
    wait_for_no_files_but_of(pair.decode_engine, runtime)


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
    wait_for_no_files_but_of(pair.decode_engine, runtime)


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
    # vLLM kills its engine core a moment after asking it to end, so its files may stay: a living
    # engine removes them, and after the last one the next to be started.
    engines = (pair.prefill_engine, pair.decode_engine)
    left = [engine.left_behind() for engine in engines]
    temporary = [{path for path in each if path.parent != Path("/dev/shm")} for each in left]
    assert all(temporary), "vLLM's sockets lie elsewhere than in the engine's temporary folder"
    for engine in engines:
        soak.until(lambda engine=engine: has_all(engine, runtime), SWEPT_S, "no socket, no status")
    engines[0].stop()
    wait_for_no_files_but_of(engines[1], runtime)
    engines[1].stop()
    soak.sweep(runtime)
    assert not soak.files(runtime)
    assert not [path for path in chain(*left) if path.exists()]
