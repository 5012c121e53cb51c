# SPDX-License-Identifier: Apache-2.0
"""The asking side of the control channel: one session with one serving peer.

Like the server it holds no socket: the channel tells `PeerSession` what has arrived, and sends
what it returns. Claims wait until the peer has answered the handshake.
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
    Claim,
    Denied,
    DigestKind,
    Granted,
    Hello,
    Refused,
    Release,
    Request,
    Welcome,
    decode_reply,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey

INTRODUCTION_S: Final = 15.0
"""Seconds in which a peer must answer the handshake."""


class ClaimDeniedError(OmniError):
    """The peer refused a claim; `reason` is its word for why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the peer refused the claim: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots that a peer has leased to us.

    Attributes:
        address: the peer's control address, to which the release goes.
        token: the hand-off's.
        sequence: number of the claim, and so of the lease.
        welcome: the peer's answer to the handshake; its `arenas` are where the slots are.
        granted: slots and generations.
        received: seconds of our clock when the grant came.
        expires: seconds of our clock when the peer may reuse the slots.
    """

    address: str
    token: bytes
    sequence: int
    welcome: Welcome
    granted: Granted
    received: float
    expires: float


@dataclass(slots=True, eq=False)
class PendingClaim:
    """A claim that has not been answered.

    Attributes:
        token, prompt: of the hand-off.
        epoch: of the prefill engine that made the token.
        hash_id: how our own block hashes are made.
        deadline: seconds of the clock after which it fails.
        future: gets the grant or an `OmniError`.
        asked_again: whether it was sent a second time, after another handshake.
    """

    token: bytes
    prompt: Prompt
    epoch: bytes
    hash_id: str
    deadline: float
    future: "Future[Grant]" = field(default_factory=Future)
    asked_again: bool = False

    def fail(self, error: OmniError) -> None:
        """End the claim, unless its caller has cancelled it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class PeerSession:
    """The claims at one peer, and the handshake before them.

    Args:
        address: the peer's control address.
        fingerprint: our compatibility key.
        clock: seconds, monotonic.

    Attributes:
        failure: why the session has ended; None while it goes on.
        failed_at: seconds of the clock when it ended.
    """

    def __init__(
        self, address: str, fingerprint: CompatibilityKey, clock: Callable[[], float]
    ) -> None:
        self.address = address
        self.failure: OmniError | None = None
        self.failed_at = 0.0
        self._fingerprint = fingerprint
        self._clock = clock
        self._welcome: Welcome | None = None
        self._introduction_ends = clock() + INTRODUCTION_S
        self._next_sequence = 0
        self._unsent: deque[PendingClaim] = deque()
        self._waiting: dict[int, PendingClaim] = {}
        self._leases = 0
        self._leased_until = 0.0

    @property
    def idle(self) -> bool:
        """Whether no claim waits, and no lease of ours is left at the peer."""
        leased = self._leases > 0 and self._clock() < self._leased_until
        return not (self._unsent or self._waiting or leased)

    def release(self, grant: Grant) -> Release:
        """What to send when a lease is not needed any more."""
        self._leases = max(0, self._leases - 1)
        return Release(grant.token, grant.sequence)

    def hello(self) -> Hello:
        """What to send first."""
        return Hello.of(self._fingerprint)

    def claim(self, claim: PendingClaim) -> list[Request]:
        """Ask for a hand-off; returns what to send now."""
        if self.failure is not None:
            claim.fail(self.failure)
        elif self._welcome is None:
            self._unsent.append(claim)
        else:
            return self._send(claim, self._welcome)
        return []

    def _send(self, claim: PendingClaim, welcome: Welcome) -> list[Request]:
        if claim.epoch != welcome.epoch:
            claim.fail(ClaimDeniedError("other_epoch"))
            return []
        prompt = claim.prompt
        same_hashes = bool(claim.hash_id) and claim.hash_id == welcome.hash_id
        kind: DigestKind = "blocks" if same_hashes and not prompt.by_tokens else "tokens"
        try:
            digest = prompt.digest(kind)
        except (ValueError, TypeError, OverflowError) as error:
            claim.fail(ProtocolError(f"the prompt has no digest: {error}"))
            return []
        self._next_sequence += 1
        self._waiting[self._next_sequence] = claim
        return [Claim(self._next_sequence, claim.token, prompt.num_tokens, digest, kind)]

    def receive(self, frame: bytes) -> list[Request]:
        """Handle one frame of the peer; returns what to send now. A malformed one ends the
        session."""
        try:
            message = decode_reply(frame)
        except ProtocolError as error:
            self.fail(error)
            return []
        match message:
            case Welcome():
                return self._welcomed(message)
            case Refused():
                self.fail(IncompatiblePeerError(message.field, message.theirs, message.ours))
                return []
            case Granted():
                return self._granted(message)
            case Denied():
                return self._denied(message)

    def _welcomed(self, welcome: Welcome) -> list[Request]:
        difference = welcome.fingerprint.difference(self._fingerprint)
        if difference is not None:  # the peer should have refused us
            field, theirs, ours = difference
            self.fail(IncompatiblePeerError(field, str(ours), str(theirs)))
            return []
        self._welcome = welcome
        out: list[Request] = []
        while self._unsent:
            out += self._send(self._unsent.popleft(), welcome)
        return out

    def _denied(self, message: Denied) -> list[Request]:
        claim = self._waiting.pop(message.sequence, None)
        if claim is None:
            return []
        if message.reason != "not_introduced" or claim.asked_again:
            claim.fail(ClaimDeniedError(message.reason))
            return []
        # A server keeps a limited number of peers; it has forgotten us since the handshake.
        claim.asked_again = True
        self._unsent.append(claim)
        if self._welcome is None:  # another claim has begun the handshake already
            return []
        self._welcome = None
        self._introduction_ends = self._clock() + INTRODUCTION_S
        return [self.hello()]

    def _granted(self, message: Granted) -> list[Request]:
        claim = self._waiting.pop(message.sequence, None)
        if claim is None or self._welcome is None:
            return []
        if not claim.future.set_running_or_notify_cancel():
            # The caller has given up: end the lease.
            return [Release(claim.token, message.sequence)]
        now = self._clock()
        expires = now + message.lease_s
        self._leases += 1
        self._leased_until = max(self._leased_until, expires)
        claim.future.set_result(
            Grant(self.address, claim.token, message.sequence, self._welcome, message, now, expires)
        )
        return []

    def tick(self) -> list[Request]:
        """Fail the claims that are past their deadline; returns what to send now."""
        now = self._clock()
        if self._welcome is None and self.failure is None and now >= self._introduction_ends:
            self.fail(PeerUnreachableError(f"no answer to the handshake from {self.address}"))
        late = PeerUnreachableError(f"no answer from {self.address} in time")
        for claim in [claim for claim in self._unsent if claim.deadline <= now]:
            self._unsent.remove(claim)
            claim.fail(late)
        out: list[Request] = []
        for sequence in [n for n, claim in self._waiting.items() if claim.deadline <= now]:
            claim = self._waiting.pop(sequence)
            claim.fail(late)
            out.append(Release(claim.token, sequence))
        return out

    def deadline(self) -> float:
        """Seconds of the clock when `tick` next has something to do."""
        deadlines = [claim.deadline for claim in [*self._unsent, *self._waiting.values()]]
        if self._welcome is None and self.failure is None:
            deadlines.append(self._introduction_ends)
        return min(deadlines, default=float("inf"))

    def fail(self, error: OmniError) -> None:
        """End the session: every claim, also later ones, gets `error`."""
        self.failure = error
        self.failed_at = self._clock()
        for claim in [*self._unsent, *self._waiting.values()]:
            claim.fail(error)
        self._unsent.clear()
        self._waiting.clear()
