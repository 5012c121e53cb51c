# SPDX-License-Identifier: Apache-2.0
"""`SharedMemoryTransport`: peers of one user on one host map each other's arenas.

The memfd of an arena is sent over a Unix socket in the runtime folder. Only that socket has a
name, so a process that is killed leaves nothing but a dead socket, which another one removes.
"""

import functools
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.pinning import Pins
from omni_connector.errors import (
    IncompatiblePeerError,
    PeerRefusedError,
    PeerUnreachableError,
    TransportError,
)
from omni_connector.net import runtime
from omni_connector.net.descriptors import reason
from omni_connector.net.forks import forget_in_child
from omni_connector.net.packets import PACKAGE, PROTOCOL, Refusal, require_protocol
from omni_connector.net.unix import Connection, Listener
from omni_connector.transports.base import ArenaInPlace, ArenaTransport, Endpoint, RemoteArena


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Asks for the arena of this epoch, or with b"" for the only one of the socket; answered with
    `AttachReply` and its memfd."""

    epoch: bytes
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class AttachReply(msgspec.Struct, frozen=True, tag="attach-reply"):
    """The memfd beside this message is the arena of this epoch."""

    epoch: bytes
    n_slots: int
    slot_bytes: int


ANSWERS: Final[msgspec.msgpack.Decoder[AttachReply | Refusal]] = msgspec.msgpack.Decoder(
    AttachReply | Refusal
)
"""What `Attach` may be answered with."""


Answers = Mapping[type[msgspec.Struct], Callable[[Any], msgspec.Struct | None]]
"""For each type of message the function that answers it; it returns None if there is no answer."""


class SharedMemoryTransport(ArenaTransport):
    """Arenas as memfds, passed between processes of one user on one host.

    Args:
        namespace: engines that share it find each other.
        folder: the runtime folder, by default the one of the namespace.
        kind: how the names of its sockets start, which tells peers what the sockets are for.
        answers: answers messages other than requests for arenas, on a thread that must not wait.

    Raises:
        ConfigError: the runtime folder cannot be had, or is not private.
    """

    transport = "shm"
    nearness = 0
    why_near = "same kernel, user and runtime folder"

    def __init__(
        self,
        *,
        namespace: str = "default",
        folder: Path | None = None,
        kind: str = "a-",
        answers: Answers | None = None,
    ) -> None:
        self.folder: Final = runtime.runtime_dir(namespace) if folder is None else folder
        runtime.check_private(self.folder)
        self._kind = kind
        self._answers = answers or {}
        self._closed = False
        self._begin()
        forget_in_child(self, SharedMemoryTransport._abandon)

    def _begin(self) -> None:
        # Guards what follows; never held while waiting for anybody.
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._exports: dict[bytes, _Export] = {}

    def _abandon(self) -> None:
        # In a process that was forked: all exports are the parent's.
        for export in self._exports.values():
            export.close()
        self._begin()

    @property
    def supports_mapping(self) -> bool:
        return True

    def export(self, arena: Arena, name: str) -> Endpoint:
        address = runtime.socket_path(self.folder, name, kind=self._kind)
        listener = self._own_listener()
        with self._lock:
            self._check_open()
            if arena.epoch in self._exports:
                raise TransportError(f"the arena is exported already, not again at {address}")
            # The descriptor is duplicated: if the arena were closed before it is withdrawn, the
            # number of its descriptor could name another file.
            reply = AttachReply(arena.epoch, arena.n_slots, arena.slot_bytes)
            try:
                self._exports[arena.epoch] = _Export(reply, os.dup(arena.fd), address)
            except OSError as error:
                raise TransportError(f"cannot export an arena: {reason(error)}") from error
        try:
            listener.add(address)
        except BaseException:
            self._take_back(arena.epoch)
            raise
        return Endpoint.of(arena, self.transport, str(address))

    def hand_on(self, arena: RemoteArena) -> Endpoint | None:
        wanted = arena.endpoint
        with self._lock:
            # Peers ask for an arena by its epoch, so one socket serves all arenas.
            address = next((each.address for each in self._exports.values()), None)
            if address is None or self._closed or wanted.epoch in self._exports:
                return None
            try:
                descriptor = arena.descriptor()
            except TransportError:
                return None
            reply = AttachReply(wanted.epoch, wanted.n_slots, wanted.slot_bytes)
            self._exports[wanted.epoch] = _Export(reply, descriptor, address)
        return msgspec.structs.replace(wanted, transport=self.transport, address=str(address))

    def withdraw(self, endpoint: Endpoint) -> None:
        address = self._take_back(endpoint.epoch)
        listener = self._listener
        if address is not None and listener is not None:
            listener.remove(address)

    def attach(self, endpoint: Endpoint, *, timeout: float) -> RemoteArena:
        if endpoint.transport != self.transport:
            raise PeerRefusedError(f"{endpoint.transport!r} is not the transport {self.transport}")
        deadline = time.monotonic() + timeout
        connection = self.connect(endpoint.address, deadline)
        try:
            view = map_arena(connection, endpoint, deadline)
        except BaseException:
            connection.close()
            raise
        return MappedArena(endpoint, view, connection)

    def obstacle(self, endpoint: Endpoint) -> str | None:
        path = Path(endpoint.address)
        if path.parent != self.folder or not path.exists():
            return "another host, user or runtime folder"
        # A folder may be shared by hosts: it shows the sockets of all, but connects to its own.
        try:
            return "nobody listens there on this host" if runtime.is_dead(path) else None
        except OSError as error:
            return reason(error)

    def connect(self, address: str, deadline: float) -> Connection:
        """A connection to a peer's socket; where its owner has died, the socket is removed.

        Raises:
            PeerUnreachableError, PeerRefusedError: as `Connection`.
        """
        path = Path(address)
        try:
            return Connection(path, deadline)
        except PeerUnreachableError:
            if path.parent == self.folder:  # other folders are not ours to tidy up
                self.sweep()
            raise

    def sockets(self, kinds: re.Pattern[str]) -> list[str]:
        """The addresses of the sockets in the runtime folder whose names begin so, sorted.

        Raises:
            TransportError: it cannot be read.
        """
        try:
            found = sorted(os.listdir(self.folder))
        except OSError as error:
            raise TransportError(f"cannot read the runtime folder: {reason(error)}") from error
        return [f"{self.folder}/{name}" for name in found if kinds.match(name)]

    def catch_up(self, timeout: float) -> None:
        """Wait until what peers said before this call was dealt with, `timeout` seconds at most."""
        listener = self._listener
        if listener is not None:
            listener.catch_up(timeout)

    def sweep(self) -> None:
        """Remove the sockets of peers that have died."""
        runtime.tidy(self.folder)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            exports, self._exports = list(self._exports.values()), {}
        if listener is not None:
            listener.close()
        for export in exports:
            export.close()

    def details(self) -> dict[str, Any]:
        with self._lock:
            found: dict[str, Any] = {"folder": str(self.folder), "exports": len(self._exports)}
            if self._closed:
                found["status"] = "closed"
            elif self._listener is not None and not self._listener.alive:
                found["status"] = "unhealthy: the thread that answers peers has ended"
        return found

    def _take_back(self, epoch: bytes) -> Path | None:
        """End an export. Returns the address of its socket if nothing else is exported there."""
        # Only the caller that removes an export from the table closes it: so it is closed once.
        with self._lock:
            export = self._exports.pop(epoch, None)
            shared = {each.address for each in self._exports.values()}
        if export is None:
            return None
        export.close()
        return None if export.address in shared else export.address

    def _own_listener(self) -> Listener:
        with self._lock:
            self._check_open()
            if self._listener is not None:
                return self._listener
            known: Any = functools.reduce(operator.or_, self._answers, Attach)
            self._listener = listener = Listener(msgspec.msgpack.Decoder(known), self._answer)
        self.sweep()
        return listener

    def _answer(self, question: Any) -> tuple[msgspec.Struct | None, int | None]:
        # Runs on the listener's thread. The descriptor is duplicated under the lock, so that it
        # cannot be closed, and its number reused, before it is sent.
        if not isinstance(question, Attach):
            return self._answers[type(question)](question), None
        with self._lock:
            epoch = question.epoch
            if not epoch and len(self._exports) == 1:
                epoch = next(iter(self._exports))
            export = self._exports.get(epoch)
            if export is None:
                refusal = "there is no arena of this epoch here (any more)"
                return Refusal(refusal, package=PACKAGE), None
            return export.reply, os.dup(export.fd)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")


@dataclass(frozen=True, slots=True)
class _Export:
    reply: AttachReply
    fd: int
    address: Path

    def close(self) -> None:
        os.close(self.fd)


def map_arena(connection: Connection, endpoint: Endpoint, deadline: float) -> ArenaView:
    """Ask for an arena's memfd, check it and map it.

    Args:
        connection: to its owner.
        endpoint: what the arena must agree with.
        deadline: `time.monotonic()` by which the answer must be there.

    Raises:
        PeerUnreachableError, PeerRefusedError, ProtocolError: as `Connection.ask`.
        PeerRefusedError, ProtocolError, IncompatiblePeerError: as `ArenaView.open`.
    """
    descriptor = ask_arena(connection, endpoint, deadline)
    return mapped(descriptor, endpoint.epoch, endpoint.n_slots, endpoint.slot_bytes)


def mapped(descriptor: int, epoch: bytes, n_slots: int, slot_bytes: int) -> ArenaView:
    """Map the arena of a peer.

    Args:
        descriptor: of its memfd; closed here.
        epoch, n_slots, slot_bytes: what its owner says of it.

    Raises:
        PeerRefusedError, ProtocolError, IncompatiblePeerError: as `ArenaView.open`.
    """
    try:
        return ArenaView.open(
            descriptor, epoch=epoch, n_slots=n_slots, slot_bytes=slot_bytes, prefault=True
        )
    finally:
        os.close(descriptor)


def ask_arena(connection: Connection, endpoint: Endpoint, deadline: float) -> int:
    """Ask for an arena's memfd, which the caller closes. The arguments are as for `map_arena`.

    Raises:
        PeerUnreachableError, PeerRefusedError, ProtocolError: as `Connection.ask`.
        IncompatiblePeerError: it is another arena.
    """
    reply, descriptor = connection.ask(Attach(endpoint.epoch), ANSWERS, deadline, with_fd=True)
    assert descriptor is not None
    theirs = reply.epoch, reply.n_slots, reply.slot_bytes
    wanted = endpoint.epoch, endpoint.n_slots, endpoint.slot_bytes
    if theirs != wanted:
        os.close(descriptor)
        raise IncompatiblePeerError("arena", wanted, theirs)
    return descriptor


class MappedArena(ArenaInPlace):
    """A peer's arena, mapped. It stays readable after its owner's end, until it is closed."""

    _view: ArenaView

    def __init__(self, endpoint: Endpoint, view: ArenaView, connection: Connection) -> None:
        super().__init__(endpoint, view)
        self._connection = connection

    def descriptor(self) -> int:
        return self._view.descriptor()

    def pin_with(self, pins: Pins) -> None:
        self._view.pin_with(pins)

    @property
    def alive(self) -> bool:
        return self._connection.alive

    def close(self) -> None:
        self._connection.close()
        self._view.close()

    def abandon(self) -> None:
        self._connection.close()
        self._view.abandon()
