# SPDX-License-Identifier: Apache-2.0
"""Users' own programs with an engine in them, which starts while other tests run."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A program that has been started.

    Attributes:
        log: takes what it prints.
    """

    process: subprocess.Popen[str]
    log: Path

    def finish(self, told: str = "", *, timeout: float) -> str:
        """Tell it something, and wait for its end; what it has printed.

        AssertionError unless it ended well.
        """
        self.process.communicate(told, timeout=timeout)
        printed = self.log.read_text(errors="replace")
        assert self.process.returncode == 0, printed[-8000:]
        return printed


@contextmanager
def running(log: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[Program]:
    """Run a Python program with these arguments, and kill it at the end if it still runs."""
    # vLLM leaves sockets in the temporary folder.
    with tempfile.TemporaryDirectory(prefix="omni-") as temporary, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **environment,
                "TMPDIR": temporary,
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0",
            },
            text=True,
            start_new_session=True,
        )
        try:
            yield Program(process, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
