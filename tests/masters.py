# SPDX-License-Identifier: Apache-2.0
"""Mooncake masters, and processes that lend them memory."""

import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni_connector.net.peers import HostPort
from omni_connector.testing.ports import free_port

from .stopping import stop

_START_S = 30.0

_LENDER = """
import sys
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
with MooncakeStoreConnector(master=sys.argv[1], segment_gib=float(sys.argv[2])):
    print("lent", flush=True)
    sys.stdin.read()
"""


class Master:
    """A `mooncake_master` on a loopback port of its own; `start` it.

    Args:
        folder: where its log goes.
        host: the loopback address that it listens at.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._host = host
        self._log = folder / "master.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def address(self) -> str:
        return str(HostPort(self._host, self.port))

    def start(self) -> None:
        """Start it, also anew on the same port, and wait until it accepts connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    _program("mooncake_master"),
                    f"--rpc_address={self._host}",
                    f"--rpc_port={self.port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={free_port()}",
                    "--enable_metric_reporting=false",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((self._host, self.port), 1.0).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(self._log.read_text(errors="replace")) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """Let it answer nobody, until `go_on`."""
        assert self._process is not None
        stop(self._process.pid)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_START_S)
            self._process = None

    def _signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(which)


@contextmanager
def lender(master: Master, gib: float = 0.25) -> Iterator["subprocess.Popen[str]"]:
    """A process that lends a master memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LENDER, master.address, str(gib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "lent\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=_START_S)


def _program(name: str) -> str:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found is not None, f"there is no {name} beside {sys.executable}"
    return found
