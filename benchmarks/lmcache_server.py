# SPDX-License-Identifier: Apache-2.0
"""LMCache's multi-process mode, which stands beside ours where it is installed."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_connector.testing.ports import free_port

NAME = "LMCacheMPConnector"
_START_S = 240.0
_STOP_S = 30.0
# The command `lmcache` of the same Python.
_COMMAND = "from lmcache.cli.main import main; main()"


def installed() -> bool:
    """Whether engines can be started with it."""
    return importlib.util.find_spec("lmcache") is not None


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"LMCache's server does not answer:\n{tail}")


@contextlib.contextmanager
def server(folder: Path, gib: float) -> Iterator[dict[str, Any]]:
    """A server, stopped in the end; gives the `--kv-transfer-config` of its engines.

    KV goes through shared memory, without which LMCache pickles it, and that of answers is kept
    too. Engines started meanwhile inherit that they do not report their use.

    Args:
        folder: for the log.
        gib: most memory that the server keeps KV in.

    Raises:
        RuntimeError: it did not start.
    """
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    port, http_port = free_port(), free_port()
    arguments = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-port": http_port,
        "--l1-size-gb": gib,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "engine_driven",
        "--shm-name": f"omni-{os.getpid()}",
    }
    command = [sys.executable, "-c", _COMMAND, "server"]
    command += [str(word) for pair in arguments.items() for word in pair]
    log = folder / "lmcache-server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _await(http_port, process, log)  # it listens there when all else is ready
        yield {
            "kv_connector": NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.save_decode_cache": True,
            },
        }
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)
