# SPDX-License-Identifier: Apache-2.0
"""Peers over shared memory in processes of their own, which tests kill half way."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from omni_connector.net import runtime
from omni_connector.transports.base import Endpoint

SETUP = """
import os, signal, sys, time
from pathlib import Path
import numpy as np, xxhash, msgspec
from omni_connector.arena.arena import Arena
from omni_connector.net import runtime
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.transports.shm import SharedMemoryTransport

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

def say(text):
    print(text, flush=True)

def publish(slot, generation, content):
    arena.begin_write(slot, generation)
    arena.slots[slot, : len(content)] = np.frombuffer(content, np.uint8)
    arena.publish(slot, generation, b"key", len(content), xxhash.xxh3_64_intdigest(content))

transport = SharedMemoryTransport(folder=Path(sys.argv[1]))
connector = SharedMemoryConnector(folder=Path(sys.argv[1]))
arena = Arena.create(4, 8192, prefault=True)
"""

EXPORT = """
endpoint = transport.export(arena, "peer")
publish(1, 7, b"seven" * 1000)
arena.begin_write(2, 8)
arena.slots[2, :100] = 8
connector.put("0", "1", "key", b"object")
say(msgspec.json.encode(endpoint).decode())
sys.stdin.read()
"""

WAIT_S = 60.0


class Peer:
    """A process that runs a script and answers lines."""

    def __init__(self, place: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SETUP + script, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def endpoint(self) -> Endpoint:
        endpoint = msgspec.json.decode(self.line(), type=Endpoint)
        process = Path("/proc") / str(self.process.pid)
        assert "omni-connector-arena" in (process / "maps").read_text()
        assert "/dev/shm" not in (process / "maps").read_text()
        return endpoint

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)


def leaked(before: set[str]) -> list[str]:
    """New files of /dev/shm that no living process has: what peers that have ended left there.

    Other programs of this user make files there as well, and hold them. Those of Python's
    multiprocessing may be left by any; that a peer uses none of them, `Peer.endpoint` has seen.
    """
    new = set(os.listdir("/dev/shm")) - before
    new = {name for name in new if not name.startswith(("psm_", "sem.mp-"))}
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            held = (process / "maps").read_text(errors="replace")
            held += "\n".join(os.readlink(fd) for fd in (process / "fd").iterdir())
            new = {name for name in new if f"/dev/shm/{name}" not in held}
    with contextlib.suppress(FileNotFoundError):
        return sorted(n for n in new if Path("/dev/shm", n).stat().st_uid == os.geteuid())
    return leaked(before)  # one has gone meanwhile


@contextlib.contextmanager
def starting(place: Path) -> Iterator[Callable[[str], Peer]]:
    """Starts peers; whatever became of them, they leave nothing once the folder is swept."""
    peers: list[Peer] = []
    before = set(os.listdir("/dev/shm"))

    def begin(script: str) -> Peer:
        peers.append(Peer(place, script))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.kill()
        for stream in (peer.process.stdin, peer.process.stdout):
            assert stream is not None
            stream.close()
    runtime.sweep(place)
    assert os.listdir(place) == []
    assert leaked(before) == []
