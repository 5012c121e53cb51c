# SPDX-License-Identifier: Apache-2.0
"""The serving side of the control channel: handshakes, claims and releases.

`ControlServer` holds the protocol and no socket: the channel gives it each frame with the
connection it came from, and sends what it returns. So it is the same over Unix sockets and TCP.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from omni_connector.errors import ProtocolError
from omni_connector.handoff.directory import ClaimState, SlotDirectory
from omni_connector.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    Denied,
    Granted,
    Hello,
    Refused,
    Release,
    Reply,
    Request,
    Welcome,
    decode_request,
)
from omni_connector.kv.compatibility import CompatibilityKey

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 4096
MAX_PARKED: Final = 1 << 16


class Connection(NamedTuple):
    """A peer's connection: the number of our socket, and the peer's name there.

    A peer may choose its name, so equal names at different sockets may be different peers.
    """

    door: int
    name: bytes


class ControlServer:
    """Answers peers that want to read this engine's slots.

    Args:
        fingerprint: the compatibility key that a peer must agree with.
        welcome: the answer to the handshake of such a peer.
        directory: the hand-offs.
        valid: whether their KV is still of the engine's weights.
        clock: seconds, monotonic.
        patience: seconds that a claim may wait for a hand-off that is being copied.
        count: called with the name of each event worth counting.
    """

    def __init__(
        self,
        *,
        fingerprint: CompatibilityKey,
        welcome: Welcome,
        directory: SlotDirectory,
        valid: Callable[[], bool] = lambda: True,
        clock: Callable[[], float],
        patience: float,
        count: Callable[[str], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._welcome = welcome
        self._directory = directory
        self._valid = valid
        self._clock = clock
        self._patience = patience
        self._count = count
        # By socket, so that many peers at one of them displace none at another.
        self._introduced: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        # By connection and sequence: the claim, and until when it waits.
        self._parked: dict[tuple[Connection, int], tuple[Claim, float]] = {}
        self._told = False

    @property
    def has_parked(self) -> bool:
        """Whether a claim waits for its hand-off to be complete."""
        return bool(self._parked)

    def receive(self, connection: Connection, frame: bytes) -> Reply | None:
        """Handle one frame; returns the answer to it, if there is one now.

        A malformed frame is counted and not answered. A peer whose frame cannot be handled is
        refused; other peers do not notice.
        """
        try:
            message = decode_request(frame)
        except ProtocolError:
            self._count("malformed_message")
            return None
        try:
            return self._handle(connection, message)
        except Exception:  # noqa: BLE001 - it is logged, once
            self._failed("A message of a peer could not be handled, and the peer was refused")
            self._introduced[connection.door].pop(connection.name, None)
            return Refused("message", "", "it could not be handled")

    def _handle(self, connection: Connection, message: Request) -> Reply | None:
        match message:
            case Hello():
                return self._introduce(connection, message)
            case Release():
                self._release(connection, message)
                return None
            case Claim():
                introduced = self._introduced[connection.door]
                if connection.name not in introduced:
                    return Denied(message.sequence, "not_introduced")
                introduced.move_to_end(connection.name)
                answer = self._answer(connection, message)
                if answer is None:
                    if len(self._parked) >= MAX_PARKED:
                        return Denied(message.sequence, "overloaded")
                    until = self._clock() + self._patience
                    self._parked[connection, message.sequence] = message, until
                return answer

    def _release(self, connection: Connection, release: Release) -> None:
        lease = connection, release.sequence
        if not release.sequence:
            self._directory.drop(release.token)
        elif lease in self._parked:
            del self._parked[lease]
        else:
            self._directory.release(release.token, lease)

    def _introduce(self, connection: Connection, hello: Hello) -> Reply:
        if hello.protocol != PROTOCOL_VERSION:
            self._count("refused_peer")
            return Refused("protocol", str(PROTOCOL_VERSION), str(hello.protocol))
        try:
            reader = hello.decode_fingerprint()
        except ProtocolError:
            self._count("malformed_message")
            return Refused("fingerprint", "", "malformed")
        difference = self._fingerprint.difference(reader)
        if difference is not None:
            self._count("refused_peer")
            field, ours, theirs = difference
            return Refused(field[:1024], str(ours)[:1024], str(theirs)[:1024])
        introduced = self._introduced[connection.door]
        introduced[connection.name] = None
        introduced.move_to_end(connection.name)
        if len(introduced) > MAX_SESSIONS:
            introduced.popitem(last=False)
        return self._welcome

    def _answer(self, connection: Connection, claim: Claim) -> Granted | Denied | None:
        """Grant a claim or deny it; None while it has to wait."""
        if not self._valid():  # the engine's thread has not noticed yet
            self._count("denied_unknown_token")
            return Denied(claim.sequence, "unknown_token")
        lease = connection, claim.sequence
        state, handoff = self._directory.claim(
            claim.token, claim.num_tokens, claim.digest, claim.digest_kind, lease
        )
        if state is ClaimState.PENDING:
            return None
        if handoff is None:
            self._count(f"denied_{state.value}")
            return Denied(claim.sequence, state.value)
        groups = tuple(
            tuple(zip(slots.tolist(), generations.tolist(), strict=True))
            for slots, generations in zip(handoff.slots, handoff.generations, strict=True)
        )
        lease_s = max(0.0, handoff.leases[lease] - self._clock())
        return Granted(
            claim.sequence, handoff.prompt.num_tokens, tuple(handoff.firsts), groups, lease_s
        )

    def recheck(self) -> list[tuple[Connection, Reply]]:
        """Answer the waiting claims that can be answered now, or whose time is over."""
        answers: list[tuple[Connection, Reply]] = []
        now = self._clock()
        for lease, (claim, deadline) in list(self._parked.items()):
            connection, _ = lease
            answer: Reply | None
            try:
                # Each answer compares the digest anew.
                waits = self._directory.pending(claim.token)
                answer = None if waits else self._answer(connection, claim)
            except Exception:  # noqa: BLE001 - it is logged, once
                self._failed("A claim that had to wait could not be answered, and was denied")
                answer = Denied(claim.sequence, "not_ready")
            if answer is None and deadline <= now:
                answer = Denied(claim.sequence, "not_ready")
            if answer is not None:
                del self._parked[lease]
                answers.append((connection, answer))
        return answers

    def _failed(self, text: str) -> None:
        self._count("message_failed")
        if not self._told:  # a peer may send many such messages
            self._told = True
            logger.exception("%s (logged once); please report it", text)
