# SPDX-License-Identifier: Apache-2.0
"""The asking side of the control channel: one session with one serving peer.

Like the server it holds no socket: `PeerSession` is told what arrived and what time it is, and
returns what to send. Claims made before the peer has welcomed us wait for that.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
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
    Welcome,
    decode_reply,
)
from omni_connector.handoff.messages import (
    Request as ControlRequest,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey

INTRODUCTION_S: Final = 15.0


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
        token: name of the hand-off.
        sequence: of the claim, and so of the lease.
        welcome: what the peer told about itself; its `arenas` are where the slots are.
        granted: slots and generations.
        received: seconds of our clock when it came.
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
class _Waiting:
    token: bytes
    prompt: Prompt
    epoch: bytes
    hash_id: str
    deadline: float
    future: "Future[Grant]"
    asked_again: bool = False


class PeerSession:
    """Claims at one peer, from the introduction on.

    Args:
        address: the peer's control address.
        fingerprint: ours.
        clock: seconds, monotonic.
    """

    def __init__(
        self, address: str, fingerprint: CompatibilityKey, clock: Callable[[], float]
    ) -> None:
        self.address = address
        self._fingerprint = fingerprint
        self._clock = clock
        self._welcome: Welcome | None = None
        self._introduction_ends = clock() + INTRODUCTION_S
        self._next_sequence = 0
        self._unsent: deque[_Waiting] = deque()
        self._waiting: dict[int, _Waiting] = {}
        self._leases = 0
        self._leased_until = 0.0
        self.failure: OmniError | None = None

    @property
    def idle(self) -> bool:
        """Whether no claim waits, and no lease of ours is left at the peer."""
        leased = self._leases > 0 and self._clock() < self._leased_until
        return not (self._unsent or self._waiting or leased)

    def release(self, grant: Grant) -> Release:
        """What to send when a grant is done with."""
        self._leases = max(0, self._leases - 1)
        return Release(grant.token, grant.sequence)

    def hello(self) -> Hello:
        """What to send first."""
        return Hello.of(self._fingerprint)

    def claim(
        self,
        token: bytes,
        prompt: Prompt,
        *,
        epoch: bytes,
        hash_id: str,
        deadline: float,
        future: "Future[Grant]",
    ) -> list[ControlRequest]:
        """Ask for a hand-off; what to send now. `future` gets the grant or an `OmniError`.

        Args:
            epoch: the engine epoch that the reference was made in.
            hash_id: how our own block hashes are made.
        """
        waiting = _Waiting(token, prompt, epoch, hash_id, deadline, future)
        if self.failure is not None:
            fail_claim(future, self.failure)
            return []
        if self._welcome is None:
            self._unsent.append(waiting)
            return []
        return self._send(waiting, self._welcome)

    def _send(self, waiting: _Waiting, welcome: Welcome) -> list[ControlRequest]:
        if waiting.epoch != welcome.epoch:
            fail_claim(waiting.future, ClaimDeniedError("other_epoch"))
            return []
        prompt = waiting.prompt
        same_hashes = bool(waiting.hash_id) and waiting.hash_id == welcome.hash_id
        kind: DigestKind = "blocks" if same_hashes and not prompt.by_tokens else "tokens"
        try:
            digest = prompt.digest(kind)
        except (ValueError, TypeError, OverflowError) as error:
            fail_claim(waiting.future, ProtocolError(f"the prompt has no digest: {error}"))
            return []
        self._next_sequence += 1
        self._waiting[self._next_sequence] = waiting
        return [Claim(self._next_sequence, waiting.token, prompt.num_tokens, digest, kind)]

    def receive(self, frame: bytes) -> list[ControlRequest]:
        """Handle one frame from the peer; what to send now. A malformed one fails the session."""
        try:
            message = decode_reply(frame)
        except ProtocolError as error:
            self.fail(error)
            return []
        match message:
            case Welcome():
                difference = message.fingerprint.difference(self._fingerprint)
                if difference is not None:  # the peer should have seen it
                    field, theirs, ours = difference
                    self.fail(IncompatiblePeerError(field, str(ours), str(theirs)))
                    return []
                self._welcome = message
                out: list[ControlRequest] = []
                while self._unsent:
                    out += self._send(self._unsent.popleft(), message)
                return out
            case Refused():
                self.fail(IncompatiblePeerError(message.field, message.theirs, message.ours))
            case Granted():
                return self._granted(message)
            case Denied():
                return self._denied(message)
        return []

    def _denied(self, message: Denied) -> list[ControlRequest]:
        waiting = self._waiting.pop(message.sequence, None)
        if waiting is None:
            return []
        if message.reason != "not_introduced" or waiting.asked_again:
            fail_claim(waiting.future, ClaimDeniedError(message.reason))
            return []
        waiting.asked_again = True  # it keeps so many peers, and has forgotten us meanwhile
        self._unsent.append(waiting)
        if self._welcome is None:  # said already, for another claim
            return []
        self._welcome = None
        self._introduction_ends = self._clock() + INTRODUCTION_S
        return [self.hello()]

    def _granted(self, message: Granted) -> list[ControlRequest]:
        waiting = self._waiting.pop(message.sequence, None)
        if waiting is None or self._welcome is None:
            return []
        grant = Grant(
            address=self.address,
            token=waiting.token,
            sequence=message.sequence,
            welcome=self._welcome,
            granted=message,
            received=self._clock(),
            expires=self._clock() + message.lease_s,
        )
        if waiting.future.set_running_or_notify_cancel():
            self._leases += 1
            self._leased_until = max(self._leased_until, grant.expires)
            waiting.future.set_result(grant)
            return []
        # Nobody waits any more: give the slots back.
        return [Release(waiting.token, message.sequence)]

    def tick(self) -> list[ControlRequest]:
        """Fail what is past its deadline; what to send now."""
        now = self._clock()
        if self._welcome is None and self.failure is None and now >= self._introduction_ends:
            self.fail(PeerUnreachableError(f"no introduction from {self.address} in time"))
        for waiting in [waiting for waiting in self._unsent if waiting.deadline <= now]:
            self._unsent.remove(waiting)
            fail_claim(
                waiting.future, PeerUnreachableError(f"no answer from {self.address} in time")
            )
        out: list[ControlRequest] = []
        late = [n for n, waiting in self._waiting.items() if waiting.deadline <= now]
        for sequence in late:
            waiting = self._waiting.pop(sequence)
            fail_claim(
                waiting.future, PeerUnreachableError(f"no answer from {self.address} in time")
            )
            out.append(Release(waiting.token, sequence))
        return out

    def deadline(self) -> float:
        """Seconds of the clock when `tick` has something to do next."""
        deadlines = [waiting.deadline for waiting in [*self._unsent, *self._waiting.values()]]
        if self._welcome is None and self.failure is None:
            deadlines.append(self._introduction_ends)
        return min(deadlines, default=float("inf"))

    def fail(self, error: OmniError) -> None:
        """End the session: every claim, also later ones, gets `error`."""
        self.failure = error
        for waiting in [*self._unsent, *self._waiting.values()]:
            fail_claim(waiting.future, error)
        self._unsent.clear()
        self._waiting.clear()


def fail_claim(future: "Future[Grant]", error: OmniError) -> None:
    """End a claim, unless who made it has given it up."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
