# SPDX-License-Identifier: Apache-2.0
"""The asking side, driven frame by frame without a socket."""

from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import pytest

from omni_connector.errors import (
    IncompatiblePeerError,
    OmniError,
    PeerUnreachableError,
    ProtocolError,
)
from omni_connector.handoff.client import (
    INTRODUCTION_S,
    ClaimDeniedError,
    Grant,
    PeerSession,
    PendingClaim,
)
from omni_connector.handoff.messages import (
    TOKEN_BYTES,
    Claim,
    Denied,
    Granted,
    Hello,
    Refused,
    Release,
    Request,
    Welcome,
    encode,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.testing import FakeClock

ADDRESS = "ipc:///nowhere"
GROUPS = (((0, 1), (1, 1)), ((2, 1),))


class Asking:
    """A session and what it does with claims."""

    def __init__(
        self, clock: FakeClock, fingerprint: CompatibilityKey, welcome: Welcome, prompt: Prompt
    ) -> None:
        self.clock = clock
        self.prompt = prompt
        self.welcome = welcome
        self.session = PeerSession(ADDRESS, fingerprint, clock)
        self.claims = 0

    def claim(
        self,
        *,
        timeout: float = 30.0,
        epoch: bytes | None = None,
        hash_id: str | None = None,
        future: "Future[Grant] | None" = None,
    ) -> "tuple[Future[Grant], list[Request]]":
        self.claims += 1
        claim = PendingClaim(
            bytes([self.claims]) * TOKEN_BYTES,
            self.prompt,
            self.welcome.epoch if epoch is None else epoch,
            self.welcome.hash_id if hash_id is None else hash_id,
            self.clock() + timeout,
            Future() if future is None else future,
        )
        return claim.future, self.session.claim(claim)

    def hear(self, message: Welcome | Refused | Granted | Denied) -> list[Request]:
        return self.session.receive(encode(message))

    def granted(self, sequence: int, lease_s: float = 60.0) -> Granted:
        return Granted(sequence, self.prompt.num_tokens, (0, 0), GROUPS, lease_s)


@pytest.fixture
def asking(
    clock: FakeClock,
    fingerprint: CompatibilityKey,
    welcome: Welcome,
    make_prompt: Callable[..., Prompt],
) -> Asking:
    return Asking(clock, fingerprint, welcome, make_prompt())


@pytest.fixture
def welcomed(asking: Asking, welcome: Welcome) -> Asking:
    assert asking.hear(welcome) == []
    return asking


def error_of(future: "Future[Grant]") -> BaseException:
    assert future.done()
    error = future.exception()
    assert error is not None
    return error


def test_the_session_opens_with_protocol_and_fingerprint(
    asking: Asking, fingerprint: CompatibilityKey
) -> None:
    assert asking.session.hello() == Hello.of(fingerprint)


def test_claims_before_the_welcome_follow_it_in_order(asking: Asking, welcome: Welcome) -> None:
    futures = []
    for _ in range(3):
        future, sent = asking.claim()
        assert sent == []
        futures.append(future)
    sent = asking.hear(welcome)
    assert [type(message) for message in sent] == [Claim] * 3
    assert [message.token[0] for message in sent if isinstance(message, Claim)] == [1, 2, 3]
    assert not any(future.done() for future in futures)


def test_a_grant_says_where_the_slots_are_and_until_when(
    welcomed: Asking, clock: FakeClock
) -> None:
    future, (claim,) = welcomed.claim()
    assert isinstance(claim, Claim)
    clock.advance(2)
    granted = welcomed.granted(claim.sequence, lease_s=60.0)
    assert welcomed.hear(granted) == []
    assert future.result(0) == Grant(
        address=ADDRESS,
        token=claim.token,
        sequence=claim.sequence,
        welcome=welcomed.welcome,
        granted=granted,
        received=clock(),
        expires=clock() + 60.0,
    )


def test_answers_find_their_claims_in_any_order(welcomed: Asking) -> None:
    (first, (one,)), (second, (two,)) = welcomed.claim(), welcomed.claim()
    assert isinstance(one, Claim)
    assert isinstance(two, Claim)
    assert one.sequence != two.sequence
    welcomed.hear(welcomed.granted(two.sequence))
    assert not first.done()
    assert second.result(0).token == two.token
    welcomed.hear(welcomed.granted(one.sequence))
    assert first.result(0).token == one.token


@pytest.mark.parametrize(
    ("hash_id", "kind"), [(None, "blocks"), ("sha256:16:other", "tokens"), ("", "tokens")]
)
def test_block_hashes_are_compared_only_between_equal_hashers(
    hash_id: str | None, kind: str, welcomed: Asking
) -> None:
    _, (claim,) = welcomed.claim(hash_id=hash_id)
    assert isinstance(claim, Claim)
    assert claim.digest_kind == kind
    assert claim.digest == welcomed.prompt.digest(claim.digest_kind)
    assert claim.num_tokens == welcomed.prompt.num_tokens


def test_two_sides_that_do_not_hash_compare_tokens(asking: Asking, welcome: Welcome) -> None:
    asking.hear(msgspec.structs.replace(welcome, hash_id=""))
    _, (claim,) = asking.claim(hash_id="")
    assert isinstance(claim, Claim)
    assert claim.digest_kind == "tokens"


@pytest.mark.parametrize("early", [True, False])
def test_a_reference_of_another_epoch_is_not_even_asked_for(
    early: bool, asking: Asking, welcome: Welcome
) -> None:
    if not early:
        asking.hear(welcome)
    future, sent = asking.claim(epoch=b"x" * 16)
    if early:
        sent = asking.hear(welcome)
    assert sent == []
    error = error_of(future)
    assert isinstance(error, ClaimDeniedError)
    assert error.reason == "other_epoch"


def test_a_denial_carries_the_peers_reason(welcomed: Asking) -> None:
    future, (claim,) = welcomed.claim()
    assert isinstance(claim, Claim)
    assert welcomed.hear(Denied(claim.sequence, "unknown_token")) == []
    error = error_of(future)
    assert isinstance(error, ClaimDeniedError)
    assert error.reason == "unknown_token"
    assert welcomed.session.failure is None


def test_answers_to_nothing_that_was_asked_are_ignored(welcomed: Asking) -> None:
    future, (claim,) = welcomed.claim()
    assert isinstance(claim, Claim)
    other = claim.sequence + 1
    assert welcomed.hear(welcomed.granted(other)) == []
    assert welcomed.hear(Denied(other, "x")) == []
    assert not future.done()
    welcomed.hear(welcomed.granted(claim.sequence))
    assert welcomed.hear(welcomed.granted(claim.sequence)) == []  # and a second answer
    assert future.result(0).granted.sequence == claim.sequence


def test_a_grant_before_the_welcome_is_ignored(asking: Asking) -> None:
    future, _ = asking.claim()
    assert asking.hear(asking.granted(1)) == []
    assert not future.done()


@pytest.mark.parametrize("when", ["before the welcome", "before the grant"])
def test_a_cancelled_claim_gives_its_grant_back(
    when: str, asking: Asking, welcome: Welcome
) -> None:
    future, _ = asking.claim()
    if when == "before the welcome":
        assert future.cancel()
    (claim,) = asking.hear(welcome)
    assert isinstance(claim, Claim)
    if when == "before the grant":
        assert future.cancel()
    assert asking.hear(asking.granted(claim.sequence)) == [Release(claim.token, claim.sequence)]
    assert future.cancelled()


@pytest.mark.parametrize("end", ["denied", "late", "failed", "other epoch"])
def test_a_cancelled_claim_may_end_in_any_way(end: str, asking: Asking, welcome: Welcome) -> None:
    future, _ = asking.claim(timeout=1.0, epoch=b"x" * 16 if end == "other epoch" else None)
    assert future.cancel()
    asking.hear(welcome)
    if end == "denied":
        asking.hear(Denied(1, "x"))
    elif end == "late":
        asking.clock.advance(1)
        asking.session.tick()
    asking.session.fail(PeerUnreachableError("gone"))
    assert future.cancelled()


def test_a_claim_past_its_deadline_fails_and_is_released(
    welcomed: Asking, clock: FakeClock
) -> None:
    (early, (claim,)), (later, _) = welcomed.claim(timeout=1.0), welcomed.claim(timeout=2.0)
    assert isinstance(claim, Claim)
    assert welcomed.session.deadline() == clock() + 1.0
    clock.advance(0.9)
    assert welcomed.session.tick() == []
    clock.advance(0.1)
    assert welcomed.session.tick() == [Release(claim.token, claim.sequence)]
    error = error_of(early)
    assert isinstance(error, PeerUnreachableError)
    assert ADDRESS in str(error)
    assert not later.done()
    assert welcomed.session.failure is None
    assert welcomed.hear(welcomed.granted(claim.sequence)) == []  # too late: released already


def test_a_deadline_before_the_welcome_is_kept_too(asking: Asking, welcome: Welcome) -> None:
    short, _ = asking.claim(timeout=1.0)
    patient, _ = asking.claim(timeout=4.0)
    assert asking.session.deadline() == asking.clock() + 1.0
    asking.clock.advance(1.0)
    assert asking.session.tick() == []
    assert isinstance(error_of(short), PeerUnreachableError)
    (sent,) = asking.hear(welcome)
    assert isinstance(sent, Claim)
    assert sent.token[0] == 2
    assert not patient.done()


def test_an_introduction_that_does_not_come_fails_the_session(asking: Asking) -> None:
    future, _ = asking.claim()
    assert asking.session.deadline() == asking.clock() + INTRODUCTION_S
    asking.clock.advance(INTRODUCTION_S)
    assert asking.session.tick() == []
    assert isinstance(error_of(future), PeerUnreachableError)
    assert isinstance(asking.session.failure, PeerUnreachableError)
    assert asking.session.deadline() == float("inf")


def test_an_idle_welcomed_session_has_nothing_to_do(welcomed: Asking, clock: FakeClock) -> None:
    assert welcomed.session.deadline() == float("inf")
    clock.advance(10 * INTRODUCTION_S)
    assert welcomed.session.tick() == []
    assert welcomed.session.failure is None


def test_a_refusal_names_the_field_as_seen_from_here(asking: Asking) -> None:
    future, _ = asking.claim()
    asking.hear(Refused("dtype", "of the server", "of the client"))
    for error in (error_of(future), error_of(asking.claim()[0])):
        assert isinstance(error, IncompatiblePeerError)
        assert (error.field, error.ours, error.theirs) == (
            "dtype",
            "of the client",
            "of the server",
        )


@pytest.mark.parametrize(
    "frame", [b"", b"garbage", b"\x81\xa4type\xa5\xff\xff\xff\xff\xff", encode(Release(b"t" * 16))]
)
def test_a_malformed_reply_fails_the_session_and_all_its_claims(
    frame: bytes, asking: Asking, welcome: Welcome
) -> None:
    unsent, _ = asking.claim()
    assert asking.session.receive(frame) == []
    assert isinstance(error_of(unsent), ProtocolError)

    other = Asking(asking.clock, asking.session._fingerprint, welcome, asking.prompt)
    other.hear(welcome)
    sent, _ = other.claim()
    assert other.session.receive(frame) == []
    assert isinstance(error_of(sent), ProtocolError)
    after, messages = other.claim()
    assert messages == []
    assert isinstance(error_of(after), ProtocolError)


def test_a_failed_session_fails_claims_sent_unsent_and_later(
    asking: Asking, welcome: Welcome
) -> None:
    unsent, _ = asking.claim()
    failure: OmniError = PeerUnreachableError("gone")
    asking.session.fail(failure)
    assert asking.hear(welcome) == []
    later, sent = asking.claim()
    assert sent == []
    assert error_of(unsent) is error_of(later) is failure
    assert asking.session.deadline() == float("inf")


def test_a_digest_that_fails_loses_no_other_claim(
    asking: Asking, welcome: Welcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures = [asking.claim()[0] for _ in range(3)]
    digests = iter([b"d" * 32, TypeError("no prompt"), b"d" * 32])

    def digest(*_: object) -> bytes:
        found = next(digests)
        if isinstance(found, bytes):
            return found
        raise found

    monkeypatch.setattr(Prompt, "digest", digest)
    sent = asking.hear(welcome)
    assert [message.token[0] for message in sent if isinstance(message, Claim)] == [1, 3]
    assert [future.done() for future in futures] == [False, True, False]
    assert isinstance(error_of(futures[1]), ProtocolError)


def test_a_peer_that_has_forgotten_us_is_introduced_to_again(
    welcomed: Asking, welcome: Welcome
) -> None:
    (one, (first,)), (two, (second,)) = welcomed.claim(), welcomed.claim()
    assert isinstance(first, Claim)
    assert isinstance(second, Claim)
    assert welcomed.hear(Denied(first.sequence, "not_introduced")) == [welcomed.session.hello()]
    assert welcomed.hear(Denied(second.sequence, "not_introduced")) == []
    third, fourth = welcomed.hear(welcome)
    assert isinstance(third, Claim)
    assert isinstance(fourth, Claim)
    assert [third.token, fourth.token] == [first.token, second.token]
    welcomed.hear(welcomed.granted(third.sequence))
    assert one.result(0).token == first.token
    assert welcomed.hear(Denied(fourth.sequence, "not_introduced")) == []  # once is enough
    assert isinstance(error_of(two), ClaimDeniedError)


def test_a_session_is_idle_without_claims_and_leases(welcomed: Asking, clock: FakeClock) -> None:
    assert welcomed.session.idle
    claims = [welcomed.claim(), welcomed.claim()]
    assert not welcomed.session.idle
    for _, (claim,) in claims:
        assert isinstance(claim, Claim)
        welcomed.hear(welcomed.granted(claim.sequence, lease_s=60.0))
    first, second = (future.result(0) for future, _ in claims)
    assert not welcomed.session.idle
    assert welcomed.session.release(first) == Release(first.token, first.sequence)
    assert not welcomed.session.idle
    assert welcomed.session.release(second) == Release(second.token, second.sequence)
    assert welcomed.session.idle
    _, (claim,) = welcomed.claim()
    assert isinstance(claim, Claim)
    welcomed.hear(welcomed.granted(claim.sequence, lease_s=60.0))
    assert not welcomed.session.idle
    clock.advance(60.0)
    assert welcomed.session.idle  # there is nothing left to be released
