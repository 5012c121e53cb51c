# SPDX-License-Identifier: Apache-2.0
"""What the tests of `handoff` share: a clock, a compatibility key, prompts, engines."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_connector.handoff.messages import HandshakeReply
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.keys import ClusterKey
from omni_connector.testing import FakeClock
from omni_connector.transports.base import Endpoint

from ..kv.shapes import compatibility_key, group_shape
from .engine import Asker, Engine, StartAsker, StartEngine


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def compatibility() -> CompatibilityKey:
    window = group_shape(kind="sliding_window", attention_type="window", window=40, layers="odd")
    return compatibility_key(groups=(group_shape(), window))


@pytest.fixture
def handshake_reply(compatibility: CompatibilityKey) -> HandshakeReply:
    endpoint = Endpoint(
        transport="shm", address="somewhere", epoch=b"a" * 16, n_slots=8, slot_bytes=4096
    )
    return HandshakeReply(b"e" * 16, "sha256:16:seed", compatibility, ((endpoint,),))


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(length: int = 40, block: int = 16, **changes: object) -> Prompt:
        values: dict[str, object] = {
            "token_ids": list(range(100, 100 + length)),
            "num_tokens": length,
            "block_hashes": [bytes([i]) * 32 for i in range(length // block)],
            "hash_block_size": block,
        }
        return Prompt(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's own folders have longer names than a socket may have.
    with tempfile.TemporaryDirectory(prefix="oc-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def start_engine(
    folder: Path, compatibility: CompatibilityKey, handshake_reply: HandshakeReply
) -> Iterator[StartEngine]:
    engines = []

    def start(name: str = "p.sock", **options: Any) -> Engine:
        epoch = options.pop("epoch", handshake_reply.epoch)
        engine = Engine(
            folder / name,
            compatibility,
            msgspec.structs.replace(handshake_reply, epoch=epoch),
            **options,
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.channel.close()


@pytest.fixture
def start_asker(compatibility: CompatibilityKey) -> Iterator[StartAsker]:
    askers = []

    def start(key: ClusterKey | None = None) -> Asker:
        askers.append(Asker(compatibility, key))
        return askers[-1]

    yield start
    for asker in askers:
        asker.channel.close()


@pytest.fixture
def asker(start_asker: StartAsker) -> Asker:
    return start_asker()
