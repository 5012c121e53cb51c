# SPDX-License-Identifier: Apache-2.0
"""The asking side of the control channel: one session with one serving peer.

Like the server it holds no socket: the channel tells `PeerSession` what has arrived, and sends
what it returns. Lease requests wait until the peer has answered the handshake.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from omni_connector.errors import (
    IncompatiblePeerError,
    OmniError,
    PeerUnreachableError,
    ProtocolError,
)
from omni_connector.handoff.messages import (
    DigestKind,
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    Request,
    decode_reply,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.identity.epochs import WeightsName
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.status import plain

INTRODUCTION_S: Final = 15.0
"""Seconds in which a peer must answer the handshake."""


class LeaseDeniedError(OmniError):
    """The peer refused a lease; `reason` is its word for why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the peer refused a lease: {plain(reason)}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Lease:
    """Slots that a peer has leased to us.

    Attributes:
        address: the peer's control address, to which the release goes.
        token: the hand-off's.
        sequence: number of the lease request, and so of the lease.
        handshake_reply: the peer's answer to the handshake; its `arenas` are where the slots are.
        granted: slots and generations.
        received: seconds of our clock when the lease came.
        expires: seconds of our clock when the peer may reuse the slots.
    """

    address: str
    token: bytes
    sequence: int
    handshake_reply: HandshakeReply
    granted: LeaseGranted
    received: float
    expires: float


@dataclass(slots=True, eq=False)
class PendingLease:
    """A lease request that has not been answered.

    Attributes:
        token, prompt: of the hand-off.
        epoch: of the prefill engine that made the token.
        hash_id: how our own block hashes are made.
        deadline: seconds of the clock after which it fails.
        weights: our own.
        future: gets the lease or an `OmniError`.
        asked_again: whether it was sent a second time, after another handshake.
    """

    token: bytes
    prompt: Prompt
    epoch: bytes
    hash_id: str
    deadline: float
    weights: WeightsName = field(default_factory=WeightsName)
    future: "Future[Lease]" = field(default_factory=Future)
    asked_again: bool = False

    def fail(self, error: OmniError) -> None:
        """End the request, unless its caller has cancelled it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class PeerSession:
    """The lease requests at one peer, and the handshake before them.

    Args:
        address: the peer's control address.
        compatibility: our compatibility key.
        clock: seconds, monotonic.

    Attributes:
        failure: why the session has ended; None while it goes on.
        failed_at: seconds of the clock when it ended.
    """

    def __init__(
        self, address: str, compatibility: CompatibilityKey, clock: Callable[[], float]
    ) -> None:
        self.address = address
        self.failure: OmniError | None = None
        self.failed_at = 0.0
        self._compatibility = compatibility
        self._clock = clock
        self._handshake_reply: HandshakeReply | None = None  # the last one
        self._introduced = False
        self._introduction_ends = clock() + INTRODUCTION_S
        self._next_sequence = 0
        self._unsent: deque[PendingLease] = deque()
        self._waiting: dict[int, PendingLease] = {}
        self._leases = 0
        self._leased_until = 0.0

    @property
    def idle(self) -> bool:
        """Whether no request waits, and no lease of ours is left at the peer."""
        leased = self._leases > 0 and self._clock() < self._leased_until
        return not (self._unsent or self._waiting or leased)

    @property
    def _awaits_handshake(self) -> bool:
        return not self._introduced and self.failure is None

    def release(self, lease: Lease) -> Release:
        """What to send when a lease is not needed any more."""
        self._leases = max(0, self._leases - 1)
        return Release(lease.token, lease.sequence)

    def handshake(self) -> Handshake:
        """What to send first."""
        return Handshake.of(self._compatibility)

    def learn(self, compatibility: CompatibilityKey) -> None:
        """This engine has learned more of its weights. The session ends if they differ from those
        of the peer; loads under way go on."""
        self._compatibility = compatibility
        if self._introduced and self._handshake_reply is not None and self.failure is None:
            self._compare(self._handshake_reply)

    def _compare(self, handshake_reply: HandshakeReply) -> bool:
        """Whether we can read the peer's slots. If not, the session ends."""
        difference = handshake_reply.compatibility.difference(self._compatibility)
        if difference is None:
            return True
        field, theirs, ours = difference
        self.fail(IncompatiblePeerError(field, str(ours), str(theirs)))
        return False

    def request_lease(self, pending: PendingLease) -> list[Request]:
        """Ask for a hand-off; returns what to send now."""
        if self.failure is not None:
            pending.fail(self.failure)
        elif self._introduced and self._handshake_reply is not None:
            return self._send(pending, self._handshake_reply)
        else:
            self._unsent.append(pending)
        return []

    def _send(self, pending: PendingLease, handshake_reply: HandshakeReply) -> list[Request]:
        if pending.epoch != handshake_reply.epoch:
            pending.fail(LeaseDeniedError("other_epoch"))
            return []
        prompt = pending.prompt
        same_hashes = bool(pending.hash_id) and pending.hash_id == handshake_reply.hash_id
        kind: DigestKind = "blocks" if same_hashes and not prompt.adapter else "tokens"
        try:
            digest = prompt.digest(kind)
        except (ValueError, TypeError, OverflowError) as error:
            pending.fail(ProtocolError(f"the prompt has no digest: {error}"))
            return []
        self._next_sequence += 1
        self._waiting[self._next_sequence] = pending
        return [
            LeaseRequest(
                self._next_sequence,
                pending.token,
                prompt.num_tokens,
                digest,
                kind,
                pending.weights,
            )
        ]

    def receive(self, frame: bytes) -> list[Request]:
        """Handle one frame of the peer; returns what to send now. A malformed one ends the
        session."""
        try:
            message = decode_reply(frame)
        except ProtocolError as error:
            self.fail(error)
            return []
        match message:
            case HandshakeReply():
                return self._welcomed(message)
            case Refused():
                self.fail(IncompatiblePeerError(plain(message.field), message.theirs, message.ours))
                return []
            case LeaseGranted():
                return self._lease_granted(message)
            case LeaseDenied():
                return self._denied(message)

    def _welcomed(self, handshake_reply: HandshakeReply) -> list[Request]:
        if not self._compare(handshake_reply):  # the peer should have refused us
            return []
        self._handshake_reply = handshake_reply
        self._introduced = True
        out: list[Request] = []
        while self._unsent:
            out += self._send(self._unsent.popleft(), handshake_reply)
        return out

    def _denied(self, message: LeaseDenied) -> list[Request]:
        pending = self._waiting.pop(message.sequence, None)
        if pending is None:
            return []
        if message.reason != "not_introduced" or pending.asked_again:
            pending.fail(LeaseDeniedError(message.reason))
            return []
        # A server keeps a limited number of peers; it has forgotten us since the handshake.
        pending.asked_again = True
        self._unsent.append(pending)
        if not self._introduced:  # another request has begun the handshake already
            return []
        self._introduced = False
        self._introduction_ends = self._clock() + INTRODUCTION_S
        return [self.handshake()]

    def _lease_granted(self, message: LeaseGranted) -> list[Request]:
        pending = self._waiting.pop(message.sequence, None)
        reply = self._handshake_reply
        if pending is None or reply is None:
            return []
        if not pending.future.set_running_or_notify_cancel():
            # The caller has given up: end the lease.
            return [Release(pending.token, message.sequence)]
        now = self._clock()
        expires = now + message.lease_s
        self._leases += 1
        self._leased_until = max(self._leased_until, expires)
        lease = Lease(self.address, pending.token, message.sequence, reply, message, now, expires)
        pending.future.set_result(lease)
        return []

    def tick(self) -> list[Request]:
        """Fail the requests that are past their deadline; returns what to send now."""
        now = self._clock()
        if self._awaits_handshake and now >= self._introduction_ends:
            self.fail(PeerUnreachableError(f"no answer to the handshake from {self.address}"))
        late = PeerUnreachableError(f"no answer from {self.address} in time")
        for pending in [pending for pending in self._unsent if pending.deadline <= now]:
            self._unsent.remove(pending)
            pending.fail(late)
        out: list[Request] = []
        for sequence in [n for n, pending in self._waiting.items() if pending.deadline <= now]:
            pending = self._waiting.pop(sequence)
            pending.fail(late)
            out.append(Release(pending.token, sequence))
        return out

    def deadline(self) -> float:
        """Seconds of the clock when `tick` next has something to do."""
        deadlines = [pending.deadline for pending in [*self._unsent, *self._waiting.values()]]
        if self._awaits_handshake:
            deadlines.append(self._introduction_ends)
        return min(deadlines, default=float("inf"))

    def fail(self, error: OmniError) -> None:
        """End the session: every lease request, also later ones, gets `error`."""
        self.failure = error
        self.failed_at = self._clock()
        for pending in [*self._unsent, *self._waiting.values()]:
            pending.fail(error)
        self._unsent.clear()
        self._waiting.clear()
