# SPDX-License-Identifier: Apache-2.0
"""What the demo starts, it stops, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector.cli import engines as module
from omni_connector.cli.engines import Router, make_engines, running
from omni_connector.testing.engines import Engine, EngineError
from tests.patience import wait_until

# Stands in for an engine or the router: a child that itself has one, and obeys no signal.
STUBBORN = "import signal, subprocess, sys, time; "
STUBBORN += "[signal.signal(number, signal.SIG_IGN) for number in (2, 15)]; "
STUBBORN += "subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"


class Sleeper(Engine):
    """An engine that is ready at once and never goes by itself."""

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"

    def wait_ready(self, timeout: float = 0.0) -> None:
        assert self.alive


class SleepingRouter(Router):
    """A router that is ready at once."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", STUBBORN]

    def wait_ready(self, timeout: float) -> None:
        assert self.process is not None


def _wait_for_end(leader: int) -> None:
    def is_gone() -> bool:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Router", SleepingRouter)
    monkeypatch.setattr(module, "_STOP_S", 0.1)


def _sleepers(folder: Path) -> tuple[Sleeper, Sleeper]:
    return Sleeper(folder, folder / "p.log"), Sleeper(folder, folder / "d.log")


def test_everything_is_stopped_after_use(tmp_path: Path) -> None:
    with running(*_sleepers(tmp_path), tmp_path) as up:
        processes = [up.prefill.process, up.decode.process, up.router.process]
    for process in processes:
        assert process is not None
        _wait_for_end(process.pid)


def test_everything_is_stopped_after_an_error(tmp_path: Path) -> None:
    prefill, decode = _sleepers(tmp_path)
    with pytest.raises(KeyboardInterrupt), running(prefill, decode, tmp_path):
        raise KeyboardInterrupt
    for engine in (prefill, decode):
        assert engine.process is not None
        _wait_for_end(engine.process.pid)


def test_an_engine_that_does_not_start_takes_the_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Sleeper, timeout: float = 0.0) -> None:
        raise EngineError("died")

    monkeypatch.setattr(Sleeper, "wait_ready", die)
    prefill, decode = _sleepers(tmp_path)
    with pytest.raises(EngineError), running(prefill, decode, tmp_path):
        pytest.fail("it is not running")
    for engine in (prefill, decode):
        assert engine.process is not None
        _wait_for_end(engine.process.pid)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_stops_everything_first(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[i]) for i in (0, 2)]!r}\n"
        "import signal, time, test_engines as t\nfrom pathlib import Path\n"
        # What runs in the background of a shell inherits that it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "t.module.Router, t.module._STOP_S = t.SleepingRouter, 0.1\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with t.running(*t._sleepers(folder), folder) as up:\n"
        "    print(*(x.process.pid for x in (up.prefill, up.decode, up.router)), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        leaders = [int(word) for word in child.stdout.readline().split()]
        assert len(leaders) == 3
        child.send_signal(number)
        assert child.wait(timeout=60) == status
    for leader in leaders:
        _wait_for_end(leader)


def test_the_router_is_given_both_engines_and_stays_on_loopback(tmp_path: Path) -> None:
    command = Router(1111, 2222, tmp_path / "r.log").command()
    text = " ".join(command)
    assert "--vllm-pd-disaggregation --kv-connector nixl" in text
    assert "--prefill http://127.0.0.1:1111" in text
    assert "--decode http://127.0.0.1:2222" in text
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--prometheus-host") + 1] == "127.0.0.1"


def test_the_engines_listen_on_loopback_and_share_no_port(tmp_path: Path) -> None:
    prefill, decode = make_engines(tmp_path, tmp_path, {"kv_connector": "X"})
    assert prefill.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert prefill.port != decode.port
    assert prefill.log != decode.log
