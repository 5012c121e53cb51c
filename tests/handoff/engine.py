# SPDX-License-Identifier: Apache-2.0
"""An engine that serves and one that asks, as far as the control channel goes."""

import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from omni_connector.errors import OmniError
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import Lease, PendingLease
from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.handoff.messages import HandshakeReply
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.keys import ClusterKey
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.runtime.turns import Turn

PROMPT = Prompt(token_ids=(1, 2, 3), num_tokens=3)
LONG = 60.0  # a deadline that only a hang reaches
FAR = 1e6  # the same by a clock that jumps whenever it is read
PEER = Path(__file__).with_name("peer.py")


class Directory(SlotDirectory):
    """Says when a hand-off is closed."""

    def __init__(self) -> None:
        super().__init__(64, PROCESS_CONTEXT, FAR)
        self.closed: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def _close(self, handoff: Handoff) -> None:
        super()._close(handoff)
        self.closed.put(handoff.token)


class Engine:
    """A serving channel, what is behind it, and what it counted."""

    def __init__(
        self,
        path: Path,
        compatibility: CompatibilityKey,
        handshake_reply: HandshakeReply,
        **options: Any,
    ) -> None:
        self.path = path
        self.address = f"ipc://{path}"
        self.handshake_reply = handshake_reply
        self.directory = Directory()
        self.counts: Counter[str] = Counter()
        self.counted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.server = ControlServer(
            compatibility=compatibility,
            handshake_reply=handshake_reply,
            directory=self.directory,
            clock=time.monotonic,
            pending_timeout=FAR,
            count=self.count,
        )
        self.channel = ControlChannel(
            compatibility=compatibility, server=self.server, listen=path, **options
        )

    @property
    def tcp(self) -> str:
        return f"tcp://{self.channel.tcp_address}"

    def count(self, name: str) -> None:
        self.counts[name] += 1
        self.counted.put(name)

    def handoff(self, *, filled: bool = True) -> Handoff:
        handoff = self.directory.open(PROMPT, [[None]])
        assert handoff is not None
        self.directory.commit(handoff)
        if filled:
            self.fill(handoff)
        return handoff

    def fill(self, handoff: Handoff) -> None:
        self.directory.copying(handoff, [(0, 0)])
        self.directory.filled(handoff, [(0, 0)])


class Asker:
    """A channel that asks, and when it found a peer gone."""

    def __init__(self, compatibility: CompatibilityKey, key: ClusterKey | None = None) -> None:
        self.gone = threading.Event()
        self.channel = ControlChannel(
            compatibility=compatibility, key=key, on_peer_gone=self.gone.set
        )

    def request_lease(
        self, engine: Engine, handoff: Handoff, *, timeout: float = FAR
    ) -> "Future[Lease]":
        return ask(
            self.channel, engine.address, handoff.token, engine.handshake_reply.epoch, timeout
        )

    def lease_by_tcp(self, engine: Engine, handoff: Handoff) -> "Future[Lease]":
        return ask(self.channel, engine.tcp, handoff.token, engine.handshake_reply.epoch)


class ByHand:
    """In the place of the channel's thread: makes its turns when it is told."""

    def __init__(self, name: str, turn: Turn, *, end: Callable[[], object], **_: object) -> None:
        self.turn = turn
        self._end = end

    def wake(self) -> None:
        """Nobody sleeps."""

    def join(self, timeout: float) -> None:
        while self.turn() is not None:
            pass
        self._end()

    def is_alive(self) -> bool:
        return True


def ask(
    channel: ControlChannel,
    address: str,
    token: bytes,
    epoch: bytes,
    timeout: float = FAR,
    prompt: Prompt = PROMPT,
) -> "Future[Lease]":
    pending = PendingLease(token, prompt, epoch, "", time.monotonic() + timeout)
    channel.request_lease(address, pending)
    return pending.future


def failure(future: "Future[Lease]") -> BaseException:
    error = future.exception(LONG)
    assert isinstance(error, OmniError)
    return error


def start_peer(path: Path, compatibility: CompatibilityKey) -> "subprocess.Popen[str]":
    """`peer.py`, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(PEER), str(path), msgspec.json.encode(compatibility).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


StartEngine = Callable[..., Engine]
StartAsker = Callable[..., Asker]
