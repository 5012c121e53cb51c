# SPDX-License-Identifier: Apache-2.0
"""The same messages through sockets and threads, which must all be there afterwards."""

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import zmq

from omni_connector.errors import OmniError
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import LeaseDeniedError, PendingLease
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import LeaseDenied, LeaseRequest, Refused, decode_reply, encode
from omni_connector.handoff.server import UNHANDLED, ControlServer
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort
from omni_connector.net.zeromq import MAX_MESSAGE_BYTES, make_context, prepare_tcp
from omni_connector.objects.exchange import Read
from omni_connector.objects.mooncake import ObjectServer
from omni_connector.objects.peer import Find, Missing
from omni_connector.runtime.context import PROCESS_CONTEXT
from tests.hostile.control import (
    EPOCH,
    PROMPT,
    SLOTS,
    Asked,
    compatibility,
    handshake_reply,
    requests,
)
from tests.hostile.mutation import distort_msgpack
from tests.hostile.trial import Parser

_WAIT_S: Final = 20.0
_WAIT_MS: Final = int(_WAIT_S * 1000)


@contextmanager
def serving() -> Iterator[Parser]:
    """A serving engine's control channel: frames from a peer's socket."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="omni-", dir="/tmp")))
        inner = stack.enter_context(requests())
        server = ControlServer(
            compatibility=compatibility(),
            handshake_reply=handshake_reply(),
            directory=SlotDirectory(SLOTS, PROCESS_CONTEXT, 10.0),
            clock=time.monotonic,
            pending_timeout=10.0,
            count=lambda name: None,
        )
        channel = ControlChannel(
            compatibility=compatibility(), server=server, listen=folder / "c.sock"
        )
        stack.callback(channel.close)
        context = make_context()
        stack.callback(context.destroy, 0)
        peer = context.socket(zmq.DEALER)
        peer.connect(f"ipc://{folder}/c.sock")
        # Each input is followed by a lease request with a number of its own, which tells when the
        # input was handled.
        numbers = itertools.count(1 << 50)

        def make(rng: random.Random) -> list[bytes]:
            _, frame = inner.make(rng)
            frame = frame[: MAX_MESSAGE_BYTES - 1]
            return [frame] if rng.random() < 0.9 else [frame, b"", frame[:9]]

        def parse(frames: list[bytes]) -> bool | str:
            number = next(numbers)
            peer.send_multipart(frames)
            peer.send(encode(LeaseRequest(number, b"n" * 16, 1, b"d" * 32, "tokens")))
            said: bool | str = "nothing"
            while peer.poll(_WAIT_MS):
                reply = decode_reply(peer.recv())
                if isinstance(reply, LeaseDenied):
                    if reply.sequence == number:
                        return said
                    said = f"denied: {reply.reason}"
                elif isinstance(reply, Refused):
                    assert reply.theirs != UNHANDLED
                    said = "refused"
                else:
                    said = True
            raise AssertionError("who asks after it is not answered")

        def alive() -> None:
            assert channel.alive

        yield Parser("control requests, by socket", make, parse, (), alive)


@contextmanager
def asking() -> Iterator[Parser]:
    """A decode engine's control channel: answers from a peer's socket."""
    asked = Asked()
    last = encode(Refused("model", "a", "b"))
    numbers = itertools.count()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="omni-", dir="/tmp")))
        channel = ControlChannel(compatibility=compatibility())
        stack.callback(channel.close)
        context = make_context()
        stack.callback(context.destroy, 0)

        def parse(frames: list[bytes]) -> bool | str:
            path = folder / f"{next(numbers)}"
            router = context.socket(zmq.ROUTER)
            try:
                router.bind(f"ipc://{path}")
                pending = PendingLease(b"t" * 16, PROMPT, EPOCH, "", time.monotonic() + _WAIT_S)
                channel.request_lease(f"ipc://{path}", pending)
                assert router.poll(_WAIT_MS), "the peer is not asked"
                name, _ = router.recv_multipart()
                for frame in (*frames, last):
                    router.send_multipart([name, frame[: MAX_MESSAGE_BYTES - 1]])
                error = pending.future.exception(_WAIT_S)
            finally:
                router.close(0)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            if error is None:
                return True
            assert isinstance(error, OmniError), repr(error)
            kind = type(error).__name__
            return f"{kind}: other epoch" if isinstance(error, LeaseDeniedError) else kind

        def alive() -> None:
            assert channel.alive

        yield Parser("control answers, by socket", asked.make, parse, (), alive)


@contextmanager
def object_questions() -> Iterator[Parser]:
    """What receivers on other hosts ask for objects."""
    digest = b"d" * 32
    key = ClusterKey(*zmq.curve_keypair())
    server = ObjectServer(
        HostPort("127.0.0.1", 0), key, lambda find: Missing(find.digest), lambda read: None
    )
    context = make_context()
    encoded = msgspec.msgpack.encode
    numbers = itertools.count()
    corpus = [encoded(Find(digest)), encoded(Read(b"e" * 16, digest, 1))]
    try:
        peer = context.socket(zmq.DEALER)
        prepare_tcp(peer, server.address, key)
        peer.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        peer.connect(f"tcp://{server.address}")

        def make(rng: random.Random) -> bytes:
            return distort_msgpack(rng.choice(corpus), rng)[: MAX_MESSAGE_BYTES - 1]

        def parse(raw: bytes) -> bool | str:
            own = next(numbers).to_bytes(32, "big")
            peer.send(raw)
            peer.send(encoded(Find(own)))
            said: bool | str = "nothing"
            while peer.poll(_WAIT_MS):
                if encoded(Missing(own)) == peer.recv():
                    return said
                said = True
            raise AssertionError("who asks after it is not answered")

        def alive() -> None:
            assert server.alive

        yield Parser("questions for objects over TCP", make, parse, (), alive)
    finally:
        context.destroy(0)
        server.close()
