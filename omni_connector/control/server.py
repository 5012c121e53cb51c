# SPDX-License-Identifier: Apache-2.0
"""The serving side of the control channel: introductions, claims and releases.

`ControlServer` holds the protocol and no socket: the channel gives it each frame with the
connection it came from, and sends what it returns. That makes it the same over Unix sockets and
TCP, and lets a test drive it without either.
"""

import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from omni_connector.control.directory import ClaimState, SlotDirectory
from omni_connector.control.messages import (
    PROTOCOL_VERSION,
    Claim,
    Denied,
    Fingerprint,
    Granted,
    Hello,
    Refused,
    Release,
    Reply,
    Request,
    Welcome,
    decode_request,
)
from omni_connector.errors import ProtocolError

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
        clock: seconds, monotonic.
        patience: seconds a claim may wait for a hand-off that is still being copied.
        count: called with the name of each event worth counting.
    """

    def __init__(
        self,
        *,
        fingerprint: Fingerprint,
        welcome: Welcome,
        directory: SlotDirectory,
        clock: Callable[[], float],
        patience: float,
        count: Callable[[str], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._welcome = welcome
        self._directory = directory
        self._clock = clock
        self._patience = patience
        self._count = count
        # By door: who crowds one of them puts nobody out at the others.
        self._introduced: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._parked: deque[tuple[Connection, Claim, float]] = deque()
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
                self._directory.close(message.token)
                return []
            case Claim():
                introduced = self._introduced[connection.door]
                if connection.name not in introduced:
                    return [(connection, Denied(message.sequence, "not_introduced"))]
                introduced.move_to_end(connection.name)
                answer = self._answer(message)
                if answer is not None:
                    return [(connection, answer)]
                if len(self._parked) >= MAX_PARKED:
                    return [(connection, Denied(message.sequence, "overloaded"))]
                self._parked.append((connection, message, self._clock() + self._patience))
                return []

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

    def _answer(self, claim: Claim) -> Granted | Denied | None:
        state, handoff = self._directory.claim(
            claim.token, claim.num_tokens, claim.digest, claim.digest_kind
        )
        if state is ClaimState.PENDING:
            return None
        if handoff is None:
            self._count(f"denied_{state.value}")
            return Denied(claim.sequence, state.value)
        groups = tuple(
            tuple(zip(slots, generations, strict=True))
            for slots, generations in zip(handoff.slots, handoff.generations, strict=True)
        )
        lease_s = max(0.0, handoff.deadline - self._clock())
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
        for _ in range(len(self._parked)):
            connection, claim, deadline = self._parked.popleft()
            # The digest was compared when the claim came, and is again before it is granted.
            answer: Reply | None
            try:
                waits = self._directory.pending(claim.token)
                answer = None if waits else self._answer(claim)
            except Exception:  # noqa: BLE001 - it is logged, once
                self._failed("A claim that had to wait could not be answered: it is denied")
                answer = Denied(claim.sequence, "not_ready")
            if answer is None and deadline <= now:
                answer = Denied(claim.sequence, "not_ready")
            if answer is None:
                self._parked.append((connection, claim, deadline))
            else:
                answers.append((connection, answer))
        return answers
