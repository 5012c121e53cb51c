# SPDX-License-Identifier: Apache-2.0
"""The serving side, driven frame by frame without a socket."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from omni_connector.handoff import server as server_module
from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.handoff.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    Reply,
    Request,
    encode,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import ControlServer, PeerConnection
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.packets import PACKAGE
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock

from ..kv.shapes import group_shape

TTL = 100.0
PENDING_TIMEOUT = 10.0
ALICE, BOB, CAROL = (PeerConnection(0, name) for name in (b"alice", b"bob", b"carol"))


class Served:
    """A server, its directory, and what it counted."""

    def __init__(
        self,
        clock: FakeClock,
        compatibility: CompatibilityKey,
        handshake_reply: HandshakeReply,
        prompt: Prompt,
    ) -> None:
        self.prompt = prompt
        self.counts: Counter[str] = Counter()
        self.directory = SlotDirectory(16, EngineContext(clock), TTL)
        self.server = ControlServer(
            compatibility=compatibility,
            handshake_reply=handshake_reply,
            directory=self.directory,
            clock=clock,
            pending_timeout=PENDING_TIMEOUT,
            count=lambda name: self.counts.update([name]),
        )

    def say(self, connection: PeerConnection, message: Request) -> list[Reply]:
        reply = self.server.receive(connection, encode(message))
        return [] if reply is None else [reply]

    def handoff(self, *, filled: bool = True, committed: bool = True) -> Handoff:
        handoff = self.directory.open(self.prompt, [[None, None], [None]], [0, 3])
        assert handoff is not None
        if committed:
            self.directory.commit(handoff)
        if filled:
            self.fill(handoff)
        return handoff

    def fill(self, handoff: Handoff) -> None:
        blocks = self.directory.copying(handoff, [(0, 0), (0, 1), (1, 3)])
        assert blocks is not None
        self.directory.filled(handoff, blocks)

    def request_for(self, handoff: Handoff, sequence: int = 1) -> LeaseRequest:
        digest = self.prompt.digest("tokens")
        return LeaseRequest(sequence, handoff.token, self.prompt.num_tokens, digest, "tokens")


@pytest.fixture
def served(
    clock: FakeClock,
    compatibility: CompatibilityKey,
    handshake_reply: HandshakeReply,
    make_prompt: Callable[..., Prompt],
) -> Served:
    return Served(clock, compatibility, handshake_reply, make_prompt())


@pytest.fixture
def introduced(
    served: Served, compatibility: CompatibilityKey, handshake_reply: HandshakeReply
) -> Served:
    assert served.say(ALICE, Handshake.of(compatibility)) == [handshake_reply]
    return served


def test_a_peer_of_another_protocol_is_refused(
    served: Served, compatibility: CompatibilityKey
) -> None:
    other = PROTOCOL_VERSION + 1
    answer = served.say(ALICE, msgspec.structs.replace(Handshake.of(compatibility), protocol=other))
    both = f"{PROTOCOL_VERSION} ({PACKAGE})", f"{other} ({PACKAGE})"
    assert answer == [Refused("protocol", *both)]
    assert served.counts["refused_peer"] == 1


@pytest.mark.parametrize(
    ("field", "theirs"),
    [("model", "other@1"), ("kv_dtype", "fp8"), ("kv_heads", 8), ("numerics", "long")],
)
def test_a_peer_that_differs_is_told_the_field_and_both_values(
    field: str, theirs: object, served: Served, compatibility: CompatibilityKey
) -> None:
    handshake = Handshake.of(msgspec.structs.replace(compatibility, **{field: theirs}))
    assert served.say(ALICE, handshake) == [
        Refused(field, str(compatibility.values()[field]), str(theirs))
    ]
    assert served.counts["refused_peer"] == 1
    # and it stays a stranger
    assert served.say(ALICE, served.request_for(served.handoff())) == [
        LeaseDenied(1, "not_introduced")
    ]


def test_a_server_that_learns_of_its_weights_asks_for_another_handshake(
    introduced: Served, compatibility: CompatibilityKey, handshake_reply: HandshakeReply
) -> None:
    handoff, waiting = introduced.handoff(), introduced.handoff(committed=False)
    introduced.say(ALICE, introduced.request_for(handoff, 5))
    assert introduced.say(ALICE, introduced.request_for(waiting, 3)) == []
    later = msgspec.structs.replace(compatibility, weight_files="f")
    assert introduced.server.learn(later) == [(ALICE, LeaseDenied(3, "not_introduced"))]
    assert not introduced.server.has_pending
    assert introduced.directory.usage()[2] == 1  # no lease ends
    request = introduced.request_for(handoff)
    assert introduced.say(ALICE, request) == [LeaseDenied(1, "not_introduced")]
    (reply,) = introduced.say(ALICE, Handshake.of(compatibility))  # which does not know its own
    assert reply == msgspec.structs.replace(handshake_reply, compatibility=later)
    (answer,) = introduced.say(ALICE, request)
    assert isinstance(answer, LeaseGranted)


def test_a_peer_with_other_files_is_refused_once_both_are_known(
    introduced: Served, compatibility: CompatibilityKey
) -> None:
    introduced.server.learn(msgspec.structs.replace(compatibility, weight_files="f"))
    theirs = msgspec.structs.replace(compatibility, weight_files="g")
    assert introduced.say(ALICE, Handshake.of(theirs)) == [Refused("weight_files", "f", "g")]
    assert introduced.say(ALICE, introduced.request_for(introduced.handoff())) == [
        LeaseDenied(1, "not_introduced")
    ]


def test_a_refusal_of_long_values_still_fits_the_wire(
    served: Served, compatibility: CompatibilityKey
) -> None:
    groups = (group_shape(kind="g" * 1000),) * 200
    (answer,) = served.say(
        ALICE, Handshake.of(msgspec.structs.replace(compatibility, groups=groups))
    )
    assert isinstance(answer, Refused)
    assert msgspec.msgpack.decode(encode(answer), type=Refused) == answer


def test_a_complete_handoff_is_granted_with_slots_and_generations(
    introduced: Served, clock: FakeClock
) -> None:
    handoff = introduced.handoff()
    clock.advance(30)
    assert introduced.say(ALICE, introduced.request_for(handoff, 5)) == [
        LeaseGranted(
            5,
            introduced.prompt.num_tokens,
            (0, 3),
            tuple(
                tuple(zip(slots.tolist(), generations.tolist(), strict=True))
                for slots, generations in zip(handoff.slots, handoff.generations, strict=True)
            ),
            TTL,
        )
    ]
    assert introduced.directory.usage()[2] == 1


class Interrupted:
    """A lock; between two sections that it guards, once, another thread does something.

    Attributes:
        after: how many sections come before that; None: it does nothing.
        does: what it does.
    """

    def __init__(self) -> None:
        self.after: int | None = None
        self.does: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.after is None:
            return
        self.after -= 1
        if self.after < 0:
            self.after = None
            self.does()


@pytest.mark.parametrize("sections", range(3))
def test_a_hand_off_that_ends_while_it_is_leased_is_granted_or_denied(
    introduced: Served, monkeypatch: pytest.MonkeyPatch, sections: int
) -> None:
    """The engine's thread ends it, as with a reset, between any two things that are looked at."""
    handoff = introduced.handoff()
    lock = Interrupted()
    monkeypatch.setattr(introduced.directory, "_lock", lock)
    lock.does = lambda: introduced.directory.close(handoff.token)
    lock.after = sections
    (answer,) = introduced.say(ALICE, introduced.request_for(handoff))
    assert isinstance(answer, LeaseDenied if sections == 0 else LeaseGranted)
    assert not introduced.counts["message_failed"]
    assert introduced.directory.usage()[0] == (0 if sections < 2 else 3)
    introduced.directory.close(handoff.token)
    assert introduced.directory.usage() == (0, 0, 0)
    # The peer is a peer still.
    (answer,) = introduced.say(ALICE, introduced.request_for(introduced.handoff(), 2))
    assert isinstance(answer, LeaseGranted)


def test_an_unknown_token_or_another_prompt_is_denied_even_before_the_handoff_is_complete(
    introduced: Served, make_prompt: Callable[..., Prompt]
) -> None:
    digest = introduced.prompt.digest("tokens")
    request = LeaseRequest(3, bytes(TOKEN_BYTES), introduced.prompt.num_tokens, digest, "tokens")
    assert introduced.say(ALICE, request) == [LeaseDenied(3, "unknown_token")]
    assert introduced.counts["denied_unknown_token"] == 1
    other = make_prompt(extra=("salt=other",))
    for filled in (True, False):
        handoff = introduced.handoff(filled=filled)
        request = LeaseRequest(3, handoff.token, other.num_tokens, other.digest("tokens"), "tokens")
        assert introduced.say(ALICE, request) == [LeaseDenied(3, "other_prompt")]
    assert introduced.counts["denied_other_prompt"] == 2
    assert not introduced.server.has_pending


def test_a_lease_request_waits_for_its_own_handoff_or_its_end(introduced: Served) -> None:
    slow = introduced.handoff(filled=False, committed=False)
    dropped, quick, released = (introduced.handoff(filled=False) for _ in range(3))
    for number, handoff in enumerate((slow, dropped, quick, released), start=1):
        assert introduced.say(ALICE, introduced.request_for(handoff, number)) == []
    assert introduced.server.recheck() == []
    introduced.directory.close(dropped.token)
    assert introduced.server.recheck() == [(ALICE, LeaseDenied(2, "unknown_token"))]
    assert introduced.say(ALICE, Release(released.token, 4)) == []
    introduced.fill(quick)
    introduced.fill(released)
    ((to, answer),) = introduced.server.recheck()
    assert to == ALICE
    assert isinstance(answer, LeaseGranted)
    assert answer.sequence == 3
    assert introduced.server.has_pending
    assert introduced.server.recheck() == []
    assert introduced.directory.usage()[2] == 1


def test_a_pending_lease_request_is_not_digested_again_until_it_can_be_granted(
    introduced: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoff = introduced.handoff(filled=False)
    introduced.say(ALICE, introduced.request_for(handoff))

    def digest(*_: object) -> bytes:
        raise AssertionError("digested while it has to wait")

    with monkeypatch.context() as patch:
        patch.setattr(Prompt, "digest", digest)
        assert introduced.server.recheck() == []
    introduced.fill(handoff)
    assert len(introduced.server.recheck()) == 1


def test_a_request_pending_past_its_timeout_is_denied(introduced: Served, clock: FakeClock) -> None:
    handoff = introduced.handoff(filled=False)
    introduced.say(ALICE, introduced.request_for(handoff, 4))
    clock.advance(PENDING_TIMEOUT - 0.1)
    assert introduced.server.recheck() == []
    clock.advance(0.1)
    assert introduced.server.recheck() == [(ALICE, LeaseDenied(4, "not_ready"))]
    assert not introduced.server.has_pending


def test_a_release_ends_the_lease_of_its_own_request_only(
    introduced: Served, compatibility: CompatibilityKey
) -> None:
    introduced.say(BOB, Handshake.of(compatibility))
    handoff = introduced.handoff()
    introduced.say(ALICE, introduced.request_for(handoff, 1))
    introduced.say(ALICE, introduced.request_for(handoff, 2))
    introduced.say(BOB, introduced.request_for(handoff, 1))
    assert introduced.directory.usage() == (3, 0, 3)
    for release in (Release(handoff.token, 1), Release(handoff.token, 1), Release(handoff.token)):
        introduced.say(ALICE, release)
    assert introduced.directory.usage() == (3, 0, 2)
    introduced.say(BOB, Release(handoff.token, 1))
    introduced.say(BOB, Release(handoff.token, 2))
    assert introduced.directory.usage() == (3, 0, 1)
    introduced.say(ALICE, Release(handoff.token, 2))
    assert introduced.directory.usage() == (0, 0, 0)


def test_who_will_never_lease_a_handoff_says_so(introduced: Served) -> None:
    handoff = introduced.handoff()
    assert introduced.say(BOB, Release(handoff.token)) == []
    assert introduced.directory.usage() == (0, 0, 0)


def test_pending_requests_are_bounded(introduced: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_PENDING", 2)
    handoff = introduced.handoff(filled=False)
    replies = [introduced.say(ALICE, introduced.request_for(handoff, n)) for n in range(3)]
    assert replies == [[], [], [LeaseDenied(2, "overloaded")]]
    introduced.fill(handoff)
    assert len(introduced.server.recheck()) == 2


@pytest.fixture
def few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_SESSIONS", 2)


@pytest.mark.usefixtures("few_sessions")
def test_sessions_are_bounded_and_those_in_use_stay(
    introduced: Served, compatibility: CompatibilityKey
) -> None:
    handoff = introduced.handoff()
    handshake = Handshake.of(compatibility)
    introduced.say(BOB, handshake)
    introduced.say(ALICE, introduced.request_for(handoff))  # Bob is idle for longer now
    introduced.say(CAROL, handshake)
    assert introduced.say(BOB, introduced.request_for(handoff)) == [
        LeaseDenied(1, "not_introduced")
    ]
    assert isinstance(introduced.say(ALICE, introduced.request_for(handoff))[0], LeaseGranted)
    assert isinstance(introduced.say(CAROL, introduced.request_for(handoff))[0], LeaseGranted)


@pytest.mark.usefixtures("few_sessions")
def test_names_are_those_of_one_socket_only(
    introduced: Served, compatibility: CompatibilityKey
) -> None:
    """A peer chooses its name, and at a TCP socket it may be anybody."""
    impostor = ALICE._replace(listener=1)
    request = introduced.request_for(introduced.handoff())
    assert introduced.say(impostor, request) == [LeaseDenied(1, "not_introduced")]
    for n in range(5):
        introduced.say(PeerConnection(1, bytes([n])), Handshake.of(compatibility))
    assert isinstance(introduced.say(ALICE, request)[0], LeaseGranted)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        b"\x81\xa4type\xa5\xff\xff\xff\xff\xff",
        encode(LeaseDenied(1, "a reply is no request")),
        encode(Release(bytes(TOKEN_BYTES)))[:-1],
        bytes(MAX_MESSAGE_BYTES + 1),
    ],
    ids=["empty", "text", "not utf-8", "reply", "truncated", "oversized"],
)
def test_malformed_frames_are_counted_and_ignored(frame: bytes, introduced: Served) -> None:
    assert introduced.server.receive(ALICE, frame) is None
    assert introduced.counts == {"malformed_message": 1}
    answer = introduced.say(ALICE, introduced.request_for(introduced.handoff()))
    assert isinstance(answer[0], LeaseGranted)


def test_a_message_of_an_unknown_kind_is_refused_by_name(introduced: Served) -> None:
    frame = msgspec.msgpack.encode({"type": "Prolong", "token": bytes(TOKEN_BYTES)})
    refused = introduced.server.receive(ALICE, frame)
    assert refused == Refused("message", f"unknown to {PACKAGE}", "Prolong")
    assert introduced.counts == {"malformed_message": 1}
    answer = introduced.say(ALICE, introduced.request_for(introduced.handoff()))
    assert isinstance(answer[0], LeaseGranted)


def test_a_peer_without_a_page_is_refused(served: Served, compatibility: CompatibilityKey) -> None:
    shape = msgspec.to_builtins(group_shape()) | {"pages": []}
    plain = msgspec.to_builtins(compatibility) | {"groups": [shape]}
    handshake = Handshake(PROTOCOL_VERSION, msgspec.Raw(msgspec.msgpack.encode(plain)))
    assert served.say(ALICE, handshake) == [
        Refused(
            "compatibility",
            PACKAGE,
            "malformed (an omni-connector that does not tell its version)",
        )
    ]
    assert served.counts == {"malformed_message": 1}


def test_a_message_that_cannot_be_handled_costs_its_sender_only(
    introduced: Served,
    compatibility: CompatibilityKey,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    introduced.say(BOB, Handshake.of(compatibility))
    request = introduced.request_for(introduced.handoff())
    with monkeypatch.context() as patch:
        patch.setattr(SlotDirectory, "lease", lambda *_: 1 // 0)
        for _ in range(3):
            (answer,) = introduced.say(ALICE, request)
            assert isinstance(answer, Refused | LeaseDenied)
    assert introduced.counts == {"message_failed": 1}  # after it she is a stranger
    assert introduced.say(ALICE, request) == [LeaseDenied(1, "not_introduced")]
    assert isinstance(introduced.say(BOB, request)[0], LeaseGranted)
    assert len([r for r in caplog.records if r.exc_info]) == 1


def test_pending_requests_that_cannot_be_answered_are_denied_and_logged_once(
    introduced: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handoffs = [introduced.handoff(filled=False) for _ in range(3)]
    for number, handoff in enumerate(handoffs, start=1):
        introduced.say(ALICE, introduced.request_for(handoff, number))
    introduced.fill(handoff)  # and so the others, of the same prompt
    lease = introduced.directory.lease

    def fail(token: bytes, *others: object) -> object:
        assert token == handoffs[2].token
        return lease(token, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(introduced.directory, "lease", fail)
    *denied, granted = (answer for _, answer in introduced.server.recheck())
    assert denied == [LeaseDenied(1, "not_ready"), LeaseDenied(2, "not_ready")]
    assert isinstance(granted, LeaseGranted)
    assert introduced.counts == {"message_failed": 2}
    assert len([record for record in caplog.records if record.exc_info]) == 1
