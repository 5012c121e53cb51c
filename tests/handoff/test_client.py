# SPDX-License-Identifier: Apache-2.0
"""The asking side, driven frame by frame without a socket."""

from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import pytest

from omni_connector.errors import (
    IncompatiblePeerError,
    PeerUnreachableError,
    ProtocolError,
)
from omni_connector.handoff.client import (
    INTRODUCTION_S,
    Lease,
    LeaseDeniedError,
    PeerSession,
    PendingLease,
)
from omni_connector.handoff.messages import (
    TOKEN_BYTES,
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    Request,
    encode,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.testing import FakeClock

ADDRESS = "ipc:///nowhere"
GROUPS = (((0, 1), (1, 1)), ((2, 1),))


class Asking:
    """A session and what it does with lease requests."""

    def __init__(
        self,
        clock: FakeClock,
        compatibility: CompatibilityKey,
        handshake_reply: HandshakeReply,
        prompt: Prompt,
    ) -> None:
        self.clock = clock
        self.prompt = prompt
        self.handshake_reply = handshake_reply
        self.session = PeerSession(ADDRESS, compatibility, clock)
        self.asked = 0

    def request_lease(
        self,
        *,
        timeout: float = 30.0,
        epoch: bytes | None = None,
        hash_id: str | None = None,
        future: "Future[Lease] | None" = None,
    ) -> "tuple[Future[Lease], list[Request]]":
        self.asked += 1
        pending = PendingLease(
            bytes([self.asked]) * TOKEN_BYTES,
            self.prompt,
            self.handshake_reply.epoch if epoch is None else epoch,
            self.handshake_reply.hash_id if hash_id is None else hash_id,
            self.clock() + timeout,
            Future() if future is None else future,
        )
        return pending.future, self.session.request_lease(pending)

    def hear(self, message: HandshakeReply | Refused | LeaseGranted | LeaseDenied) -> list[Request]:
        return self.session.receive(encode(message))

    def granted(self, sequence: int, lease_s: float = 60.0) -> LeaseGranted:
        return LeaseGranted(sequence, self.prompt.num_tokens, (0, 0), GROUPS, lease_s)


@pytest.fixture
def asking(
    clock: FakeClock,
    compatibility: CompatibilityKey,
    handshake_reply: HandshakeReply,
    make_prompt: Callable[..., Prompt],
) -> Asking:
    return Asking(clock, compatibility, handshake_reply, make_prompt())


@pytest.fixture
def introduced(asking: Asking, handshake_reply: HandshakeReply) -> Asking:
    assert asking.hear(handshake_reply) == []
    return asking


def error_of(future: "Future[Lease]") -> BaseException:
    assert future.done()
    error = future.exception()
    assert error is not None
    return error


def test_lease_requests_before_the_reply_follow_it_in_order(
    asking: Asking, compatibility: CompatibilityKey, handshake_reply: HandshakeReply
) -> None:
    assert asking.session.handshake() == Handshake.of(compatibility)
    futures = []
    for _ in range(3):
        future, sent = asking.request_lease()
        assert sent == []
        futures.append(future)
    assert asking.hear(asking.granted(1)) == []  # nothing was asked for
    sent = asking.hear(handshake_reply)
    assert [type(message) for message in sent] == [LeaseRequest] * 3
    assert [message.token[0] for message in sent if isinstance(message, LeaseRequest)] == [1, 2, 3]
    assert not any(future.done() for future in futures)


def test_a_lease_says_where_the_slots_are_and_until_when(
    introduced: Asking, clock: FakeClock
) -> None:
    future, (pending,) = introduced.request_lease()
    assert isinstance(pending, LeaseRequest)
    clock.advance(2)
    granted = introduced.granted(pending.sequence, lease_s=60.0)
    assert introduced.hear(granted) == []
    assert future.result(0) == Lease(
        address=ADDRESS,
        token=pending.token,
        sequence=pending.sequence,
        handshake_reply=introduced.handshake_reply,
        granted=granted,
        received=clock(),
        expires=clock() + 60.0,
    )


@pytest.mark.parametrize(
    ("hash_id", "kind"), [(None, "blocks"), ("sha256:16:other", "tokens"), ("", "tokens")]
)
def test_block_hashes_are_compared_only_between_equal_hashers(
    hash_id: str | None, kind: str, asking: Asking, handshake_reply: HandshakeReply
) -> None:
    theirs = handshake_reply.hash_id if hash_id != "" else ""
    asking.hear(msgspec.structs.replace(handshake_reply, hash_id=theirs))
    _, (pending,) = asking.request_lease(hash_id=hash_id)
    assert isinstance(pending, LeaseRequest)
    assert pending.digest_kind == kind
    assert pending.digest == asking.prompt.digest(pending.digest_kind)
    assert pending.num_tokens == asking.prompt.num_tokens


@pytest.mark.parametrize("early", [True, False])
def test_a_reference_of_another_epoch_is_not_even_asked_for(
    early: bool, asking: Asking, handshake_reply: HandshakeReply
) -> None:
    if not early:
        asking.hear(handshake_reply)
    future, sent = asking.request_lease(epoch=b"x" * 16)
    if early:
        sent = asking.hear(handshake_reply)
    assert sent == []
    error = error_of(future)
    assert isinstance(error, LeaseDeniedError)
    assert error.reason == "other_epoch"


def test_each_request_has_its_answer_and_answers_to_nothing_are_ignored(
    introduced: Asking,
) -> None:
    futures = [introduced.request_lease()[0] for _ in range(3)]
    assert introduced.hear(introduced.granted(4)) == []
    assert introduced.hear(LeaseDenied(4, "x")) == []
    assert introduced.hear(introduced.granted(2)) == []
    assert introduced.hear(LeaseDenied(3, "unknown_token")) == []
    assert [each.done() for each in futures] == [False, True, True]
    assert futures[1].result(0).token[0] == 2
    error = error_of(futures[2])
    assert isinstance(error, LeaseDeniedError)
    assert error.reason == "unknown_token"
    assert introduced.session.failure is None
    for _ in range(2):  # and a second answer
        assert introduced.hear(introduced.granted(1)) == []
    assert futures[0].result(0).granted.sequence == 1


@pytest.mark.parametrize("when", ["before the reply", "before the lease"])
def test_a_cancelled_lease_request_gives_its_lease_back(
    when: str, asking: Asking, handshake_reply: HandshakeReply
) -> None:
    future, _ = asking.request_lease()
    if when == "before the reply":
        assert future.cancel()
    (pending,) = asking.hear(handshake_reply)
    assert isinstance(pending, LeaseRequest)
    if when == "before the lease":
        assert future.cancel()
    assert asking.hear(asking.granted(pending.sequence)) == [
        Release(pending.token, pending.sequence)
    ]
    assert future.cancelled()


@pytest.mark.parametrize("end", ["denied", "late", "failed", "other epoch"])
def test_a_cancelled_lease_request_may_end_in_any_way(
    end: str, asking: Asking, handshake_reply: HandshakeReply
) -> None:
    future, _ = asking.request_lease(timeout=1.0, epoch=b"x" * 16 if end == "other epoch" else None)
    assert future.cancel()
    asking.hear(handshake_reply)
    if end == "denied":
        asking.hear(LeaseDenied(1, "x"))
    elif end == "late":
        asking.clock.advance(1)
        asking.session.tick()
    asking.session.fail(PeerUnreachableError("gone"))
    assert future.cancelled()


def test_a_lease_request_past_its_deadline_fails_and_is_released(
    introduced: Asking, clock: FakeClock
) -> None:
    (early, (pending,)), (later, _) = (
        introduced.request_lease(timeout=1.0),
        introduced.request_lease(timeout=2.0),
    )
    assert isinstance(pending, LeaseRequest)
    assert introduced.session.deadline() == clock() + 1.0
    clock.advance(0.9)
    assert introduced.session.tick() == []
    clock.advance(0.1)
    assert introduced.session.tick() == [Release(pending.token, pending.sequence)]
    error = error_of(early)
    assert isinstance(error, PeerUnreachableError)
    assert ADDRESS in str(error)
    assert not later.done()
    assert introduced.session.failure is None
    assert introduced.hear(introduced.granted(pending.sequence)) == []  # too late: released already


def test_a_deadline_before_the_reply_is_kept_too(
    asking: Asking, handshake_reply: HandshakeReply
) -> None:
    short, _ = asking.request_lease(timeout=1.0)
    patient, _ = asking.request_lease(timeout=4.0)
    assert asking.session.deadline() == asking.clock() + 1.0
    asking.clock.advance(1.0)
    assert asking.session.tick() == []
    assert isinstance(error_of(short), PeerUnreachableError)
    (sent,) = asking.hear(handshake_reply)
    assert isinstance(sent, LeaseRequest)
    assert sent.token[0] == 2
    assert not patient.done()


def test_an_introduction_that_does_not_come_fails_the_session(asking: Asking) -> None:
    future, _ = asking.request_lease()
    assert asking.session.deadline() == asking.clock() + INTRODUCTION_S
    asking.clock.advance(INTRODUCTION_S)
    assert asking.session.tick() == []
    assert isinstance(error_of(future), PeerUnreachableError)
    assert isinstance(asking.session.failure, PeerUnreachableError)
    assert asking.session.deadline() == float("inf")


def test_a_refusal_names_the_field_as_seen_from_here(asking: Asking) -> None:
    future, _ = asking.request_lease()
    assert asking.hear(Refused("dtype", "of the server", "of the client")) == []
    for error in (error_of(future), error_of(asking.request_lease()[0])):
        assert isinstance(error, IncompatiblePeerError)
        assert (error.field, error.ours, error.theirs) == (
            "dtype",
            "of the client",
            "of the server",
        )


@pytest.mark.parametrize(
    "frame", [b"", b"garbage", b"\x81\xa4type\xa5\xff\xff\xff\xff\xff", encode(Release(b"t" * 16))]
)
def test_a_malformed_reply_fails_the_session_and_all_its_lease_requests(
    frame: bytes, asking: Asking, handshake_reply: HandshakeReply
) -> None:
    unsent, _ = asking.request_lease()
    assert asking.session.receive(frame) == []
    assert isinstance(error_of(unsent), ProtocolError)

    other = Asking(asking.clock, asking.session._compatibility, handshake_reply, asking.prompt)
    other.hear(handshake_reply)
    assert other.session.deadline() == float("inf")
    sent, _ = other.request_lease()
    assert other.session.receive(frame) == []
    assert isinstance(error_of(sent), ProtocolError)
    assert other.hear(handshake_reply) == []
    after, messages = other.request_lease()
    assert messages == []
    assert error_of(after) is error_of(sent)
    assert other.session.deadline() == float("inf")


def test_a_digest_that_fails_loses_no_other_lease_request(
    asking: Asking, handshake_reply: HandshakeReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures = [asking.request_lease()[0] for _ in range(3)]
    digests = iter([b"d" * 32, TypeError("no prompt"), b"d" * 32])

    def digest(*_: object) -> bytes:
        found = next(digests)
        if isinstance(found, bytes):
            return found
        raise found

    monkeypatch.setattr(Prompt, "digest", digest)
    sent = asking.hear(handshake_reply)
    assert [message.token[0] for message in sent if isinstance(message, LeaseRequest)] == [1, 3]
    assert [future.done() for future in futures] == [False, True, False]
    assert isinstance(error_of(futures[1]), ProtocolError)


def test_a_peer_that_has_forgotten_us_is_introduced_to_again(
    introduced: Asking, handshake_reply: HandshakeReply
) -> None:
    (one, (first,)), (two, (second,)) = introduced.request_lease(), introduced.request_lease()
    assert isinstance(first, LeaseRequest)
    assert isinstance(second, LeaseRequest)
    assert introduced.hear(LeaseDenied(first.sequence, "not_introduced")) == [
        introduced.session.handshake()
    ]
    assert introduced.hear(LeaseDenied(second.sequence, "not_introduced")) == []
    third, fourth = introduced.hear(handshake_reply)
    assert isinstance(third, LeaseRequest)
    assert isinstance(fourth, LeaseRequest)
    assert [third.token, fourth.token] == [first.token, second.token]
    introduced.hear(introduced.granted(third.sequence))
    assert one.result(0).token == first.token
    assert introduced.hear(LeaseDenied(fourth.sequence, "not_introduced")) == []  # once is enough
    assert isinstance(error_of(two), LeaseDeniedError)


def test_a_session_without_requests_and_leases_is_idle(
    introduced: Asking, clock: FakeClock
) -> None:
    assert introduced.session.idle
    requests = [introduced.request_lease(), introduced.request_lease()]
    assert not introduced.session.idle
    for _, (pending,) in requests:
        assert isinstance(pending, LeaseRequest)
        introduced.hear(introduced.granted(pending.sequence, lease_s=60.0))
    first, second = (future.result(0) for future, _ in requests)
    assert not introduced.session.idle
    assert introduced.session.release(first) == Release(first.token, first.sequence)
    assert not introduced.session.idle
    assert introduced.session.release(second) == Release(second.token, second.sequence)
    assert introduced.session.idle
    _, (pending,) = introduced.request_lease()
    assert isinstance(pending, LeaseRequest)
    introduced.hear(introduced.granted(pending.sequence, lease_s=60.0))
    assert not introduced.session.idle
    clock.advance(60.0)
    assert introduced.session.idle  # there is nothing left to be released


def _with_files(reply: HandshakeReply, files: str) -> HandshakeReply:
    theirs = msgspec.structs.replace(reply.compatibility, weight_files=files)
    return msgspec.structs.replace(reply, compatibility=theirs)


@pytest.mark.parametrize("theirs", ["f", "other", ""], ids=["equal", "differ", "untold"])
@pytest.mark.parametrize("early", [True, False])
def test_a_session_goes_on_unless_its_engine_learns_that_the_peer_has_other_files(
    asking: Asking,
    compatibility: CompatibilityKey,
    handshake_reply: HandshakeReply,
    theirs: str,
    early: bool,
) -> None:
    future, _ = asking.request_lease()
    reply = _with_files(handshake_reply, theirs) if theirs else handshake_reply
    learned = msgspec.structs.replace(compatibility, weight_files="f")
    if not early:
        asking.hear(reply)
    asking.session.learn(learned)
    assert asking.session.handshake() == Handshake.of(learned)
    if early:
        assert not future.done()
        asking.hear(reply)
    if theirs == "other":
        error = error_of(future)
        assert isinstance(error, IncompatiblePeerError)
        assert (error.field, error.ours, error.theirs) == ("weight_files", "f", "other")
    else:
        asking.hear(asking.granted(1))
        assert future.result().sequence == 1


def test_a_lease_that_comes_while_we_are_introduced_again_is_taken(
    introduced: Asking, handshake_reply: HandshakeReply
) -> None:
    """The peer has forgotten us, and grants what had waited there for its copies."""
    (waited, _), (denied, _) = introduced.request_lease(), introduced.request_lease()
    assert introduced.hear(LeaseDenied(2, "not_introduced")) == [introduced.session.handshake()]
    assert introduced.hear(introduced.granted(1)) == []
    assert waited.result(0).handshake_reply == handshake_reply
    later, sent = introduced.request_lease()
    assert sent == []
    assert len(introduced.hear(handshake_reply)) == 2
    assert not denied.done()
    assert not later.done()
