# SPDX-License-Identifier: Apache-2.0
"""More peers than are kept: who makes room."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from omni_connector.errors import IncompatiblePeerError
from omni_connector.handoff import channel as channel_module
from omni_connector.handoff.messages import HandshakeReply
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
