# SPDX-License-Identifier: Apache-2.0
"""What the decode side does with a lease: until when it is used, and when it is let go of."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.copy.held_blocks import CopyLedger
from omni_connector.copy.jobs import LoadSpec
from omni_connector.handoff.client import Lease, LeaseDeniedError, PendingLease
from omni_connector.handoff.messages import HandshakeReply, LeaseGranted
from omni_connector.handoff.params import RemotePrefill
from omni_connector.handoff.prompt import Prompt, PromptRules
from omni_connector.handoff.receiver import HandoffReceiver
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock

TIMEOUT = 30.0
TOKENS = 70


REMOTE = RemotePrefill(
    remote_engine_id="p", omni_version=1, omni_epoch="ee" * 16, omni_token="dd" * 16
)


@dataclass
class Channel:
    """Notes what is sent to peers."""

    asked: list[PendingLease] = field(default_factory=list)
    released: list[Lease] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)

    def request_lease(self, address: str, pending: PendingLease) -> None:
        self.asked.append(pending)

    def release(self, lease: Lease) -> None:
        self.released.append(lease)

    def drop(self, address: str, token: bytes) -> None:
        self.dropped.append(token)


@dataclass
class Block:
    block_id: int
    is_null: bool = False
    ref_cnt: int = 1


class Blocks:
    """vLLM's blocks, as a pool and as those of one request."""

    def __init__(self, *tables: Sequence[int]) -> None:
        self.blocks = [Block(n) for n in range(40)]
        self._tables = tables

    def touch(self, blocks: Iterable[Block]) -> None:
        for each in blocks:
            each.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for each in blocks:
            each.ref_cnt -= 1

    def get_block_ids(self) -> Sequence[Sequence[int]]:
        return self._tables


@dataclass
class Stats:
    failed: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, amount: int = 1) -> None:
        pass

    def time(self, name: str, seconds: float) -> None:
        pass

    def fail(self, kind: str, number: int = 1) -> None:
        self.failed[kind] += number


class Decode:
    """A receiver, with one request that has a lease on a prompt of `TOKENS` tokens."""

    def __init__(self, reply: HandshakeReply, clock: FakeClock) -> None:
        self.reply = reply
        self.clock = clock
        self.channel = Channel()
        self.stats = Stats()
        self.ledger = CopyLedger(Blocks(), 1, clock)
        self.receiver = HandoffReceiver(
            rules=PromptRules(lambda *_: None),
            channel=self.channel,  # type: ignore[arg-type]
            ledger=self.ledger,
            address_of=lambda remote: "tcp://prefill:1",
            compatibility=reply.compatibility,
            group_ids=(0, 1),
            hash_id="",
            load_timeout=TIMEOUT,
            min_tokens=TOKENS,
            context=EngineContext(clock, stats=self.stats),  # type: ignore[arg-type]
        )
        self.request: Any = SimpleNamespace(request_id="r")
        self.work: Any = SimpleNamespace(loads={}, saves={})
        self.step: Any = SimpleNamespace(work=self.work, busy=True)

    def arrives(self) -> PendingLease:
        """A request that was prefilled elsewhere; what is sent for it."""
        prompt = Prompt(token_ids=range(TOKENS), num_tokens=TOKENS)
        self.fetch = self.receiver.add(self.request, REMOTE, prompt)
        self.receiver.step(self.step)  # an engine that computes asks only once
        return self.channel.asked[-1]

    def lease(self, lease_s: float) -> Lease:
        """The peer grants it."""
        return self.grant(self.arrives(), lease_s)

    def grant(self, pending: PendingLease, lease_s: float) -> Lease:
        """The peer's answer has come."""
        needed = [group.needed(TOKENS) for group in self.reply.compatibility.groups]
        granted = LeaseGranted(
            1,
            TOKENS,
            tuple(each.start for each in needed),
            tuple(tuple((slot, 1) for slot in each) for each in needed),
            lease_s,
        )
        now = self.clock()
        lease = Lease("tcp://prefill:1", b"t" * 16, 1, self.reply, granted, now, now + lease_s)
        pending.future.set_result(lease)
        return lease

    def matched(self) -> int | None:
        return self.receiver.matched_tokens(self.fetch, 0)

    def load(self, num_external: int = TOKENS) -> LoadSpec | None:
        """vLLM allocates blocks; the job that the next step starts."""
        blocks: Any = Blocks(range(1, 11), range(11, 21))
        self.receiver.load(self.fetch, blocks, num_external)
        self.receiver.step(self.step)
        return next(iter(self.work.loads.values()), None)


@pytest.fixture
def decode(handshake_reply: HandshakeReply, clock: FakeClock) -> Decode:
    return Decode(handshake_reply, clock)


@pytest.mark.parametrize(
    ("lease_s", "margin"), [(100.0, 1.0), (4.0, 1.0), (2.0, 0.5)], ids=["long", "limit", "short"]
)
def test_no_load_starts_shortly_before_the_end_of_its_lease(
    decode: Decode, lease_s: float, margin: float
) -> None:
    lease = decode.lease(lease_s)
    decode.clock.advance(lease_s - 1.01 * margin)
    assert decode.matched() == TOKENS
    decode.clock.advance(0.02 * margin)
    assert decode.matched() == 0
    assert decode.stats.failed == {"lease_expired": 1}
    assert decode.channel.released == [lease]


@pytest.mark.parametrize("waited", [0.0, 90.0])
def test_a_load_lasts_no_longer_than_its_lease(decode: Decode, waited: float) -> None:
    decode.lease(100.0)
    decode.clock.advance(waited)
    assert decode.matched() == TOKENS
    spec = decode.load()
    assert spec is not None
    assert spec.timeout == TIMEOUT
    assert spec.lease is not None
    decode.clock.advance(5.0)  # until a worker begins
    assert spec.lease.on(decode.clock) == decode.clock() + 95.0 - waited


def test_an_engine_that_was_idle_asks_again_and_holds_the_old_lease_meanwhile(
    decode: Decode,
) -> None:
    lease = decode.lease(100.0)
    decode.receiver.step_ended()
    decode.clock.advance(0.49)
    assert decode.matched() == TOKENS
    decode.clock.advance(0.02)
    assert decode.matched() is None
    assert len(decode.channel.asked) == 2
    assert not decode.channel.released
    decode.receiver.finish(decode.fetch)
    assert decode.channel.released == [lease]


def test_without_an_answer_the_prompt_is_computed_here(decode: Decode) -> None:
    decode.arrives()
    decode.clock.advance(TIMEOUT + 0.99)
    assert decode.matched() is None
    decode.clock.advance(0.02)
    assert decode.matched() == 0
    assert decode.stats.failed == {"peer_unreachable": 1}


@pytest.mark.parametrize(
    ("reason", "kind"), [("other_prompt", "other_prompt"), ("a word of its own", "denied")]
)
def test_only_known_words_of_a_peer_become_labels(decode: Decode, reason: str, kind: str) -> None:
    decode.arrives().fail(LeaseDeniedError(reason))
    assert decode.matched() == 0
    assert decode.stats.failed == {kind: 1}


def test_what_is_granted_must_be_what_the_prompt_needs(
    decode: Decode, compatibility: CompatibilityKey
) -> None:
    pending = decode.arrives()
    needed = [group.needed(TOKENS + 1) for group in compatibility.groups]
    granted = LeaseGranted(
        1,
        TOKENS,
        tuple(each.start for each in needed),
        tuple(tuple((slot, 1) for slot in each)[:-1] for each in needed),
        100.0,
    )
    now = decode.clock()
    lease = Lease("tcp://prefill:1", b"t" * 16, 1, decode.reply, granted, now, now + 100)
    pending.future.set_result(lease)
    assert decode.matched() == 0
    assert decode.stats.failed == {"malformed_answer": 1}
    assert decode.channel.released == [lease]


def test_ten_answers_in_succession_that_come_too_late_are_enough(decode: Decode) -> None:
    decode.arrives()
    decode.receiver.step_ended()
    for number in range(1, 11):
        decode.clock.advance(0.51)
        decode.grant(decode.channel.asked[-1], 100.0)
        assert decode.matched() == (0 if number == 10 else None)
    assert len(decode.channel.asked) == 10
    assert decode.stats.failed == {"peer_unreachable": 1}


def test_a_request_that_has_waited_for_long_for_something_else_asks_again(decode: Decode) -> None:
    decode.lease(100.0)
    decode.receiver.step_ended()
    decode.clock.advance(TIMEOUT + 1.0)  # for room in its own arena, say, in an idle engine
    assert decode.matched() is None
    decode.grant(decode.channel.asked[-1], 100.0)
    assert decode.matched() == TOKENS
    assert not decode.stats.failed


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS])
def test_a_prompt_that_is_shorter_than_the_least_is_dropped(decode: Decode, tokens: int) -> None:
    short = tokens < TOKENS
    assert decode.receiver.is_short(REMOTE, tokens) == short
    assert decode.stats.failed == ({"short_prompt": 1} if short else {})
    assert decode.channel.dropped == short * [REMOTE.token]


@pytest.mark.parametrize("failure", [None, "checksum_mismatch"])
def test_blocks_that_were_loaded_in_part_are_noted_until_their_load_fails(
    decode: Decode, failure: str | None
) -> None:
    lease = decode.lease(100.0)
    assert decode.matched() == TOKENS
    assert decode.load() is not None
    decode.receiver.incomplete[decode.fetch] = None
    (job_id,) = decode.work.loads
    assert not decode.channel.released
    decode.ledger.report({job_id: 1}, {} if failure is None else {job_id: failure})
    assert list(decode.receiver.incomplete) == ([decode.fetch] if failure is None else [])
    assert decode.channel.released == [lease]
