# SPDX-License-Identifier: Apache-2.0
"""What `omni-connector explain` asks engines, and what they answer."""

import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from omni_connector.errors import OmniError
from omni_connector.identity.epochs import WeightsEpoch
from omni_connector.net.packets import Refusal, read_answer
from omni_connector.prefix.cache_orders import (
    Done,
    DropPrompts,
    KeptPrompt,
    ListPrompts,
    PinPrompt,
    Prompts,
)
from omni_connector.prefix.explain import (
    ANSWERS,
    QUESTIONS,
    AskEngine,
    AskEvicted,
    AskPrompt,
    Explained,
    FoundTail,
    Later,
    Miss,
    Place,
)
from omni_connector.prefix.explainer import ExplainedEngine, Explainer
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.loads import PrefixLoads
from omni_connector.prefix.lookups import StoreLookups
from omni_connector.prefix.misses import Misses
from omni_connector.prefix.prompts import SharedGroups
from omni_connector.prefix.shared_prefix import SharedPrefix
from omni_connector.requests.state import Requests
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.runtime.stats import NO_STATS
from tests.hostile.control import compatibility
from tests.hostile.mutation import damage, distort_msgpack
from tests.hostile.trial import Parser
from tests.simulation.surroundings.memory import Shelf, SimulatedStore

_BLOCK: Final = 16
_TOKENS: Final = list(range(2 * _BLOCK + 1))


def _hash(tokens: list[int], salt: str | None, after: bytes | None) -> Sequence[bytes]:
    """In the place of vLLM's."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        before = hashes[-1] if hashes else after or str(salt).encode("utf-8", "surrogatepass")
        block = msgspec.msgpack.encode(tokens[start : start + _BLOCK])
        hashes.append(hashlib.sha256(before + block).digest())
    return hashes


@contextmanager
def explainer(
    engine_id: str = "e",
    folder: Path | None = None,
    *,
    lookups: Any = None,
    clock: Callable[[], float] = time.monotonic,
    **changes: Any,
) -> Iterator[Explainer]:
    """An engine with a store in which nothing is, and with some blocks in its own KV cache.

    Args:
        lookups: in the place of those of this store.
        changes: of `ExplainedEngine`.
    """
    key = compatibility()
    groups = SharedGroups(key.groups, (0, 1), _BLOCK)
    weights = WeightsEpoch(SimpleNamespace(cached_block_hash_to_block={}), fixed=True, named=True)
    prefix = KeyPrefix(lambda weights: ("p", "p"), bytes)
    prefix.follow("w")
    nothing: Any = None  # is copied
    with ExitStack() as closed:
        if folder is None:
            folder = Path(closed.enter_context(TemporaryDirectory(prefix="omni-", dir="/tmp")))
        if lookups is None:
            store = SimulatedStore(Shelf())
            lookups = StoreLookups(store, key.stages, 1, PROCESS_CONTEXT)
            closed.callback(lookups.close)
        engine = ExplainedEngine(
            folder=folder,
            engine_id=engine_id,
            name="m@main",
            compatibility=key,
            hash_id="sha256:16:",
            model=SimpleNamespace(tokenizer="t", tokenizer_revision=None, trust_remote_code=False),
            groups=groups,
            hash_tokens=_hash,
            cached=lambda block_hash, groups: block_hash[0] < 128 or None,
            weights=weights,
            requests=Requests(),
        )
        loads = PrefixLoads(
            host=None,
            lookups=lookups,
            ledger=nothing,
            groups=groups,
            prefix=prefix,
            timeout=1.0,
            stats=NO_STATS,
        )
        shared = SharedPrefix(
            host=None,
            lookups=lookups,
            loads=loads,
            saves=nothing,
            groups=groups,
            tails=None,
            prefix=prefix,
            followed_hints=frozenset(),
            thinking=None,
            lookup_timeout=5.0,
            context=dataclasses.replace(PROCESS_CONTEXT, clock=clock),
        )
        misses = Misses(key.groups, _BLOCK, lambda group, key: key[0] > 200, NO_STATS)
        answers = Explainer(dataclasses.replace(engine, **changes), shared, misses, None, prefix)
        closed.callback(answers.close)
        yield answers


_ORDERS: Final = (
    ListPrompts(),
    PinPrompt("0" * 16, 60.0),
    DropPrompts("0" * 16),
    DropPrompts(None),
)


def _honest() -> list[msgspec.Struct]:
    return [
        AskEngine(),
        AskPrompt(5, 0, _TOKENS, "salt"),
        AskPrompt(6, 0, _TOKENS, whole=True),
        AskPrompt(6, len(_TOKENS), whole=True),
        AskEvicted(b"x" * 32),
        *_ORDERS,
    ]


def _distorted(corpus: Sequence[bytes], rng: random.Random) -> bytes:
    return (distort_msgpack if rng.random() < 0.5 else damage)(rng.choice(corpus), rng)


@contextmanager
def questions() -> Iterator[Parser]:
    """What an engine is asked."""
    with explainer() as engine:
        corpus = [msgspec.msgpack.encode(each) for each in _honest()]

        def parse(packet: bytes) -> bool:
            question = QUESTIONS.decode(packet)
            answer, descriptor = engine.answer(question)
            assert descriptor is None
            ordered = isinstance(question, ListPrompts | PinPrompt | DropPrompts)
            assert isinstance(answer, Refusal) == ordered, "a question failed in the engine"
            assert len(msgspec.msgpack.encode(answer)) < 1 << 19
            return True

        tickets = count(1 << 32)

        def alive() -> None:
            for question in (AskEngine(), AskPrompt(next(tickets), 0, _TOKENS)):
                assert not isinstance(engine.answer(question)[0], Refusal)

        errors = (OmniError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
        yield Parser("questions for prompts", partial(_distorted, corpus), parse, errors, alive)


@contextmanager
def answers() -> Iterator[Parser]:
    """What an engine answers."""
    with explainer() as engine:
        told = [engine.answer(AskEngine())[0], engine.answer(AskEvicted(b"x" * 32))[0], Later()]
        kept = KeptPrompt("0" * 16, 64, 32, 5.0, 3, 0.0, "cmpl-1")
        told += [Prompts((kept, kept), 2), Done(4, 1)]
        told.append(
            Explained(
                known=True,
                sources={Place.OWN: 16, Place.HOST: 16},
                groups=(((Place.OWN, "", 1), (Place.HOST, "i-0123456789abcdef", 4)), ()),
                tail=FoundTail(1, 16, 20, Place.ARENA),
                missing=Miss(2, 64, 16, "never_seen"),
                key=b"x" * 32,
                requests={"computing": 1},
            )
        )
        corpus = [msgspec.msgpack.encode(each) for each in told]

        def parse(packet: bytes) -> bool:
            read_answer(packet, [], ANSWERS)
            return True

        yield Parser("answers about prompts", partial(_distorted, corpus), parse, (OmniError,))
