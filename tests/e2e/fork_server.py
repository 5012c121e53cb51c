# SPDX-License-Identifier: Apache-2.0
"""Starts engines in a few seconds: vLLM is imported once, and each engine is a fork of that.

A vLLM server imports vLLM three times, one process after the other (server, engine core, worker),
which is most of the time that it takes to start. Here a process that has imported it forks the
server, and vLLM's own processes are forked too in place of spawned. From there on all is vLLM's
own. Engines of users are spawned; those of the demo (but for its negative control) and of the other
ways in are as well.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

STACKS = signal.SIGUSR2
"""Has an engine's processes write what their threads are at into its log."""

# A terminal or a time-out sends these to all processes of a test run. The server ignores them: it
# ends after its user, so that it can end what it has started.
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_MESSAGE_BYTES = 1 << 20
_CLONE_NEWNET = 0x40000000
_LOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "omni_connector.testing.no_op",
    "omni_connector.testing.reference",
    "omni_connector.vllm_v1.connector",
    "tests.e2e.patient",
)


class Forked:
    """A process that the fork server has made, with what `Engine` needs of `subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._ended = False

    def poll(self) -> int | None:
        """-1 once it has ended, as nobody here is told its status; None while it runs."""
        try:
            return self.wait(timeout=0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""
        if not self._ended:
            readable, _, _ = select.select([self._pidfd], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired("a forked engine", timeout or 0.0)
            self._ended = True
            os.close(self._pidfd)
        return -1

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


class ForkServer:
    """The process that has imported vLLM.

    It ends with `close`, or with this process however that ends, and takes along what it has
    started and still runs.

    Args:
        log: takes what it writes.
        environment: on top of this process's.
        loads: modules that it imports before it starts anything.
    """

    def __init__(
        self, log: Path, environment: Mapping[str, str], loads: Sequence[str] = _LOADED
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.fork_server", str(theirs.fileno()), *loads],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
            )
        theirs.close()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes],
        *,
        host: str | None = None,
    ) -> Forked:
        """Start `python -m module arguments` in a session of its own.

        Args:
            host: the network namespace that it lives in; None for this process's.
        """
        request = {"argv": [module, *arguments], "environment": dict(environment), "host": host}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [log.fileno()])
        answer, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        if not answer:
            raise RuntimeError(f"the fork server ended with status {self._process.wait(10.0)}")
        return Forked(int(answer), fds[0])

    def send_signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End it, and what it has started. Idempotent."""
        self._socket.close()
        self._process.wait(30.0)


def _serve(connection: socket.socket) -> None:
    started: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap(started))
    for number in _END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        if not message:
            for pid in started.copy():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # it may have no group yet
                    os.killpg(pid, signal.SIGKILL)
            return
        request = json.loads(message)
        # A child is not reaped before its pidfd is open, and no signal to it is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, *_END_SIGNALS])
        pid = os.fork()
        if pid == 0:
            for number in (signal.SIGCHLD, *_END_SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python begins with
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, *_END_SIGNALS])
            connection.close()
            if request["host"] is not None:
                _move_to(request["host"])
            _become(request["argv"], request["environment"], fds[0])
        started.add(pid)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(connection, [str(pid).encode()], [pidfd])
        os.close(pidfd)
        os.close(fds[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, *_END_SIGNALS])


def _reap(started: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            started.discard(pid)


def _move_to(host: str) -> None:
    """Enter a network namespace, as `ip netns exec` does."""
    with open(f"/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")


def _become(argv: list[str], environment: dict[str, str], log: int) -> None:
    """Be `python -m` of what was asked for, to the end of this process."""
    os.setsid()
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is the fork server's
    faulthandler.register(STACKS, file=2)  # of all processes that are forked from here
    sys.argv = argv
    status = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve at the socket that the first argument names, with the modules that the others name."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")
    gc.freeze()
    _serve(connection)


if __name__ == "__main__":
    main()
