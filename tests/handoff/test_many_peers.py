# SPDX-License-Identifier: Apache-2.0
"""Many peers: who makes room where there are too many, and what the others cost."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from omni_connector.errors import IncompatiblePeerError, PeerUnreachableError
from omni_connector.handoff import channel as channel_module
from omni_connector.handoff.client import PeerSession
from omni_connector.handoff.messages import HandshakeReply, Request
from omni_connector.kv.compatibility import CompatibilityKey
from tests import inspection

from .engine import LONG, Asker, Engine, StartEngine, failure


@pytest.fixture
def strangers(
    folder: Path, compatibility: CompatibilityKey, handshake_reply: HandshakeReply
) -> Iterator[list[Engine]]:
    """Engines that refuse everybody else."""
    other = msgspec.structs.replace(compatibility, model="other")
    said = msgspec.structs.replace(handshake_reply, compatibility=other)
    engines = [Engine(folder / f"other-{n}.sock", other, said) for n in range(3)]
    yield engines
    for engine in engines:
        engine.channel.close()


def test_peers_that_failed_are_in_nobodys_way(
    start_engine: StartEngine,
    strangers: list[Engine],
    asker: Asker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_PEERS", 2)
    monkeypatch.setattr(channel_module, "FORGET_REFUSAL_S", 1000.0)
    for stranger in strangers:
        error = failure(asker.request_lease(stranger, stranger.handoff()))
        assert isinstance(error, IncompatiblePeerError)
    engine = start_engine()
    assert asker.request_lease(engine, engine.handoff()).result(LONG)
    assert inspection.engines_asked(asker.channel) == [strangers[-1].address, engine.address]


def test_a_hand_off_costs_nothing_at_the_other_peers(
    start_engine: StartEngine, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [start_engine(f"p-{n}.sock", epoch=bytes([n]) * 16) for n in range(8)]
    for engine in engines:
        assert asker.request_lease(engine, engine.handoff()).result(LONG)
    looked_at: Counter[str] = Counter()
    tick = PeerSession.tick

    def counted(session: PeerSession) -> list[Request]:
        looked_at[session.address] += 1
        return tick(session)

    monkeypatch.setattr(PeerSession, "tick", counted)
    busy = engines[3]
    hand_offs = 100
    for _ in range(hand_offs):
        lease = asker.request_lease(busy, busy.handoff()).result(LONG)
        asker.channel.release(lease)
    # A lease comes before the channel's thread has looked at its peer to the end: the last look may
    # not be counted yet.
    assert looked_at[busy.address] >= hand_offs - 1
    # All are looked at only when the deadline of one is over: that of a handshake after 15 s, that
    # of a request after a minute.
    assert max(looked_at[engine.address] for engine in engines if engine is not busy) < 50


def test_each_request_ends_at_its_deadline_whichever_peer_has_it(
    start_engine: StartEngine, asker: Asker
) -> None:
    engines = [start_engine(f"p-{n}.sock", epoch=bytes([n]) * 16) for n in range(4)]
    futures = [
        asker.request_lease(engine, engine.handoff(filled=False), timeout=timeout)
        for engine in engines
        for timeout in (1.2, 0.1, 0.7)
    ]
    for future in futures:
        assert isinstance(failure(future), PeerUnreachableError)
