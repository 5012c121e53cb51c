# SPDX-License-Identifier: Apache-2.0
"""Where one engine would find the KV of a prompt. The engine is asked over its socket.

The engine says what a request with the prompt would find (`omni_connector.prefix.explain`), and
this puts it into words.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from omni_connector.errors import OmniError, ProtocolError, TransportError
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.status import plain
from omni_connector.net.unix import Connection
from omni_connector.prefix.cache_orders import (
    AskKeys,
    BringBlocks,
    Done,
    DropPrompts,
    KeptPrompt,
    Keys,
    ListPrompts,
    PinPrompt,
    Prompts,
)
from omni_connector.prefix.explain import (
    ANSWERS,
    MAX_RUNS,
    TOKENS_AT_ONCE,
    AskEngine,
    AskEvicted,
    AskPrompt,
    Evicted,
    Explained,
    FoundTail,
    Later,
    Miss,
    Place,
    ThisEngine,
)
from omni_connector.stores.shared_blocks import reader_difference

_ANSWER_S: Final = 5.0
"""Longest wait for one answer of an engine, in seconds."""

_IN_ALL_S: Final = 60.0
"""Longest time for all answers of one engine about one prompt, in seconds."""

_MOST_PROMPTS: Final = 1 << 14
"""Most prompts of one engine that are listed. It remembers fewer."""

_FIRST_POLL_S: Final = 0.001
"""Seconds before a store's answer is asked for again; a store on this host has it by then."""

_POLL_S: Final = 0.01
"""Longest pause between two questions for a store's answer, in seconds."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Explanation:
    """Where one engine would find the KV of a prompt.

    Attributes:
        engine_id: id of the engine.
        model: the model that it runs.
        tokens: number of tokens of the prompt.
        computed: number of tokens that the engine would compute; None while that is not known.
        sources: number of tokens that it would load, by place.
        groups: kind, block size and runs of each cache group.
        tail: the end of an earlier request with which the loaded tokens end; None if they end with
            a full block.
        missing: the first miss; None if only the end of the prompt is computed, or while that is
            not known.
        shares_with: engines whose arenas it reads.
        apart: by engine whose arena it does not read, the reason.
        requests: of the engine with this prompt: how many are in which phase.
        remarks: sentences for the user.
    """

    engine_id: str
    model: str
    tokens: int
    computed: int | None
    sources: dict[Place, int]
    groups: list[dict[str, Any]]
    tail: FoundTail | None
    missing: Miss | None
    shares_with: list[str]
    apart: dict[str, str]
    requests: dict[str, int]
    remarks: list[str]


@dataclass(frozen=True)
class Answer:
    """The result of `omni-connector explain`.

    Attributes:
        namespace: namespace of the engines.
        folder: its runtime folder.
        time: Unix time, in seconds.
        engines: one explanation for each engine.
        remarks: the engines that could not be asked, and why.
    """

    namespace: str
    folder: str
    time: float
    engines: list[Explanation]
    remarks: list[str]


class AskedEngine:
    """A connection to one engine.

    Args:
        path: its socket.

    Raises:
        OmniError: the engine does not answer, or its answer is malformed.
    """

    def __init__(self, path: Path) -> None:
        self._connection = Connection(path, time.monotonic() + _ANSWER_S)
        try:
            self.engine: Final = self._ask(AskEngine(), ThisEngine)
        except BaseException:
            self._connection.close()
            raise
        self.name: Final = plain(self.engine.engine_id)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _ask(self, question: msgspec.Struct, *kinds: type[_Answer]) -> _Answer:
        answer, _ = self._connection.ask(question, ANSWERS, time.monotonic() + _ANSWER_S)
        if not isinstance(answer, kinds):
            raise ProtocolError(f"the engine answers with {type(answer).__name__}")
        return answer

    def explained(self, tokens: Sequence[int], salt: str | None) -> Explained:
        """Return what a request with this prompt would find.

        Raises:
            OmniError: as the connection; or the answers take too long.
        """
        until = time.monotonic() + _IN_ALL_S
        ticket = secrets.randbits(62)
        wait = _FIRST_POLL_S
        told = 0
        while time.monotonic() < until:
            part = list(tokens[told : told + TOKENS_AT_ONCE])
            whole = told + len(part) == len(tokens)
            question = AskPrompt(ticket, told, part, salt, whole)
            answer = self._ask(question, *((Later, Explained) if whole else (Later,)))
            told += len(part)
            if isinstance(answer, Explained):
                end = sum(answer.sources.values())
                if end >= len(tokens) or len(answer.groups) != len(self.engine.groups):
                    raise ProtocolError(f"{end} of {len(tokens)} tokens are found")
                return answer
            if not part:
                time.sleep(wait)
                wait = min(2 * wait, _POLL_S)
        raise TransportError(
            f"the prompt is too long to be explained within {_IN_ALL_S:g} s: it has "
            f"{len(tokens)} tokens"
        )

    def prompts(self) -> list[KeptPrompt]:
        """Return the prompts of which its arena has blocks, the latest first.

        Raises:
            OmniError: it does not answer, or not as an engine of this version.
        """
        found: list[KeptPrompt] = []
        first: int | None = 0
        while first is not None and len(found) < _MOST_PROMPTS:
            answer = self._ask(ListPrompts(first), Prompts)
            found += answer.prompts
            first = answer.more
        return found

    def obey(self, order: PinPrompt | DropPrompts) -> Done:
        """Have it pin a prompt, or drop one or all.

        Raises:
            OmniError: it does not answer, or has no such prompt any more.
        """
        return self._ask(order, Done)

    def bring(self, name: str, source: "AskedEngine") -> Done:
        """Have it copy a prompt that another engine has to its own arena.

        Returns:
            Of all groups, blocks that its arena has then, and blocks that could not be copied.

        Raises:
            OmniError: one of both does not answer, or that takes too long.
        """
        until = time.monotonic() + _IN_ALL_S
        ticket = secrets.randbits(62)
        blocks = others = group = first = 0
        while True:
            keys = source._ask(AskKeys(name, group, first), Keys)
            first += len(keys.keys)
            if keys.keys:
                done = self._brought(BringBlocks(ticket, group, keys.keys), until)
                blocks += done.blocks
                others += done.others
            if not keys.keys or first >= keys.blocks:
                group, first = group + 1, 0
                if group >= keys.groups:
                    self._ask(BringBlocks(ticket, whole=True), Done)
                    return Done(blocks, others)

    def _brought(self, question: BringBlocks, until: float) -> Done:
        answer: Any = self._ask(question, Done, Later)
        while isinstance(answer, Later):
            if time.monotonic() >= until:
                raise TransportError(f"the prompt is not copied within {_IN_ALL_S:g} s")
            time.sleep(_POLL_S)
            answer = self._ask(BringBlocks(question.ticket), Done, Later)
        done: Done = answer
        return done

    def evicted(self, key: bytes) -> bool:
        """Return whether the engine has evicted a block from its arena lately."""
        return self._ask(AskEvicted(key), Evicted).evicted


def explained(
    asked: AskedEngine, others: Sequence[AskedEngine], tokens: Sequence[int], salt: str | None
) -> Explanation:
    """Ask one engine where it would find the KV of a prompt.

    Args:
        asked: the engine.
        others: the other engines of the namespace.
        tokens: token ids of the prompt, at least one.
        salt: cache salt of the request.

    Raises:
        OmniError: the engine does not answer, or its answers are malformed.
    """
    engine = asked.engine
    found = asked.explained(tokens, salt)
    reasons = [(other, _why_apart(engine, other.engine)) for other in others]
    shared = {other.engine.socket: other for other, why in reasons if why is None}
    names = {other.engine.socket: other.name for other in others}
    remarks = _remarks(engine, found)
    missing, tail = found.missing, found.tail
    if missing is not None:
        had = _evicted_from([shared[n] for n in engine.neighbours if n in shared], found, remarks)
        missing = replace(missing, cause=plain(missing.cause), evicted_from=had)
    if tail is not None:
        tail = replace(tail, engine=names.get(tail.engine, plain(tail.engine)))
    return Explanation(
        engine_id=asked.name,
        model=plain(engine.model),
        tokens=len(tokens),
        computed=len(tokens) - sum(found.sources.values()) if found.known else None,
        sources={
            place: found.sources.get(place, 0)
            for place in (Place.OWN, Place.ARENA, Place.HOST, Place.STORE)
        },
        groups=[
            {
                "kind": plain(shape.kind),
                "block_size": shape.block_size,
                "runs": list(_runs(shape, runs, names)),
            }
            for shape, runs in zip(engine.groups, found.groups, strict=True)
        ],
        tail=tail,
        missing=missing,
        shares_with=[
            names.get(name, plain(name))
            for name in engine.neighbours
            if not engine.alone and (name in shared or name not in names)
        ],
        apart={other.name: why for other, why in reasons if why is not None},
        requests={plain(phase): count for phase, count in found.requests.items()},
        remarks=remarks,
    )


def _remarks(engine: ThisEngine, found: Explained) -> list[str]:
    remarks = []
    if found.late:
        remarks.append("the store did not answer within `lookup_timeout_s`")
    if not found.known:
        remarks.append(
            "its weights are not known yet, nor what it would load: its next request shows them"
        )
    elif engine.alone:
        why = f": {plain(engine.problem)}" if engine.problem else ""
        remarks.append(f"its weights are not known, so that it shares with nobody{why}")
    elif engine.unsettled:
        remarks.append(
            "its weights may be others since a reset: what is said of it holds if they are not, "
            "which its next request shows"
        )
    if not engine.shares:
        remarks.append("it does not use the arenas of this host (`share` is off)")
    if sum(map(len, found.groups)) >= MAX_RUNS:
        remarks.append(f"only the first {MAX_RUNS} runs of blocks are listed")
    return remarks


def _runs(
    shape: GroupShape, runs: Sequence[tuple[Place, str, int]], names: dict[str, str]
) -> Iterator[dict[str, Any]]:
    first, size = 0, shape.block_size
    for source, engine, count in runs:
        yield {
            "first_block": first,
            "blocks": count,
            "first_token": first * size,
            "end_token": (first + count) * size,
            "source": source,
            "engine": names.get(engine, plain(engine)),
        }
        first += count


def _evicted_from(
    others: Sequence[AskedEngine], found: Explained, remarks: list[str]
) -> tuple[str, ...]:
    """Return which of these engines have evicted the missing block lately.

    Args:
        remarks: takes those that could not be asked.
    """
    had = []
    for other in others:
        try:
            if other.evicted(found.key):
                had.append(other.name)
        except OmniError as error:
            remarks.append(
                plain(f"{other.name} did not say whether it has evicted the block: {error}")
            )
    return tuple(had)


def _why_apart(engine: ThisEngine, other: ThisEngine) -> str | None:
    """Return why an engine does not read another's arena; None if it does."""
    if not (engine.shares and other.shares):
        whose = "it does" if engine.shares else "this one does"
        return f"{whose} not use the arenas of this host"
    if (difference := reader_difference(other.traits, engine.traits)) is not None:
        return plain(difference)
    for each, whose in ((engine, "this one"), (other, "it")):
        if each.alone:
            return f"the weights of {whose} are not known{' yet' if each.unsettled else ''}"
    if other.weights != engine.weights:
        return "it has other weights in its memory"
    return None if other.socket in engine.neighbours else "they have not met yet"
