# SPDX-License-Identifier: Apache-2.0
"""An engine's answers to `omni-connector explain`, which asks where the KV of a prompt is.

The command sends the token ids of a prompt, in parts. The engine hashes them as it hashes its own
prompts. It answers for each block whether its own KV cache, an arena or the store has it, and for a
block that nobody has, why. An answer only reads: no block counts as used, no statistics change.

A thread of its own answers. Each question is small and takes well below a millisecond, because the
engine's thread waits for the interpreter's lock meanwhile. It reads only what any thread may read:
block indexes, the pool under its lock, and single entries of dicts.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta

from omni_connector.errors import ProtocolError
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.tails import first_parent
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Listener
from omni_connector.prefix.lookups import Lookup, StoreLookups

if TYPE_CHECKING:  # they need torch, and who only asks an engine needs none
    from omni_connector.kv.compatibility import CompatibilityKey
    from omni_connector.prefix.host_blocks import HostBlocks
    from omni_connector.prefix.misses import Misses
    from omni_connector.prefix.tails import Tails

KIND: Final = "e-"
"""Names of the sockets at which engines answer begin with this."""

TOKENS_AT_ONCE: Final = 1024
"""Most tokens that one question has hashed; a whole block where a block has more."""

BLOCKS_AT_ONCE: Final = 768
"""Most blocks in one question. A message has room for as many of the longest hashes."""

STORE_S: Final = 2.0
"""Longest wait for the store's answer, in seconds."""

MESSAGE_TOKENS: Final = 12_000
"""Most tokens in a message, and in a hashed block: as many as a message has room for."""

# Most look-ups in the store that wait for their answers; of more, the oldest is given up.
_MAX_TICKETS: Final = 16

_Text = Annotated[str, Meta(max_length=1024)]
_Hash = Annotated[bytes, Meta(min_length=8, max_length=64)]
_Hashes = Annotated[tuple[_Hash, ...], Meta(max_length=BLOCKS_AT_ONCE)]
_Tokens = Annotated[
    list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(min_length=1, max_length=MESSAGE_TOKENS)
]
_Flags = Annotated[tuple[bool, ...], Meta(max_length=BLOCKS_AT_ONCE)]
_Ticket = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 32)]


class AskEngine(msgspec.Struct, frozen=True, tag="ask-engine"):
    """Asks what an engine is; answered with `ThisEngine`."""

    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class AskHashes(msgspec.Struct, frozen=True, tag="ask-hashes"):
    """Asks how an engine hashes consecutive tokens of a prompt; answered with `Hashes`.

    Attributes:
        after: hash of the block before these tokens; None at the beginning of a prompt.
        tokens: of whole blocks of `hash_block_size`; tokens after the last whole block are ignored.
        salt: the request's `cache_salt`.
    """

    after: _Hash | None
    tokens: _Tokens
    salt: Annotated[str, Meta(max_length=4096)] | None = None


class AskPlaces(msgspec.Struct, frozen=True, tag="ask-places"):
    """Asks which cache and which arenas have consecutive blocks; answered with `Places`.

    Attributes:
        group: position among the groups of `ThisEngine`.
        hashes: of the blocks.
    """

    group: _Index
    hashes: _Hashes


class AskStored(msgspec.Struct, frozen=True, tag="ask-stored"):
    """Asks which blocks the store holds; answered at once with `Stored`.

    While the answer has no result, ask again with the same ticket.

    Attributes:
        ticket: names the question; drawn by the asker.
        group, hashes: as in `AskPlaces`.
    """

    ticket: _Ticket
    group: _Index
    hashes: _Hashes


class AskTail(msgspec.Struct, frozen=True, tag="ask-tail"):
    """Asks for the longest tail in the arenas with which a block begins; answered with `TailPlace`.

    Attributes:
        after: hash of the block before; None for the first block of a prompt.
        tokens: of the block, fewer than all.
        salt: the request's `cache_salt`.
    """

    after: _Hash | None
    tokens: _Tokens
    salt: Annotated[str, Meta(max_length=4096)] | None = None


class AskStoredTail(msgspec.Struct, frozen=True, tag="ask-stored-tail"):
    """Asks for the longest tail in the store with which a block begins; answered at once with
    `StoredTail`.

    Attributes:
        ticket: as in `AskStored`.
        after, tokens, salt: as in `AskTail`.
    """

    ticket: _Ticket
    after: _Hash | None
    tokens: _Tokens
    salt: Annotated[str, Meta(max_length=4096)] | None = None


class AskCause(msgspec.Struct, frozen=True, tag="ask-cause"):
    """Asks why neither a cache nor an arena nor the store has a block; answered with `Cause`.

    Attributes:
        block: its index in the prompt.
        key: its hash.
        beginning: tokens of the prompt's first block, of the group by which misses are counted.
        first: the hash of that block.
    """

    block: _Index
    key: _Hash
    beginning: _Tokens
    first: _Hash


class Tokenizer(msgspec.Struct, frozen=True):
    """An engine's tokenizer: its name or absolute path, and how to load it."""

    name: _Text
    revision: _Text | None = None
    trust_remote_code: bool = False


class ThisEngine(msgspec.Struct, frozen=True, kw_only=True, tag="this-engine"):
    """Describes an engine.

    Attributes:
        engine_id: its configured or drawn id.
        tokenizer: of its model.
        hash_block_size: tokens of a block that is hashed; divides the block size of every group.
        groups: the cache groups that it keeps, without the order of bytes in their pages.
        traits: by name, the properties that must be equal before engines read each other's slots.
        socket: name of the socket at which it gives its index.
        neighbours: names of these sockets, of the engines that it shares with now.
        shares: whether it uses the arenas of this host.
        stores: whether it uses a store.
        alone: whether its weights are not known, now or at all, so that it shares with nobody.
        tails: whether it finds the ends of earlier requests within blocks, in the arenas.
        stored_tails: whether it finds them in the store.
    """

    engine_id: _Text
    tokenizer: Tokenizer
    hash_block_size: Annotated[int, Meta(ge=1, le=MESSAGE_TOKENS)]
    groups: Annotated[tuple[GroupShape, ...], Meta(min_length=1, max_length=256)]
    traits: Annotated[dict[_Text, _Text], Meta(max_length=64)]
    socket: _Text
    neighbours: Annotated[tuple[_Text, ...], Meta(max_length=1024)]
    shares: bool
    stores: bool
    alone: bool
    tails: bool = False
    stored_tails: bool = False

    def __post_init__(self) -> None:
        if any(shape.block_size % self.hash_block_size for shape in self.groups if shape.is_cached):
            raise ValueError("the hashed blocks do not divide those of the groups")


class Hashes(msgspec.Struct, frozen=True, tag="hashes"):
    """The hashes of the blocks of `AskHashes`, in order."""

    hashes: Annotated[tuple[_Hash, ...], Meta(max_length=MESSAGE_TOKENS)]


class Places(msgspec.Struct, frozen=True, tag="places"):
    """Where the blocks of `AskPlaces` are.

    Attributes:
        cached: whether the engine's own KV cache has each block.
        owners: for each block the position in `engines` of the engine whose arena has it; -1 if
            none has. In a group that keeps all tokens, blocks after the first missing one have -1.
        engines: names as in `ThisEngine.neighbours`; "" is the engine itself.
    """

    cached: _Flags
    owners: Annotated[
        tuple[Annotated[int, Meta(ge=-1, lt=1024)], ...], Meta(max_length=BLOCKS_AT_ONCE)
    ]
    engines: Annotated[tuple[_Text, ...], Meta(max_length=1024)]

    def __post_init__(self) -> None:
        if len(self.cached) != len(self.owners) or max(self.owners, default=-1) >= len(
            self.engines
        ):
            raise ValueError("as many owners as blocks, all of them named")


class TailPlace(msgspec.Struct, frozen=True, tag="tail-place"):
    """Where the longest tail of `AskTail` is.

    Attributes:
        tokens: of the tail; 0 if there is none.
        engines: names as in `ThisEngine.neighbours`, "" for the engine itself: for each group the
            engine whose arena has its block; empty if there is no tail.
    """

    tokens: Annotated[int, Meta(ge=0, le=MESSAGE_TOKENS)]
    engines: Annotated[tuple[_Text, ...], Meta(max_length=256)] = ()


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Which of the blocks of `AskStored` the store holds; None while it has not answered.

    Attributes:
        late: whether the time for an answer is over.
    """

    held: _Flags | None
    late: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the store has answered."""
        return self.held is not None


class StoredTail(msgspec.Struct, frozen=True, tag="stored-tail"):
    """How long the longest tail of `AskStoredTail` is.

    Attributes:
        tokens: of the tail; 0 if there is none, None while the store has not answered.
        late: whether the time for an answer is over.
    """

    tokens: Annotated[int, Meta(ge=0, le=MESSAGE_TOKENS)] | None
    late: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the store has answered."""
        return self.tokens is not None


class Cause(msgspec.Struct, frozen=True, tag="cause"):
    """Why nobody has a block: one of the causes that `Misses` counts."""

    cause: _Text


QUESTIONS: Final = msgspec.msgpack.Decoder(
    AskEngine | AskHashes | AskPlaces | AskStored | AskTail | AskStoredTail | AskCause
)
ANSWERS: Final = msgspec.msgpack.Decoder(
    ThisEngine | Hashes | Places | Stored | TailPlace | StoredTail | Cause | Refusal
)


@dataclass(frozen=True, kw_only=True)
class ExplainedEngine:
    """The engine for which `Explainer` answers.

    Attributes:
        folder: the runtime folder.
        engine_id, compatibility, hash_id: of the engine.
        model: vLLM's configuration of its model.
        hash_block_size: tokens of a block that is hashed.
        group_ids: index of each transferred group among vLLM's groups.
        hash_tokens: returns vLLM's hashes of blocks, given their tokens, the cache salt and the
            hash of the block before them.
        cached: looks a block up in vLLM's own prefix cache, by its hash and groups; returns None if
            it is not there.
        weights: returns what engines that share have in common of their weights.
    """

    folder: Path
    engine_id: str
    compatibility: "CompatibilityKey"
    hash_id: str
    model: Any
    hash_block_size: int
    group_ids: tuple[int, ...]
    hash_tokens: Callable[[list[int], str | None, bytes | None], Sequence[bytes]]
    cached: Callable[[Any, list[int]], object]
    weights: Callable[[], str] = str


class Explainer:
    """Answers at a socket in the runtime folder, on a thread of its own.

    Args:
        engine: the engine to explain.
        host: the arenas that it uses; None for none.
        lookups: asks its store; None for none.
        tails: finds tails; None for none.
        misses: returns the causes of misses.
        prefix: returns the prefix of its keys.
        alone: returns whether it shares with nobody, as its weights are not known.
        clock: seconds, monotonic.

    Raises:
        TransportError: another process has this engine's socket.
        ConfigError: the runtime folder's path is too long.
    """

    def __init__(
        self,
        engine: ExplainedEngine,
        *,
        host: "HostBlocks | None",
        lookups: StoreLookups | None,
        tails: "Tails | None",
        misses: "Misses",
        prefix: Callable[[], str],
        alone: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._groups = engine.compatibility.groups
        self._host = host
        self._lookups = lookups
        self._tails = tails
        self._misses = misses
        self._prefix = prefix
        self._alone = alone
        self._clock = clock
        self._tickets: OrderedDict[int, Lookup] = OrderedDict()
        self._listener = Listener(QUESTIONS, self.answer)
        try:
            self._listener.add(socket_path(engine.folder, f"explain:{engine.engine_id}", kind=KIND))
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """Answer no more. Idempotent."""
        self._listener.close()

    def answer(self, question: msgspec.Struct) -> tuple[msgspec.Struct, None]:
        """Answer one of `QUESTIONS`, in well below a millisecond.

        Raises:
            ProtocolError: there is no such group or store, or the question has too many tokens.
        """
        return self._answer(question), None

    def _answer(self, question: msgspec.Struct) -> msgspec.Struct:
        match question:
            case AskHashes():
                return self._hash(question)
            case AskPlaces():
                return self._look(question)
            case AskStored():
                return self._ask_store(question)
            case AskTail():
                return self._find_tail(question)
            case AskStoredTail():
                return self._search_tail(question)
            case AskCause():
                return Cause(self._misses.explained(**msgspec.structs.asdict(question)))
        return self._introduce()

    def _introduce(self) -> ThisEngine:
        engine = self._engine
        model = engine.model
        name = str(engine.model.tokenizer)
        neighbours = (
            () if self._host is None else self._host.find([[] for _ in self._groups]).engines
        )
        return ThisEngine(
            engine_id=engine.engine_id[:1024],
            tokenizer=Tokenizer(
                _encodable(os.path.abspath(name) if os.path.isdir(name) else name),
                model.tokenizer_revision,
                bool(model.trust_remote_code),
            ),
            hash_block_size=engine.hash_block_size,
            groups=tuple(
                msgspec.structs.replace(shape, layers="", pages=("any",), names=UNSET)
                for shape in self._groups
            ),
            traits=_traits(engine),
            socket=socket_path(engine.folder, f"index:{engine.engine_id}", kind="i-").name,
            neighbours=tuple(each.name for each in neighbours if not each.own),
            shares=self._host is not None,
            stores=self._lookups is not None,
            alone=self._alone(),
            tails=self._tails is not None and self._host is not None,
            stored_tails=self._tails is not None and self._lookups is not None,
        )

    def _hash(self, question: AskHashes) -> Hashes:
        if len(question.tokens) > max(TOKENS_AT_ONCE, self._engine.hash_block_size):
            raise ProtocolError(f"{len(question.tokens)} tokens are asked for at once")
        hashes = self._engine.hash_tokens(question.tokens, question.salt, question.after)
        return Hashes(tuple(map(bytes, hashes)))

    def _of_group(self, question: AskPlaces | AskStored) -> list[list[bytes]]:
        if question.group >= len(self._groups):
            raise ProtocolError(f"there is no group {question.group}")
        hashes: list[list[bytes]] = [[] for _ in self._groups]
        hashes[question.group] = list(question.hashes)
        return hashes

    def _look(self, question: AskPlaces) -> Places:
        hashes = self._of_group(question)
        group = question.group
        in_group = [self._engine.group_ids[group]]
        cached = tuple(self._has(each, in_group) for each in hashes[group])
        if self._host is None:
            return Places(cached, (-1,) * len(cached), ())
        found = self._host.find(hashes)
        owners = found.groups[group].owners.tolist()
        owners += [-1] * (len(cached) - len(owners))
        return Places(cached, tuple(owners), tuple(each.name for each in found.engines))

    def _find_tail(self, question: AskTail) -> TailPlace:
        if self._host is None or self._tails is None:
            raise ProtocolError("this engine finds no tails")
        parent = self._parent(question)
        searched = self._host.find([[] for _ in self._groups])
        found = self._tails.longest(searched, parent, question.tokens)
        if found is None:
            return TailPlace(0)
        number, blocks = found
        owners = [searched.engines[int(of_group.owners[0])] for of_group in blocks]
        return TailPlace(number, tuple(each.name for each in owners))

    def _parent(self, question: AskTail | AskStoredTail) -> bytes:
        size = self._groups[0].block_size  # of all groups, where there are tails
        if len(question.tokens) >= size:
            raise ProtocolError(f"{len(question.tokens)} tokens within a block of {size}")
        return question.after or first_parent(question.salt, "")

    def _search_tail(self, question: AskStoredTail) -> StoredTail:
        if self._lookups is None or self._tails is None:
            raise ProtocolError("this engine finds no tails in a store")
        tails = self._tails
        parent = self._parent(question)
        lookup = Lookup(
            self._prefix(),
            [[] for _ in self._groups],
            self._clock() + STORE_S,
            lambda held: tails.search_block(parent, question.tokens),
        )
        lookup = self._looked_up(question.ticket, lookup)
        if lookup.held is not None:
            return StoredTail(0 if lookup.tail is None else lookup.tail.end)
        return StoredTail(None, late=self._clock() >= lookup.deadline)

    def _has(self, block_hash: bytes, groups: list[int]) -> bool:
        try:
            return self._engine.cached(block_hash, groups) is not None
        except RuntimeError:  # the engine's thread has changed the entry meanwhile
            return self._engine.cached(block_hash, groups) is not None

    def _ask_store(self, question: AskStored) -> Stored:
        hashes = self._of_group(question)
        if self._lookups is None:
            raise ProtocolError("this engine has no store")
        lookup = Lookup(self._prefix(), hashes, self._clock() + STORE_S)
        lookup = self._looked_up(question.ticket, lookup)
        if lookup.held is not None:
            held = lookup.held[question.group].blocks[: len(question.hashes)]
            return Stored((*held, *[False] * (len(question.hashes) - len(held))))
        return Stored(None, late=self._clock() >= lookup.deadline)

    def _looked_up(self, ticket: int, new: Lookup) -> Lookup:
        """The look-up of a ticket, kept until it has an answer or is late; `new`, which begins, if
        there is none."""
        assert self._lookups is not None
        lookup = self._tickets.pop(ticket, None)
        if lookup is None:
            lookup = new
            self._lookups.ask(lookup)
        if lookup.held is None and self._clock() < lookup.deadline:
            self._tickets[ticket] = lookup
            if len(self._tickets) > _MAX_TICKETS:
                _, given_up = self._tickets.popitem(last=False)
                given_up.deadline = self._clock()  # so that the store is not asked any more
        return lookup


def _encodable(text: str) -> str:
    """The text as UTF-8 can encode it, 1024 characters at most. A path may have other bytes."""
    return text.encode("utf-8", "replace").decode()[:1024]


def _traits(engine: ExplainedEngine) -> dict[str, str]:
    """See `ThisEngine.traits`. They are the traits of `readers_id`, and the weights."""
    traits = {name: _encodable(str(value)) for name, value in engine.compatibility.values().items()}
    key = engine.compatibility.of_sharing()
    groups = key.stages if key.later_stages else key.groups
    pages = hashlib.blake2b(msgspec.msgpack.encode(groups), digest_size=8)
    # Other weights are told by the keys of blocks.
    traits |= {"configuration": traits["weights"], "weights": engine.weights()}
    return {**traits, "KV cache groups": pages.hexdigest(), "hashes": engine.hash_id[:1024]}
