# SPDX-License-Identifier: Apache-2.0
"""Processes forked where torch is imported already, which takes most of a short process's life."""

import contextlib
import multiprocessing
import os
import runpy
import sys
import threading
from multiprocessing.reduction import DupFd
from typing import IO, Any

_STDIN, _STDOUT, _STDERR = range(3)

# A server that has no thread and no socket of ours: each process begins as a fresh one does.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch", "tests.stage.shared"])


class Forked:
    """A module that runs in a process of its own; of `subprocess.Popen`, what the tests need.

    Args:
        module: run as `python -m module` would.
        arguments: of its command line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        theirs, ours = zip(os.pipe(), reversed(os.pipe()), reversed(os.pipe()), strict=True)
        self.stdin: IO[str] = os.fdopen(ours[_STDIN], "w")
        self.stdout: IO[str] = os.fdopen(ours[_STDOUT])
        self.stderr: IO[str] = os.fdopen(ours[_STDERR])
        command = [module, *arguments]
        # Python would import this run's main module again, which is pytest's.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = type(sys)("__main__")
        try:
            self._process = _context.Process(
                target=_run, args=([DupFd(fd) for fd in theirs], command, dict(os.environ))
            )
            self._process.start()
        finally:
            sys.modules["__main__"] = main
            for fd in theirs:
                os.close(fd)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of `Popen`: None while it runs, negative for a signal."""
        return self._process.exitcode

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status.

        Raises:
            TimeoutError: it is still running.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout} s")
        return self.returncode

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Close its stdin; all that it says until it ends."""
        self.stdin.close()
        said: dict[int, str] = {}
        streams = (self.stdout, self.stderr)
        readers = [
            threading.Thread(target=lambda i=i, s=s: said.update({i: s.read()}))
            for i, s in enumerate(streams)
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]

    def close(self) -> None:
        """End it, and close its pipes."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _run(fds: list[Any], command: list[str], environ: dict[str, str]) -> None:
    for number, fd in enumerate(fds):
        given = fd.detach()
        os.dup2(given, number)
        os.close(given)
    # Python's own objects are bound to what the server has there.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environ)
    import torch

    torch.set_num_threads(1)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
