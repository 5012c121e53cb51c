# SPDX-License-Identifier: Apache-2.0
"""The serving side of the control channel: handshakes, lease requests and releases.

`ControlServer` holds the protocol and no socket: the channel gives it each frame with the
connection it came from, and sends what it returns. So it is the same over Unix sockets and TCP.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from omni_connector.errors import ProtocolError
from omni_connector.handoff.leases import LeaseState, SlotDirectory
from omni_connector.handoff.messages import (
    PROTOCOL_VERSION,
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    Reply,
    Request,
    decode_request,
    unknown_kind,
)
from omni_connector.identity.epochs import WeightsName
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.packets import PACKAGE, package_of
from omni_connector.runtime.bounded import BoundedMap

logger = logging.getLogger("vllm.omni_connector.handoff")

OTHER_WEIGHTS: Final = "other_weights"
"""Why a lease is denied to an engine of other weights, or of weights that cannot be compared."""
UNHANDLED: Final = "it could not be handled"
"""What a peer is told of a message that has raised an exception."""

MAX_SESSIONS: Final = 4096
"""Most introduced peers that are remembered at a socket. A peer that is forgotten introduces itself
again."""

MAX_PENDING: Final = 1 << 16
"""Most lease requests that wait for their hand-offs. Further ones are denied as `overloaded`."""


class PeerConnection(NamedTuple):
    """A peer's connection: the number of our socket, and the peer's name there.

    A peer may choose its name, so equal names at different sockets may be different peers.
    """

    listener: int
    name: bytes


class ControlServer:
    """Answers peers that want to read this engine's slots.

    Args:
        compatibility: the compatibility key that a peer must agree with.
        handshake_reply: the answer to the handshake of such a peer.
        directory: the hand-offs.
        valid: whether their KV is still of the engine's weights.
        weights: returns the name of these weights.
        clock: seconds, monotonic.
        pending_timeout: seconds that a lease request may wait for a hand-off that is being copied.
        count: called with the name of each event worth counting.
    """

    def __init__(
        self,
        *,
        compatibility: CompatibilityKey,
        handshake_reply: HandshakeReply,
        directory: SlotDirectory,
        valid: Callable[[], bool] = lambda: True,
        weights: Callable[[], WeightsName] = WeightsName,
        clock: Callable[[], float],
        pending_timeout: float,
        count: Callable[[str], None],
    ) -> None:
        self._compatibility = compatibility
        self._handshake_reply = handshake_reply
        self._directory = directory
        self._valid = valid
        self._weights = weights
        self._clock = clock
        self._pending_timeout = pending_timeout
        self._count = count
        # By socket, so that many peers at one of them displace none at another.
        self._introduced: defaultdict[int, BoundedMap[bytes, None]]
        self._introduced = defaultdict(lambda: BoundedMap(MAX_SESSIONS))
        # By connection and sequence: the lease request, and until when it waits.
        self._pending: dict[tuple[PeerConnection, int], tuple[LeaseRequest, float]] = {}
        self._told = False

    def learn(self, compatibility: CompatibilityKey) -> list[tuple[PeerConnection, Reply]]:
        """This engine has learned more of its weights: judge all peers anew.

        No lease ends. A peer is asked for another handshake with its next lease request, or with
        the one that waits, and repeats that request by itself.

        Returns:
            The answers to those that wait.
        """
        self._compatibility = compatibility
        self._handshake_reply = msgspec.structs.replace(
            self._handshake_reply, compatibility=compatibility
        )
        self._introduced.clear()
        waiting, self._pending = self._pending, {}
        return [
            (connection, LeaseDenied(sequence, "not_introduced"))
            for connection, sequence in waiting
        ]

    @property
    def has_pending(self) -> bool:
        """Whether a lease request waits for its hand-off to be complete."""
        return bool(self._pending)

    def receive(self, connection: PeerConnection, frame: bytes) -> Reply | None:
        """Handle one frame; returns the answer to it, if there is one now.

        A malformed frame is counted and not answered. A peer whose message is of an unknown kind,
        or cannot be handled, is refused; other peers do not notice.
        """
        try:
            message = decode_request(frame)
        except ProtocolError:
            self._count("malformed_message")
            kind = unknown_kind(frame)
            return Refused("message", f"unknown to {PACKAGE}", kind) if kind else None
        try:
            return self._handle(connection, message)
        except Exception:  # noqa: BLE001 - it is logged, once
            self._failed("A message of a peer could not be handled, and the peer was refused")
            self._introduced[connection.listener].pop(connection.name, None)
            return Refused("message", "", UNHANDLED)

    def _handle(self, connection: PeerConnection, message: Request) -> Reply | None:
        match message:
            case Handshake():
                return self._introduce(connection, message)
            case Release():
                self._release(connection, message)
                return None
            case LeaseRequest():
                introduced = self._introduced[connection.listener]
                if connection.name not in introduced:
                    return LeaseDenied(message.sequence, "not_introduced")
                introduced.move_to_end(connection.name)
                answer = self._answer(connection, message)
                if answer is None:
                    if len(self._pending) >= MAX_PENDING:
                        return LeaseDenied(message.sequence, "overloaded")
                    until = self._clock() + self._pending_timeout
                    self._pending[connection, message.sequence] = message, until
                return answer

    def _release(self, connection: PeerConnection, release: Release) -> None:
        lease = connection, release.sequence
        if not release.sequence:
            self._directory.drop(release.token)
        elif lease in self._pending:
            del self._pending[lease]
        else:
            self._directory.release(release.token, lease)

    def _introduce(self, connection: PeerConnection, handshake: Handshake) -> Reply:
        if handshake.protocol != PROTOCOL_VERSION:
            self._count("refused_peer")
            package = package_of(handshake.package)
            said = f"{handshake.protocol} ({package})"
            return Refused("protocol", f"{PROTOCOL_VERSION} ({PACKAGE})", said)
        try:
            reader = handshake.decode_compatibility()
        except ProtocolError:
            self._count("malformed_message")
            package = package_of(handshake.package)
            return Refused("compatibility", PACKAGE, f"malformed ({package})")
        difference = self._compatibility.difference(reader)
        if difference is not None:
            self._count("refused_peer")
            field, ours, theirs = difference
            return Refused(field[:1024], str(ours)[:1024], str(theirs)[:1024])
        introduced = self._introduced[connection.listener]
        introduced[connection.name] = None
        return self._handshake_reply

    def _answer(
        self, connection: PeerConnection, request: LeaseRequest
    ) -> LeaseGranted | LeaseDenied | None:
        """Give a lease or deny it; None while the request has to wait."""
        if not self._valid():  # the engine's thread has not noticed yet
            self._count("denied_unknown_token")
            return LeaseDenied(request.sequence, "unknown_token")
        # Before the lease: hand-offs of other weights are closed before the weights get their name.
        weights = self._weights()
        if (difference := weights.difference(request.weights)) is not None:
            self._count("denied_other_weights")
            logger.info("A lease was denied to %s: %s", connection.name.hex(), difference)
            return LeaseDenied(request.sequence, OTHER_WEIGHTS)
        lease = connection, request.sequence
        state, handoff, until = self._directory.lease(
            request.token, request.num_tokens, request.digest, request.digest_kind, lease
        )
        if state is LeaseState.PENDING:
            return None
        if handoff is None:
            self._count(f"denied_{state.value}")
            return LeaseDenied(request.sequence, state.value)
        # The engine's thread may have ended the hand-off by now. So nothing is read of it that
        # changes; the peer learns of the end by the slots' generations.
        groups = tuple(
            tuple(zip(slots.tolist(), generations.tolist(), strict=True))
            for slots, generations in zip(handoff.slots, handoff.generations, strict=True)
        )
        lease_s = max(0.0, until - self._clock())
        return LeaseGranted(
            request.sequence,
            handoff.prompt.num_tokens,
            tuple(handoff.first_blocks),
            groups,
            lease_s,
            weights,
        )

    def recheck(self) -> list[tuple[PeerConnection, Reply]]:
        """Answer the pending lease requests that can be answered now, or whose time is over."""
        answers: list[tuple[PeerConnection, Reply]] = []
        now = self._clock()
        for lease, (request, deadline) in list(self._pending.items()):
            connection, _ = lease
            answer: Reply | None
            try:
                # Each answer compares the digest anew.
                waits = self._directory.pending(request.token)
                answer = None if waits else self._answer(connection, request)
            except Exception:  # noqa: BLE001 - it is logged, once
                self._failed("A lease request that waited could not be answered, and was denied")
                answer = LeaseDenied(request.sequence, "not_ready")
            if answer is None and deadline <= now:
                answer = LeaseDenied(request.sequence, "not_ready")
            if answer is not None:
                del self._pending[lease]
                answers.append((connection, answer))
        return answers

    def _failed(self, text: str) -> None:
        self._count("message_failed")
        if not self._told:  # a peer may send many such messages
            self._told = True
            logger.exception("%s (logged once); please report it", text)
