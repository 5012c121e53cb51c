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

# A peer that names a file of /dev/shm ends with `USED_SHM`. Which process has made a file there
# cannot be seen afterwards, and other programs make some while a test runs.
USED_SHM = 70

SETUP = (
    f"""
import os, sys

def refuse_shm(event, arguments):
    named = [os.fsdecode(each) for each in arguments if isinstance(each, (str, bytes))]
    shares_memory = event == "import" and "_posixshmem" in named
    if shares_memory or any(name.startswith("/dev/shm/") for name in named):
        print("A peer has called", event, "with", *named, file=sys.stderr, flush=True)
        os._exit({USED_SHM})

sys.addaudithook(refuse_shm)
"""
    + """
import signal, time
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
connector = SharedMemoryConnector(
    folder=Path(sys.argv[1]), object_timeout=60.0, peer_timeout=60.0
)
arena = Arena.create(4, 8192, prefault=True)
"""
)

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


@contextlib.contextmanager
def starting(place: Path) -> Iterator[Callable[[str], Peer]]:
    """Starts peers; whatever became of them, they leave nothing once the folder is swept, and have
    made nothing in /dev/shm."""
    peers: list[Peer] = []

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
    assert USED_SHM not in [peer.process.returncode for peer in peers], "a peer used /dev/shm"
