# SPDX-License-Identifier: Apache-2.0
"""Where one engine would find the KV of a prompt. The engine is asked over its socket.

The engine answers where it would find each block (`omni_connector.prefix.explain`). From that, the
tokens that a request would load are derived as the engine derives them.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import lcm
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from omni_connector.errors import OmniError, ProtocolError, TransportError
from omni_connector.kv.shapes import GroupShape, leading_group
from omni_connector.kv.spans import BlockSpans, shares
from omni_connector.net.status import plain
from omni_connector.net.unix import Connection
from omni_connector.prefix.explain import (
    ANSWERS,
    BLOCKS_AT_ONCE,
    MESSAGE_TOKENS,
    STORE_S,
    TOKENS_AT_ONCE,
    AskCause,
    AskEngine,
    AskHashes,
    AskPlaces,
    AskStored,
    AskStoredTail,
    AskTail,
    Cause,
    Hashes,
    Places,
    Stored,
    StoredTail,
    TailPlace,
    ThisEngine,
)
from omni_connector.prefix.lookups import Held, reach, tail_blocks, windows_held

_ANSWER_S: Final = 5.0
"""Longest wait for one answer of an engine, in seconds."""

_IN_ALL_S: Final = 60.0
"""Longest time for all answers of one engine about one prompt, in seconds."""

_LATE: Final = f"the store did not answer within {STORE_S:g} s"

_FIRST_POLL_S: Final = 0.001
"""Seconds before a store's answer is asked for again; a store on this host has it by then."""

_POLL_S: Final = 0.01
"""Longest pause between two questions for a store's answer, in seconds."""

OWN, ARENA, HOST, STORE, MISSING = "own", "arena", "host", "store", "missing"
"""Places of a block: the engine's own KV cache, the engine's arena, another engine's arena, the
store, and none of these."""

_Owners = list[str | None]
"""For each group the socket of the engine whose arena has a block, "" for the own arena, None for
the store."""

_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_StoreAnswer = TypeVar("_StoreAnswer", Stored, StoredTail)


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one group that are in the same place.

    Attributes:
        first_block: index of the first block in the prompt.
        blocks: number of blocks.
        first_token: index of the first token.
        end_token: index after the last token.
        source: the place; see `OWN`.
        engine: the engine whose arena it is, for `HOST`; else "".
    """

    first_block: int
    blocks: int
    first_token: int
    end_token: int
    source: str
    engine: str = ""


@dataclass(frozen=True)
class Miss:
    """The first block that a request would have to compute although a cache might have had it.

    Attributes:
        block: index of the block in the prompt.
        first_token: index of its first token.
        tokens: tokens from there on that a cache might have had.
        cause: one of the causes of the metric `tokens_missed_total`.
        evicted_from: other engines whose arenas evicted the block lately.
    """

    block: int
    first_token: int
    tokens: int
    cause: str
    evicted_from: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FoundTail:
    """The block in which an earlier request has ended, and where the prompt would go on.

    Attributes:
        block: index of the block in the prompt.
        first_token: index of its first token.
        end_token: index after the last token that was kept.
        source: place of the block, in the group with recurrent states; see `OWN`.
        engine: the engine whose arena it is, for `HOST`; else "".
    """

    block: int
    first_token: int
    end_token: int
    source: str
    engine: str = ""


@dataclass(frozen=True)
class Explanation:
    """Where one engine would find the KV of a prompt.

    Attributes:
        engine_id: id of the engine.
        model: the model that it runs.
        tokens: number of tokens of the prompt.
        computed: number of tokens that the engine would compute.
        sources: number of tokens that it would load, by place.
        groups: kind, block size and runs of each cache group.
        tail: the end of an earlier request with which the loaded tokens end; None if they end with
            a full block.
        missing: the first miss; None if only the end of the prompt is computed.
        shares_with: engines whose arenas it reads.
        apart: by engine whose arena it does not read, the reason.
        remarks: sentences for the user.
    """

    engine_id: str
    model: str
    tokens: int
    computed: int
    sources: dict[str, int]
    groups: list[dict[str, Any]]
    tail: FoundTail | None
    missing: Miss | None
    shares_with: list[str]
    apart: dict[str, str]
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
        self.begin(0)
        self._connection = Connection(path, time.monotonic() + _ANSWER_S)
        try:
            self.engine: Final = self._ask(AskEngine(), ThisEngine)
        except BaseException:
            self._connection.close()
            raise
        self.name: Final = plain(self.engine.engine_id)

    def begin(self, tokens: int) -> None:
        """Begin to ask about a prompt of that many tokens; `_IN_ALL_S` starts now."""
        self._tokens = tokens
        self._until = time.monotonic() + _IN_ALL_S

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _ask(self, question: msgspec.Struct, kind: type[_Answer]) -> _Answer:
        answer, _ = self._connection.ask(question, ANSWERS, time.monotonic() + _ANSWER_S)
        if not isinstance(answer, kind):
            raise ProtocolError(f"the engine answers with {type(answer).__name__}")
        return answer

    def _ask_part(self, question: msgspec.Struct, kind: type[_Answer]) -> _Answer:
        """Ask about a part of a prompt.

        Raises:
            OmniError: as the connection; or the time for the whole prompt is over.
        """
        if time.monotonic() >= self._until:
            raise TransportError(
                f"the prompt is too long to be explained within {_IN_ALL_S:g} s: it has "
                f"{self._tokens} tokens, in {len(self.engine.groups)} groups of KV blocks"
            )
        return self._ask(question, kind)

    def hashes(self, tokens: Sequence[int], salt: str | None) -> list[bytes]:
        """Return the block hashes of all full blocks."""
        size = self.engine.hash_block_size
        step = max(1, TOKENS_AT_ONCE // size) * size
        found: list[bytes] = []
        for start in range(0, len(tokens) // size * size, step):
            part = list(tokens[start : start + step])
            after = found[-1] if found else None
            hashes = self._ask_part(AskHashes(after, part, salt), Hashes).hashes
            if len(hashes) != len(part) // size:
                raise ProtocolError(f"{len(hashes)} hashes of {len(part)} tokens")
            found += hashes
        return found

    def places(self, group: int, hashes: list[bytes]) -> tuple[list[bool], list[str | None]]:
        """Return where the engine would find each block.

        In a group that keeps all tokens, a prefix ends at the first block that is missing: all
        blocks after it count as missing too.

        Returns:
            Whether the engine's own KV cache has each block; and the socket of the engine whose
            arena has it, "" for its own arena, None for no arena.
        """
        cached: list[bool] = []
        owners: list[str | None] = []
        for part in _parts(hashes):
            places = self._ask_part(AskPlaces(group, tuple(part)), Places)
            if len(places.cached) != len(part):
                raise ProtocolError(f"{len(places.cached)} places of {len(part)} blocks")
            cached += places.cached
            owners += [None if each < 0 else places.engines[each] for each in places.owners]
            if self._ends(group) and not all(cached) and None in owners:
                break
        if self._ends(group):
            cached, owners = _before(cached, False), _before(owners, None)
        return _padded(cached, len(hashes), False), _padded(owners, len(hashes), None)

    def _ends(self, group: int) -> bool:
        return self.engine.groups[group].attention_type == "all"

    def stored(self, group: int, hashes: list[bytes], there: list[bool]) -> list[bool] | None:
        """Return which blocks the store holds; None if it does not answer in time.

        In a group that keeps all tokens, the answers end with the first block that is missing.

        Args:
            there: for each block, whether an arena has it, so that the store need not.
        """
        found: list[bool] = []
        for part in _parts(hashes):
            known = there[len(found) : len(found) + len(part)]
            held: Sequence[bool] = [False] * len(part)
            if not all(known):
                question = AskStored(secrets.randbits(62), group, tuple(part))
                answer = self._ask_store(question, Stored)
                if answer is None:
                    return None
                held = answer.held or ()
                if len(held) != len(part):
                    raise ProtocolError("the store's answer has another length")
            found += held
            if self._ends(group) and not all(map(max, held, known)):
                break
        return _padded(found, len(hashes), False)

    def _ask_store(self, question: msgspec.Struct, kind: type[_StoreAnswer]) -> _StoreAnswer | None:
        """Ask until the store has answered; None if it does not in time."""
        deadline = time.monotonic() + STORE_S + _ANSWER_S
        wait = _FIRST_POLL_S
        while time.monotonic() < deadline:
            answer = self._ask_part(question, kind)
            if answer.late:
                return None
            if answer.is_there:
                return answer
            time.sleep(wait)
            wait = min(2 * wait, _POLL_S)
        return None

    def tail(
        self, after: bytes | None, tokens: Sequence[int], salt: str | None
    ) -> tuple[int, _Owners]:
        """Return the longest tail in the arenas with which a block begins.

        Args:
            after: hash of the block before; None for the first block of the prompt.
            tokens: of the block, fewer than all.

        Returns:
            Number of its tokens, 0 if there is none; and for each group the socket of the engine
            whose arena has it, "" for the own arena.
        """
        part = list(tokens[:MESSAGE_TOKENS])
        found = self._ask_part(AskTail(after, part, salt), TailPlace)
        if found.tokens > len(part) or (
            found.tokens and len(found.engines) != len(self.engine.groups)
        ):
            raise ProtocolError(f"a tail of {found.tokens} tokens in {len(found.engines)} groups")
        return found.tokens, list(found.engines)

    def stored_tail(
        self, after: bytes | None, tokens: Sequence[int], salt: str | None
    ) -> int | None:
        """Return the number of tokens of the longest tail in the store, 0 if there is none, with
        which a block begins; None if the store does not answer in time. For the arguments see
        `tail`."""
        part = list(tokens[:MESSAGE_TOKENS])
        question = AskStoredTail(secrets.randbits(62), after, part, salt)
        found = self._ask_store(question, StoredTail)
        if found is None:
            return None
        number = found.tokens or 0
        if number > len(part):
            raise ProtocolError(f"a tail of {number} tokens in {len(part)}")
        return number

    def cause(self, block: int, key: bytes, beginning: Sequence[int], first: bytes) -> str:
        """Return the cause for which the engine misses a block.

        Args:
            block: index of the block in the prompt.
            key: hash of the block.
            beginning: tokens of the prompt's first block.
            first: hash of the prompt's first block.
        """
        return plain(self._ask(AskCause(block, key, list(beginning), first), Cause).cause)


def _parts(hashes: list[bytes]) -> Iterable[list[bytes]]:
    return (hashes[i : i + BLOCKS_AT_ONCE] for i in range(0, len(hashes), BLOCKS_AT_ONCE))


_Item = TypeVar("_Item")


def _before(items: list[_Item], end: _Item) -> list[_Item]:
    return items[: items.index(end)] if end in items else items


def _padded(items: list[_Item], count: int, value: _Item) -> list[_Item]:
    return items + [value] * (count - len(items))


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
    asked.begin(len(tokens))
    engine = asked.engine
    remarks: list[str] = []
    shapes = engine.groups
    unit = lcm(*(shape.block_size for shape in shapes))
    last = (len(tokens) - 1) // unit * unit  # vLLM always computes the last token, for its logits
    hashes = asked.hashes(tokens, salt)
    of_groups = [_named(engine, each, hashes) for each in shapes]
    places = [asked.places(g, each) for g, each in enumerate(of_groups)]
    start = _reach(shapes, [cached for cached, _ in places], unit, 0, last)
    there = [[owner is not None for owner in owners] for _, owners in places]
    end = _reach(shapes, there, unit, start, last)
    stored = [[False] * len(each) for each in there]
    either = there
    late = False
    if engine.stores and end < last:
        stored, late = _stored(asked, of_groups, there, start)
        if late:
            remarks.append(_LATE)
        either = [list(map(max, *pair)) for pair in zip(there, stored, strict=True)]
        end = _reach(shapes, either, unit, start, last)
    if engine.alone:
        remarks.append(
            "its weights are not known (yet): at the start and after a reset its next request "
            "shows them; else its log says why"
        )
    if not engine.shares:
        remarks.append("it does not use the arenas of this host (`share` is off)")
    names = {other.engine.socket: other.name for other in others}
    labels = [
        [_label(*place, names) for place in zip(cached, owners, held, strict=True)]
        for (cached, owners), held in zip(places, stored, strict=True)
    ]
    loads = [
        [_label(False, *place, names) for place in zip(owners, held, strict=True)]
        for (_, owners), held in zip(places, stored, strict=True)
    ]
    tail = None
    finds_tails = engine.tails or engine.stored_tails
    found = None
    if finds_tails:
        found = _tail(asked, either, of_groups, tokens, salt, (start, end), remarks)
    if found is not None:
        end, owners_of_tail = found
        of_tail = [_label(False, owner, owner is None, names) for owner in owners_of_tail]
        block = end // unit
        for of_group, label in zip(loads, of_tail, strict=True):
            of_group[block:] = [label]  # later blocks are not loaded
        states = [shape.attention_type for shape in shapes].index("last")
        tail = FoundTail(block, block * unit, end, *of_tail[states])
    return Explanation(
        engine_id=asked.name,
        model=plain(engine.traits.get("model", "")),
        tokens=len(tokens),
        computed=len(tokens) - end,
        sources={OWN: start, ARENA: 0, HOST: 0, STORE: 0, **_sources(shapes, loads, start, end)},
        groups=[
            {
                "kind": plain(shape.kind),
                "block_size": shape.block_size,
                "runs": [asdict(run) for run in _runs(shape, of_group)],
            }
            for shape, of_group in zip(shapes, labels, strict=True)
        ],
        tail=tail,
        missing=_missing(asked, others, tokens, of_groups, (end, last), late, remarks),
        shares_with=[
            names.get(name, plain(name)) for name in engine.neighbours if not engine.alone
        ],
        apart={
            other.name: why
            for other in others
            if other is not asked and (why := _why_apart(engine, other.engine))
        },
        remarks=remarks,
    )


def _stored(
    asked: AskedEngine, hashes: list[list[bytes]], there: list[list[bool]], start: int
) -> tuple[list[list[bool]], bool]:
    """Ask which blocks the store holds, for a prefix that would go on from token `start`.

    Args:
        hashes: block hashes, by group.
        there: for each block of each group, whether an arena has it.
        start: end of the prefix in vLLM's own cache, in tokens.

    Returns:
        Whether the store holds each block, by group; and whether the store answered too late.
    """
    shapes = asked.engine.groups
    stored = [[False] * len(each) for each in hashes]
    # A prefix ends at the first gap of a group that keeps all tokens. These groups are asked first,
    # so that less is asked of the others.
    whole = [g for g, shape in enumerate(shapes) if shape.attention_type == "all"]
    end = max(len(each) * shape.block_size for each, shape in zip(hashes, shapes, strict=True))
    for g in sorted(range(len(shapes)), key=lambda g: g not in whole):
        size = shapes[g].block_size
        first, count = start // size, -(-end // size)
        known = ([True] * first + there[g][first:])[:count]
        held = asked.stored(g, hashes[g][:count], known)
        if held is None:
            return stored, True
        stored[g] = _padded(held, len(hashes[g]), False)
        if g in whole:
            either = list(map(max, held, known))
            end = min(end, Held.of(either).reach(first) * size)
    return stored, False


def _tail(
    asked: AskedEngine,
    held: Sequence[list[bool]],
    hashes: list[list[bytes]],
    tokens: Sequence[int],
    salt: str | None,
    ends: tuple[int, int],
    remarks: list[str],
) -> tuple[int, _Owners] | None:
    """Ask for the longest prefix that ends within a block; None if there is none.

    Args:
        held: for each block of each group, whether an arena or the store has it.
        hashes: block hashes, by group.
        ends: end of the prefix in vLLM's own cache, in tokens; and of the full blocks that a
            request would load.
        remarks: takes that the store is late.

    Returns:
        The end of the prefix; and for each group the socket of the engine whose arena has the
        block in which it ends, None for the store.
    """
    start, reach = ends
    shapes = asked.engine.groups
    groups = [(shape, Held.of(blocks)) for shape, blocks in zip(shapes, held, strict=True)]
    unit = shapes[0].block_size  # of all groups, where there are tails
    leading = leading_group(shapes)
    last = len(tokens) - 1
    blocks = tail_blocks(groups, unit, start, reach, last)

    def longest(ask: Callable[..., tuple[int, _Owners]]) -> tuple[int, _Owners] | None:
        for block in blocks:
            begin = block * unit
            part = tokens[begin : min(begin + unit - 1, last)]
            if not part:
                continue
            number, owners = ask(hashes[leading][block - 1] if block else None, part, salt)
            end = begin + number
            if number and end > max(start, reach) and windows_held(groups, start, end):
                return end, owners
        return None

    def ask_store(*question: Any) -> tuple[int, _Owners]:
        number = asked.stored_tail(*question)
        if number is None and _LATE not in remarks:
            remarks.append(_LATE)
        return number or 0, [None] * len(shapes)

    in_arenas = longest(asked.tail) if asked.engine.tails else None
    # An engine that has found all full blocks, and a tail in the arenas, waits for no store.
    if not asked.engine.stored_tails or (in_arenas and reach >= last // unit * unit):
        return in_arenas
    in_store = longest(ask_store)
    found = [each for each in (in_arenas, in_store) if each is not None]
    return max(found, key=itemgetter(0), default=None)


def _named(engine: ThisEngine, shape: GroupShape, hashes: list[bytes]) -> list[bytes]:
    """The hashes of a prompt's tokens that name blocks of a group; none where none is cached."""
    step = shape.block_size // engine.hash_block_size
    return hashes[step - 1 :: step] if shape.is_cached else []


def _reach(
    shapes: Sequence[GroupShape], held: Sequence[list[bool]], unit: int, start: int, end: int
) -> int:
    pairs = [(shape, Held.of(blocks)) for shape, blocks in zip(shapes, held, strict=True)]
    return reach(pairs, unit, start, end)


def _label(cached: bool, owner: str | None, held: bool, names: dict[str, str]) -> tuple[str, str]:
    if cached:
        return OWN, ""
    if owner is not None:
        return (HOST, names.get(owner, plain(owner))) if owner else (ARENA, "")
    return (STORE, "") if held else (MISSING, "")


def _runs(shape: GroupShape, labels: list[tuple[str, str]]) -> list[Run]:
    runs, first = [], 0
    for (source, engine), of_run in groupby(labels):
        count = len(list(of_run))
        tokens = first * shape.block_size, (first + count) * shape.block_size
        runs.append(Run(first, count, *tokens, source, engine))
        first += count
    return runs


def _sources(
    shapes: Sequence[GroupShape], labels: list[list[tuple[str, str]]], start: int, end: int
) -> dict[str, int]:
    """Return how many tokens a request would load from `start` to `end`, by place. They are counted
    as the engine counts them: one load for each engine, and one for the store."""
    if end == start:
        return {}
    read = [shape.needed(end, start) for shape in shapes]
    wanted = [of[part.start : part.stop] for of, part in zip(labels, read, strict=True)]
    loads = list(dict.fromkeys(label for of in wanted for label in of))
    loads.sort(key=lambda label: (ARENA, HOST, STORE).index(label[0]))
    spans = [
        BlockSpans.of(
            [
                (part.start, [each == load for each in of])
                for of, part in zip(wanted, read, strict=True)
            ]
        )
        for load in loads
    ]
    sources: Counter[str] = Counter()
    for (source, _), tokens in zip(loads, shares(end - start, spans), strict=True):
        sources[source] += tokens
    return sources


def _missing(
    asked: AskedEngine,
    others: Sequence[AskedEngine],
    tokens: Sequence[int],
    hashes: list[list[bytes]],
    ends: tuple[int, int],
    late: bool,
    remarks: list[str],
) -> Miss | None:
    """Return the first miss; None if there is none.

    Args:
        hashes: block hashes, by group.
        ends: end of the tokens that a request would load; end of the tokens that a cache might
            have.
        late: whether the store answered too late.
        remarks: takes the engines that could not be asked.
    """
    end, last = ends
    if end >= last:
        return None
    shapes = asked.engine.groups
    group = leading_group(shapes)
    size = shapes[group].block_size
    block = end // size
    question = block, hashes[group][block], tokens[:size], hashes[group][0]
    cause = "too_late" if late else asked.cause(*question)
    had = []
    for other in others if not asked.engine.alone else ():
        if other.engine.socket in asked.engine.neighbours and not other.engine.alone:
            try:
                if other.cause(*question) == "evicted":
                    had.append(other.name)
            except OmniError as error:
                remarks.append(
                    plain(f"{other.name} did not say whether it has evicted the block: {error}")
                )
    return Miss(block, end, last - end, cause, had)


def _why_apart(engine: ThisEngine, other: ThisEngine) -> str | None:
    """Return why an engine does not read another's arena; None if it does."""
    if not (engine.shares and other.shares):
        whose = "it does" if engine.shares else "this one does"
        return f"{whose} not use the arenas of this host"
    if engine.alone or other.alone:
        return f"the weights of {'this one' if engine.alone else 'it'} are not known (yet)"
    if other.traits.get("weights") != engine.traits.get("weights"):
        return "it has other weights in its memory"
    if other.socket in engine.neighbours:
        return None
    for name, ours in engine.traits.items():
        theirs = other.traits.get(name)
        if ours != theirs:
            return plain(f"another {name.replace('_', ' ')}: {theirs!r}, here {ours!r}")
    return "they have not met yet"
