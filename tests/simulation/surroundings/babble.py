# SPDX-License-Identifier: Apache-2.0
"""Peers that say anything that decodes: strangers at a serving engine, and false engines."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from omni_connector.arena.format import EPOCH_BYTES
from omni_connector.config import OmniConfig
from omni_connector.errors import ProtocolError
from omni_connector.handoff.messages import (
    DIGEST_BYTES,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
)
from omni_connector.handoff.params import handoff_answer
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.runtime import runtime_dir, socket_path
from omni_connector.transports.base import Endpoint
from tests.simulation.surroundings.wires import (
    STRANGER,
    Net,
    RouterSocket,
    SimulatedPoller,
)
from tests.simulation.surroundings.world import NEVER, Actor

_FAR = 1 << 40


def path_of(engine: str) -> str:
    """Where an engine of this name serves."""
    return str(socket_path(runtime_dir(OmniConfig().namespace), f"control:{engine}"))


def babble(net: Net, engine: str, draw: random.Random) -> None:
    """A stranger connects to an engine and says some things."""
    link = net.link(STRANGER, path_of(engine), SimulatedPoller())
    compatibility = net.heard
    for _ in range(draw.randrange(1, 12)):
        message = _request(compatibility, draw)
        net.world.tell(f"a stranger says {_short(message)}")
        link.send(encode(message))


def _request(compatibility: CompatibilityKey | None, draw: random.Random) -> Request:
    kind = draw.choice((0, 0, 0, 1, 2, 3))
    if kind == 0 and compatibility is not None:
        said = compatibility if draw.random() < 0.3 else _mutated(compatibility, draw)
        return Handshake(
            draw.choice((PROTOCOL_VERSION, PROTOCOL_VERSION, 0, _FAR - 1)),
            msgspec.Raw(msgspec.msgpack.encode(said)),
        )
    if kind == 1:
        return Handshake(
            PROTOCOL_VERSION, msgspec.Raw(msgspec.msgpack.encode(draw.choice((0, {}, []))))
        )
    if kind == 2:
        return Release(draw.randbytes(TOKEN_BYTES))
    return LeaseRequest(
        draw.choice((0, 1, (1 << 62) - 1)),
        draw.randbytes(TOKEN_BYTES),
        draw.choice((0, 1, _FAR - 1)),
        draw.randbytes(DIGEST_BYTES),
        draw.choice(("blocks", "tokens")),
    )


def _mutated(compatibility: CompatibilityKey, draw: random.Random) -> CompatibilityKey:
    """One that differs in something, if that is one."""
    try:
        return _changed(compatibility, draw)
    except ValueError:
        return compatibility


def _changed(compatibility: CompatibilityKey, draw: random.Random) -> CompatibilityKey:
    groups = list(compatibility.groups)
    change = draw.choice((0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9, 10))
    if change == 8:
        stages = compatibility.stages
        if draw.random() < 0.7:  # layers that have names cannot be in two stages
            stages = tuple(tuple(map(_unnamed, stage)) for stage in stages)
            groups = list(map(_unnamed, groups))
            compatibility = msgspec.structs.replace(
                compatibility, groups=stages[0], later_stages=stages[1:] or UNSET
            )
        later = draw.choice((UNSET, (), (groups,), stages[:1], stages[::-1], 300 * stages))
        return msgspec.structs.replace(compatibility, later_stages=later)
    if change == 0:
        ranks = draw.choice((1, 2, 3, 1024))
        stripes = draw.choice((UNSET, 1, ranks, 2))
        return msgspec.structs.replace(compatibility, ranks=ranks, stripes=stripes)
    if change == 1:
        return msgspec.structs.replace(compatibility, groups=())
    if change == 2:
        return msgspec.structs.replace(compatibility, groups=(*groups, *groups))
    if change == 3:
        return msgspec.structs.replace(compatibility, kv_heads=draw.choice((0, 1, 7, _FAR - 1)))
    if not groups:
        return compatibility
    at = draw.randrange(len(groups))
    group = groups[at]
    if change == 4:
        pages: tuple[str, ...] = draw.choice(
            ((), (), ("",) * len(group.pages), group.pages[:1], (*group.pages, "H0"))
        )
        groups[at] = msgspec.structs.replace(_unnamed(group), pages=pages)
    elif change == 5:
        size = draw.choice((1, 2, group.block_size * 2, _FAR - 1))
        groups[at] = msgspec.structs.replace(group, block_size=size)
    elif change == 6:
        groups[at] = msgspec.structs.replace(group, replicated=not group.replicated)
        compatibility = msgspec.structs.replace(compatibility, stripes=draw.choice((UNSET, 1)))
    elif change == 10:
        copies = draw.choice((UNSET, (2,) * len(group.pages), range(1, 1 + len(group.pages))))
        groups[at] = msgspec.structs.replace(group, copies=copies and tuple(copies))
        spread: int | tuple[int, ...] = draw.choice((1, 2, 4, (1, 2), (2, 1, 1)))
        return msgspec.structs.replace(compatibility, groups=tuple(groups), stripes=spread)
    elif change == 9:
        names = group.names or ()
        groups[at] = draw.choice(
            (
                _unnamed(group),
                msgspec.structs.replace(group, names=names[::-1], layers="turned"),
                msgspec.structs.replace(group, names=tuple(map(str.upper, names)), layers="other"),
                group.of_layers(range(len(names) // 2)),
            )
        )
    else:
        groups[at] = msgspec.structs.replace(group, kind=draw.choice(("", "mamba", "x" * 1000)))
    return msgspec.structs.replace(compatibility, groups=tuple(groups))


def _unnamed(group: GroupShape) -> GroupShape:
    return msgspec.structs.replace(group, names=UNSET)


class Liar(Actor):
    """A serving peer that answers anything that decodes.

    Args:
        net: where it serves.
        name: of the engine that it says it is.
        draw: what it answers.
        arenas: endpoints of others, which it may call its own.
    """

    def __init__(
        self, net: Net, name: str, draw: random.Random, arenas: Sequence[Endpoint]
    ) -> None:
        super().__init__(f"liar {name}", f"liar {name}")
        self._net = net
        self._name = name
        self._draw = draw
        self._arenas = list(arenas)
        self._epoch = draw.randbytes(TOKEN_BYTES)
        self._compatibility: CompatibilityKey | None = None
        self._router = RouterSocket(SimulatedPoller())
        self._router.poller.turns = self
        net.routers[path_of(name)] = (f"liar {name}", self._router)
        net.world.add(self)

    def wake(self) -> None:
        """A message has come."""
        self.due = self._net.world.now

    def close(self) -> None:
        """Go away."""
        self._net.kill(f"liar {self._name}")
        self._net.world.remove(self)

    def params(self, num_tokens: int) -> dict[str, Any]:
        """`kv_transfer_params` that lead to it."""
        return handoff_answer(
            engine_id=self._name,
            request_id="r",
            epoch=self._epoch,
            token=self._draw.randbytes(TOKEN_BYTES),
            num_tokens=num_tokens,
            tokens_ahead=0,
            tp_size=1,
            address=None,
        )

    def act(self) -> None:
        self.due = NEVER
        while self._router.inbox:
            name, frame = self._router.recv_multipart()
            try:
                message = decode_request(frame)
            except ProtocolError:
                continue
            for reply in self._replies(message):
                self._net.world.tell(f"{self._name} lies: {_short(reply)}")
                self._router.send_multipart([name, encode(reply)])

    def _replies(self, message: Request) -> list[Reply]:
        draw = self._draw
        if isinstance(message, Handshake):
            self._compatibility = message.decode_compatibility()
            return _sayable(self._handshake_reply, draw)
        if isinstance(message, LeaseRequest):
            return _sayable(lambda: self._answer(message), draw)
        return []

    def _handshake_reply(self) -> Reply:
        draw, compatibility = self._draw, self._compatibility
        assert compatibility is not None
        if draw.random() < 0.1:
            return Refused("model", "a", "b")
        if draw.random() < 0.3:
            compatibility = _mutated(compatibility, draw)
        return HandshakeReply(
            self._epoch,
            draw.choice(("", "x")),
            compatibility,
            tuple(self._endpoints() for _ in range(compatibility.num_arenas)),
        )

    def _endpoints(self) -> tuple[Endpoint, ...]:
        draw = self._draw
        if draw.random() < 0.3:
            return ()
        if self._arenas and draw.random() < 0.5:
            return (draw.choice(self._arenas),)
        return (
            Endpoint(
                transport=draw.choice(("shm", "shm", "pigeon")),
                address=draw.choice(("", "nowhere", "a/../b", "x" * 1000)),
                epoch=draw.randbytes(EPOCH_BYTES),
                n_slots=draw.choice((1, 9, _FAR - 1)),
                slot_bytes=4096 * draw.choice((1, 2, 1 << 20)),
            ),
        )

    def _answer(self, request: LeaseRequest) -> Reply:
        draw, compatibility = self._draw, self._compatibility
        assert compatibility is not None
        sequence = request.sequence if draw.random() < 0.9 else draw.randrange(9)
        if draw.random() < 0.1:
            return LeaseDenied(sequence, draw.choice(("", "unknown_token", "x" * 1000)))
        num_tokens = request.num_tokens if draw.random() < 0.8 else draw.choice((0, 1, _FAR - 1))
        needed = [group.needed(min(num_tokens, 1 << 12)) for group in compatibility.groups]
        first_blocks = tuple(each.start for each in needed)
        groups = tuple(
            # Generations that no arena has: what it names is never what was published.
            tuple((draw.choice((0, 1, _FAR - 1)), _FAR + i) for i in range(len(each)))
            for each in needed
        )
        if draw.random() < 0.3:
            groups = draw.choice(((), groups[:-1], (*groups, ()), tuple(() for _ in groups)))
            first_blocks = (*first_blocks, 0)[: len(groups)]
        if draw.random() < 0.1:
            first_blocks = tuple(first + 1 for first in first_blocks)
        return LeaseGranted(
            sequence, num_tokens, first_blocks, groups, draw.choice((0.0, 0.01, 5.0, 1e12))
        )


def _sayable(make: Callable[[], Reply], draw: random.Random) -> list[Reply]:
    """What would decode of some replies."""
    replies = []
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2))):
        try:
            replies.append(decode_reply(encode(make())))
        except (ValueError, ProtocolError):
            continue
    return replies


def _short(message: Request | Reply) -> str:
    return f"{type(message).__name__} {msgspec.msgpack.decode(encode(message))}"[:240]
