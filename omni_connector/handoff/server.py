# SPDX-License-Identifier: Apache-2.0
"""The serving side of the control channel: introductions, claims and releases.

`ControlServer` holds the protocol and no socket: the channel gives it each frame with the
connection it came from, and sends what it returns. That makes it the same over Unix sockets and
TCP, and lets a test drive it without either.
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
    """A peer's connection: which of our sockets it is at, and its name there.

    A peer may choose the name, so that names of different sockets say nothing of each other.
    """

    door: int
    name: bytes


Answer = tuple[Connection, Reply]
"""(connection, message to send there)."""


class ControlServer:
    """Answers peers that want to read this engine's slots.

    Args:
        fingerprint: what a peer must agree on.
        welcome: what an agreeing peer is told.
        directory: the hand-offs.
        valid: whether what they hold is still of the engine's weights.
        clock: seconds, monotonic.
        patience: seconds a claim may wait for a hand-off that is still being copied.
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
        # By door: who crowds one of them puts nobody out at the others.
        self._introduced: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        # By connection and sequence: the claim, and until when it waits.
        self._parked: dict[tuple[Connection, int], tuple[Claim, float]] = {}
        self._told = False

    @property
    def has_parked(self) -> bool:
        """Whether a claim waits for its hand-off to be complete."""
        return bool(self._parked)

    def receive(self, connection: Connection, frame: bytes) -> list[Answer]:
        """Handle one frame from `connection`; malformed ones are counted and ignored.

        Who sends one that cannot be handled is refused; nobody else is told or held up.
        """
        try:
            message = decode_request(frame)
        except ProtocolError:
            self._count("malformed_message")
            return []
        try:
            return self._handle(connection, message)
        except Exception:  # noqa: BLE001 - it is logged, once
            self._failed("A message of a peer could not be handled: the peer is refused")
            self._introduced[connection.door].pop(connection.name, None)
            return [(connection, Refused("message", "", "it could not be handled"))]

    def _handle(self, connection: Connection, message: Request) -> list[Answer]:
        match message:
            case Hello():
                return [(connection, self._introduce(connection, message))]
            case Release():
                self._release(connection, message)
                return []
            case Claim():
                introduced = self._introduced[connection.door]
                if connection.name not in introduced:
                    return [(connection, Denied(message.sequence, "not_introduced"))]
                introduced.move_to_end(connection.name)
                answer = self._answer(connection, message)
                if answer is not None:
                    return [(connection, answer)]
                if len(self._parked) >= MAX_PARKED:
                    return [(connection, Denied(message.sequence, "overloaded"))]
                until = self._clock() + self._patience
                self._parked[connection, message.sequence] = message, until
                return []

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
        if not self._valid():  # and the engine's thread has yet to notice
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

    def _failed(self, text: str) -> None:
        self._count("message_failed")
        if not self._told:  # who sends such messages may send many
            self._told = True
            logger.exception("%s (told once); please report it", text)

    def recheck(self) -> list[Answer]:
        """Answer the parked claims that can be answered now, or have waited long enough."""
        answers: list[Answer] = []
        now = self._clock()
        for lease, (claim, deadline) in list(self._parked.items()):
            connection, _ = lease
            # The digest was compared when the claim came, and is again before it is granted.
            answer: Reply | None
            try:
                waits = self._directory.pending(claim.token)
                answer = None if waits else self._answer(connection, claim)
            except Exception:  # noqa: BLE001 - it is logged, once
                self._failed("A claim that had to wait could not be answered: it is denied")
                answer = Denied(claim.sequence, "not_ready")
            if answer is None and deadline <= now:
                answer = Denied(claim.sequence, "not_ready")
            if answer is not None:
                del self._parked[lease]
                answers.append((connection, answer))
        return answers
