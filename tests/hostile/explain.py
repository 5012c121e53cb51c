# SPDX-License-Identifier: Apache-2.0
"""What `omni-connector explain` asks engines, and what they answer."""

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from omni_connector.errors import OmniError
from omni_connector.net.packets import Refusal, read_answer
from omni_connector.prefix.explain import (
    ANSWERS,
    QUESTIONS,
    AskCause,
    AskEngine,
    AskHashes,
    AskPlaces,
    AskStored,
    AskStoredTail,
    AskTail,
    ExplainedEngine,
    Explainer,
    StoredTail,
    TailPlace,
)
from omni_connector.prefix.lookups import StoreLookups
from omni_connector.prefix.misses import Misses
from omni_connector.runtime.context import PROCESS_CONTEXT
from tests.hostile.control import compatibility
from tests.hostile.mutation import damage, distort_msgpack
from tests.hostile.trial import Parser
from tests.simulation.surroundings.memory import Shelf, SimulatedStore

_BLOCK: Final = 16
_TOKENS: Final = list(range(2 * _BLOCK))


def _hash(tokens: list[int], salt: str | None, after: bytes | None) -> Sequence[bytes]:
    """In the place of vLLM's."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        before = hashes[-1] if hashes else after or str(salt).encode("utf-8", "surrogatepass")
        block = msgspec.msgpack.encode(tokens[start : start + _BLOCK])
        hashes.append(hashlib.sha256(before + block).digest())
    return hashes


@contextmanager
def explainer(engine_id: str = "e") -> Iterator[Explainer]:
    """An engine with a store in which nothing is, and with some blocks in its own KV cache."""
    key = compatibility()
    stats: Any = None
    with TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        engine = ExplainedEngine(
            folder=Path(folder),
            engine_id=engine_id,
            compatibility=key,
            hash_id="sha256:16:",
            model=SimpleNamespace(tokenizer="t", tokenizer_revision=None, trust_remote_code=False),
            hash_block_size=_BLOCK,
            group_ids=(0, 1),
            hash_tokens=_hash,
            cached=lambda block_hash, groups: block_hash[0] < 128 or None,
        )
        lookups = StoreLookups(SimulatedStore(Shelf()), key.stages, 1, PROCESS_CONTEXT)
        answers = Explainer(
            engine,
            host=None,
            lookups=lookups,
            tails=None,
            misses=Misses(key.groups, _BLOCK, lambda group, key: key[0] > 200, stats),
            prefix=lambda: "p",
            alone=lambda: False,
            clock=time.monotonic,
        )
        try:
            yield answers
        finally:
            answers.close()
            lookups.close()


def _honest() -> list[msgspec.Struct]:
    hashes = tuple(_hash(_TOKENS, None, None))
    return [
        AskEngine(),
        AskHashes(None, _TOKENS, "salt"),
        AskHashes(hashes[0], _TOKENS),
        AskPlaces(0, hashes),
        AskPlaces(1, hashes),
        AskStored(5, 1, hashes),
        AskCause(1, hashes[1], _TOKENS[:_BLOCK], hashes[0]),
    ]


def _distorted(corpus: Sequence[bytes], rng: random.Random) -> bytes:
    return (distort_msgpack if rng.random() < 0.5 else damage)(rng.choice(corpus), rng)


@contextmanager
def questions() -> Iterator[Parser]:
    """What an engine is asked."""
    with explainer() as engine:
        of_tails = [
            AskTail(b"x" * 32, _TOKENS[:9], "salt"),
            AskStoredTail(7, b"x" * 32, _TOKENS[:9], "salt"),
        ]
        corpus = [msgspec.msgpack.encode(each) for each in (*_honest(), *of_tails)]

        def parse(packet: bytes) -> bool:
            answer, descriptor = engine.answer(QUESTIONS.decode(packet))
            assert descriptor is None
            assert not isinstance(answer, Refusal), "a question failed in the engine"
            assert len(msgspec.msgpack.encode(answer)) < 1 << 19
            return True

        def alive() -> None:
            for question in _honest():
                assert not isinstance(engine.answer(question)[0], Refusal)

        errors = (OmniError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
        yield Parser("questions for prompts", partial(_distorted, corpus), parse, errors, alive)


@contextmanager
def answers() -> Iterator[Parser]:
    """What an engine answers."""
    with explainer() as engine:
        told = [engine.answer(each)[0] for each in _honest()]
        told += [TailPlace(0), TailPlace(7, ("", "i-0123456789abcdef"))]
        told += [StoredTail(None), StoredTail(7)]
        corpus = [msgspec.msgpack.encode(each) for each in told]

        def parse(packet: bytes) -> bool:
            read_answer(packet, [], ANSWERS)
            return True

        yield Parser("answers about prompts", partial(_distorted, corpus), parse, (OmniError,))
