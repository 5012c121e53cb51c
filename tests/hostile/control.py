# SPDX-License-Identifier: Apache-2.0
"""The control channel in both roles: what asking peers send, and what serving peers answer."""

import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final

import msgspec

from omni_connector.errors import OmniError
from omni_connector.handoff.client import Lease, PeerSession, PendingLease
from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.handoff.messages import (
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    decode_reply,
    encode,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import UNHANDLED, ControlServer, PeerConnection
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.runtime.context import EngineContext
from omni_connector.testing.clock import FakeClock
from omni_connector.transports.base import Endpoint
from tests.hostile.mutation import distort_msgpack
from tests.hostile.trial import Parser
from tests.kv.shapes import compatibility_key, group_shape

SLOTS: Final = 16
TTL_S: Final = 1000.0
EPOCH: Final = b"e" * 16
PROMPT: Final = Prompt(token_ids=tuple(range(100, 140)), num_tokens=40)
# Of each of two groups in blocks of 16 tokens, what 40 tokens need.
BLOCKS: Final = ([0, 1, 2], [0, 1, 2])
# In place of the tokens of two hand-offs, which the directory draws.
_READY: Final = b"<token of ready>"
_FILLING: Final = b"<token, filling>"
ODD: Final = ("layers.1", "layers.3")
_CONNECTIONS: Final = tuple(
    PeerConnection(listener, name) for listener in (0, 1) for name in (b"a", b"b")
)


def shape(**changes: object) -> GroupShape:
    """A cache group of two layers."""
    return group_shape(**({"names": ("layers.0", "layers.2")} | changes))


def compatibility(ranks: int = 1, **changes: object) -> CompatibilityKey:
    """What an engine of two cache groups keeps; the changes are of the first group."""
    window = {"kind": "sliding_window", "attention_type": "window", "window": 64}
    groups = (shape(**changes), shape(layers="odd", names=ODD, **window))
    return compatibility_key(ranks=ranks, groups=groups)


def readers() -> list[CompatibilityKey]:
    """Engines that can read the one above: alike, or with other blocks, ranks or byte orders."""
    halves = ("H1.N16.C64",) * 2
    groups = tuple(msgspec.structs.replace(each, pages=halves) for each in compatibility().groups)
    return [
        compatibility(),
        compatibility(block_size=32, pages=("H2.N32.C64", "H2.N32.C64")),
        compatibility(pages=("N16.H2.C64", "H2.N16.C64")),
        compatibility(block_size=8, pages=("N8.H2.C64", "H2.N8.C64")),
        msgspec.structs.replace(compatibility(2), groups=groups),
    ]


def in_stages() -> CompatibilityKey:
    """What an engine of two pipeline stages keeps, the later one without the second group."""
    key = compatibility()
    later = (
        shape(layers="others", names=("layers.4", "layers.6")),
        msgspec.structs.replace(key.groups[1], layers="", pages=(), names=()),
    )
    return msgspec.structs.replace(key, later_stages=(later,))


def in_other_stages() -> CompatibilityKey:
    """What an engine keeps that has spread the layers of `compatibility` over two stages."""
    first, second = compatibility().groups
    stages = tuple((first.of_layers([at]), second.of_layers([at])) for at in (1, 0))
    return msgspec.structs.replace(compatibility(), groups=stages[0], later_stages=stages[1:])


def endpoint(address: str = "/tmp/o/a-0123456789abcdef01234567.sock") -> Endpoint:
    """Where an arena of `SLOTS` slots may be."""
    return Endpoint(transport="shm", address=address, epoch=EPOCH, n_slots=SLOTS, slot_bytes=8192)


def handshake_reply() -> HandshakeReply:
    """What the engine tells peers of itself."""
    return HandshakeReply(EPOCH, "sha256:16:seed", compatibility(), ((endpoint(),),))


def granted(handoff: Handoff | None = None) -> LeaseGranted:
    """The slots of a hand-off, or of one that could be."""
    groups = (
        tuple(tuple((16 * g + i, 1) for i in blocks) for g, blocks in enumerate(BLOCKS))
        if handoff is None
        else tuple(
            tuple(zip(slots.tolist(), generations.tolist(), strict=True))
            for slots, generations in zip(handoff.slots, handoff.generations, strict=True)
        )
    )
    return LeaseGranted(1, PROMPT.num_tokens, (0, 0), groups, TTL_S)


class _Served:
    """A server with a hand-off that is ready, and one that is still filled."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.directory = SlotDirectory(SLOTS, EngineContext(self.clock), TTL_S)
        self.counted = 0
        self.server = ControlServer(
            compatibility=compatibility(),
            handshake_reply=handshake_reply(),
            directory=self.directory,
            clock=self.clock,
            pending_timeout=TTL_S / 10,
            count=self._count,
        )
        digest = PROMPT.digest("tokens")
        self.corpus = [
            encode(Handshake.of(reader)) for reader in (*readers(), in_stages(), in_other_stages())
        ]
        for token in (_READY, _FILLING, b"t" * 16):
            self.corpus += [
                encode(LeaseRequest(1, token, PROMPT.num_tokens, digest, "tokens")),
                encode(LeaseRequest(2, token, PROMPT.num_tokens, b"d" * 32, "blocks")),
                encode(Release(token)),
                encode(Release(token, 1)),
            ]
        self.handoffs: dict[bytes, Handoff] = {}
        self._offer()

    def make(self, rng: random.Random) -> tuple[int, bytes]:
        frame = rng.choice(self.corpus)
        hostile = distort_msgpack(frame, rng) if rng.random() < 0.95 else frame
        return rng.randrange(len(_CONNECTIONS)), hostile

    def parse(self, sent: tuple[int, bytes]) -> bool | str:
        connection, frame = _CONNECTIONS[sent[0]], sent[1]
        for placeholder, handoff in self.handoffs.items():
            frame = frame.replace(placeholder, handoff.token)
        self.clock.advance(0.01)
        counted = self.counted
        reply = self.server.receive(connection, frame)
        if reply is None:
            if self.counted > counted:
                return "malformed message"
            self._offer()  # it may have been a release
            return True
        assert decode_reply(encode(reply)) == reply
        if isinstance(reply, Refused):
            # What falls into the server's last net got through all the others.
            assert reply.theirs != UNHANDLED
            return f"refused for its {reply.field.split(' ')[0]}"
        return f"denied: {reply.reason}" if isinstance(reply, LeaseDenied) else True

    def alive(self) -> None:
        self.clock.advance(TTL_S / 5)
        for _, reply in self.server.recheck():
            assert decode_reply(encode(reply)) == reply
        assert not self.server.has_pending, "a lease request waits beyond its timeout"
        self._offer()
        ready = self.handoffs[_READY].token
        request = LeaseRequest(9, ready, PROMPT.num_tokens, PROMPT.digest("tokens"), "tokens")
        for message, answer in (
            (Handshake.of(compatibility()), HandshakeReply),
            (request, LeaseGranted),
        ):
            answered = self.server.receive(_CONNECTIONS[0], encode(message))
            assert isinstance(answered, answer), f"{type(message).__name__}: {answered}"
        self.clock.advance(TTL_S * 10)
        self.directory.expire()
        for handoff in self.handoffs.values():
            self.directory.close(handoff.token)
        assert self.directory.usage() == (0, 0, 0), "slots or leases are left"
        self._offer()

    def _count(self, name: str) -> None:
        self.counted += 1

    def _offer(self) -> None:
        for old in self.handoffs.values():
            self.directory.close(old.token)
        for placeholder in (_READY, _FILLING):
            handoff = self.directory.open(PROMPT, [[None] * 3, [None] * 3])
            assert handoff is not None
            if placeholder == _READY:
                blocks = self.directory.copying(handoff, [(g, i) for g in (0, 1) for i in range(3)])
                assert blocks is not None
                self.directory.filled(handoff, blocks)
                self.directory.commit(handoff)
            self.handoffs[placeholder] = handoff


@contextmanager
def requests() -> Iterator[Parser]:
    """What a serving engine is asked, and what it does about it."""
    served = _Served()
    yield Parser("control requests", served.make, served.parse, (), served.alive)


class Asked:
    """Sessions with a serving engine, each with two lease requests."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        other = msgspec.structs.replace(compatibility(), model="m@2")
        self.corpus = [
            encode(handshake_reply()),
            encode(granted()),
            encode(LeaseDenied(1, "unknown_token")),
            encode(LeaseDenied(2, "not_introduced")),
            encode(Refused("model", "m@1", "m@2")),
            encode(HandshakeReply(EPOCH, "", other, ((endpoint(),),))),
            *(
                encode(HandshakeReply(EPOCH, "", key, ((endpoint(),), (endpoint(),))))
                for key in (in_stages(), in_other_stages())
            ),
        ]

    def make(self, rng: random.Random) -> list[bytes]:
        frames = [self.corpus[0], self.corpus[1]] if rng.random() < 0.8 else []
        frames.insert(rng.randrange(len(frames) + 1), rng.choice(self.corpus))
        place = rng.randrange(len(frames))
        frames[place] = distort_msgpack(frames[place], rng)
        return frames

    def parse(self, frames: list[bytes]) -> bool | str:
        session = PeerSession("ipc://x", compatibility(), self.clock)
        deadline = self.clock() + 10
        futures: list[Future[Lease]] = [Future(), Future()]
        for future in futures:
            pending = PendingLease(b"t" * 16, PROMPT, EPOCH, "", deadline, future=future)
            session.request_lease(pending)
        sent = []
        for frame in frames:
            sent += session.receive(frame)
            self.clock.advance(0.01)
        self.clock.advance(max(0.0, session.deadline() - self.clock()) if not _done(futures) else 0)
        sent += session.tick()
        for message in sent:
            encode(message)
        self.clock.advance(100)
        session.tick()
        assert _done(futures), "a lease request was never answered"
        error = futures[0].exception()
        if error is None:
            return True
        assert isinstance(error, OmniError), repr(error)
        return type(error).__name__


def _done(futures: "list[Future[Lease]]") -> bool:
    return all(future.done() for future in futures)


@contextmanager
def answers() -> Iterator[Parser]:
    """What a serving engine answers to lease requests."""
    asked = Asked()
    yield Parser("control answers", asked.make, asked.parse, ())
