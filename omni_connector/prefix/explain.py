# SPDX-License-Identifier: Apache-2.0
"""What `omni-connector explain` asks an engine about a prompt, and what the engine answers.

The command sends the token ids of a prompt, in parts, and is answered what a request with it would
find; see `prefix.explainer`.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from omni_connector.kv.shapes import GroupShape
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.prefix.cache_orders import (
    AskKeys,
    BringBlocks,
    Done,
    DropPrompts,
    Keys,
    ListPrompts,
    PinPrompt,
    Prompts,
)

KIND: Final = "e-"
"""Names of the sockets at which engines answer begin with this."""

MAX_TOKENS: Final = 1 << 20
"""Longest prompt, in tokens."""

TOKENS_AT_ONCE: Final = 1024
"""Most tokens in one message. The engine hashes them in well below a millisecond."""

MAX_RUNS: Final = 1024
"""Most runs of blocks in one answer, of all groups together. A message has room for as many."""

_Text = Annotated[str, Meta(max_length=1024)]
_Socket = Annotated[str, Meta(max_length=48)]
_Hash = Annotated[bytes, Meta(min_length=8, max_length=64)]
_Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=TOKENS_AT_ONCE)]
_Ticket = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Place(StrEnum):
    """Where a block is."""

    OWN = "own"
    """In the engine's own KV cache."""
    ARENA = "arena"
    """In the engine's arena."""
    HOST = "host"
    """In the arena of another engine."""
    STORE = "store"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """It is not known yet."""


class AskEngine(msgspec.Struct, frozen=True, tag="ask-engine"):
    """Asks what an engine is; answered with `ThisEngine`."""

    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class AskPrompt(msgspec.Struct, frozen=True, tag="ask-prompt"):
    """Tells the next tokens of a prompt, and asks about it after the last; answered at once.

    The answer is `Explained` after the last part, else `Later`. Where the store is asked, it is
    `Later` after the last part, too, until the store has answered: ask again without tokens.

    Attributes:
        ticket: names the prompt; drawn by the asker.
        first: index of the part's first token in the prompt.
        tokens: the part.
        salt: the request's `cache_salt`; the same in all parts.
        whole: whether the prompt ends with this part.
    """

    ticket: _Ticket
    first: _Number
    tokens: _Tokens = []
    salt: Annotated[str, Meta(max_length=4096)] | None = None
    whole: bool = False


class AskEvicted(msgspec.Struct, frozen=True, tag="ask-evicted"):
    """Asks whether the engine has evicted a block lately, by its key; answered with `Evicted`."""

    key: _Hash


class Tokenizer(msgspec.Struct, frozen=True):
    """An engine's tokenizer: its name or absolute path, and how to load it."""

    name: _Text
    revision: _Text | None = None
    trust_remote_code: bool = False


class ThisEngine(msgspec.Struct, frozen=True, kw_only=True, tag="this-engine"):
    """Describes an engine.

    Attributes:
        engine_id, model: as in its status.
        tokenizer: of its model.
        groups: the cache groups that it keeps, without the order of bytes in their pages.
        traits: by name, the properties that must be equal before engines read each other's slots.
        weights: what engines that share have in common of their weights.
        socket: name of the socket at which it gives its index.
        neighbours: names of these sockets, of the engines whose arenas it has attached.
        shares: whether it uses the arenas of this host.
        alone: whether it is not known which weights it has, so that it shares with nobody.
        unsettled: whether its next request shows which weights it has.
        problem: why its weights cannot be known; "" where they can.
    """

    engine_id: _Text
    model: _Text
    tokenizer: Tokenizer
    groups: Annotated[tuple[GroupShape, ...], Meta(min_length=1, max_length=256)]
    traits: Annotated[dict[_Text, _Text], Meta(max_length=64)]
    weights: _Text
    socket: _Text
    neighbours: Annotated[tuple[_Text, ...], Meta(max_length=1024)]
    shares: bool
    alone: bool
    unsettled: bool
    problem: _Text = ""


class Later(msgspec.Struct, frozen=True, tag="later"):
    """The prompt is not whole yet, or the store has not answered yet."""


class FoundTail(msgspec.Struct, frozen=True):
    """The block in which an earlier request has ended, and where the prompt would go on.

    Attributes:
        block: index of the block in the prompt.
        first_token: index of its first token.
        end_token: index after the last token that was kept.
        source: of the block, in the group with recurrent states.
        engine: of the engine whose arena it is, for `Place.HOST`; else "".
    """

    block: _Number
    first_token: _Number
    end_token: _Number
    source: Place
    engine: _Socket = ""


class Miss(msgspec.Struct, frozen=True):
    """The first block that a request would have to compute although a cache might have had it.

    Attributes:
        block: index of the block in the prompt.
        first_token: the first token that is computed.
        tokens: tokens from there on that a cache might have had.
        cause: one of the causes of the metric `tokens_missed_total`.
        evicted_from: other engines whose arenas evicted the block lately.
    """

    block: _Number
    first_token: _Number
    tokens: _Number
    cause: _Text
    evicted_from: tuple[_Text, ...] = ()


class Explained(msgspec.Struct, frozen=True, kw_only=True, tag="explained"):
    """What a request with the prompt of `AskPrompt` would find now. Engines are named by their
    `ThisEngine.socket`.

    Attributes:
        known: whether it is known what it would load: not before the engine's weights are.
        sources: tokens that it would not compute, by place.
        groups: for each group its full blocks, from the first on: place, engine, and number of
            consecutive blocks. Those after `MAX_RUNS` are left out.
        tail: the end of another request with which these tokens end; None if there is none.
        missing: None if only the end of the prompt is computed, or if nothing is known of it.
        key: of the missing block; see `AskEvicted`.
        late: whether the store did not answer in time.
        requests: the engine's requests with this prompt that have not ended: how many are in which
            phase.
    """

    known: bool
    sources: Annotated[dict[Place, _Number], Meta(max_length=4)]
    groups: Annotated[tuple[tuple[tuple[Place, _Socket, _Number], ...], ...], Meta(max_length=256)]
    tail: FoundTail | None = None
    missing: Miss | None = None
    key: Annotated[bytes, Meta(max_length=64)] = b""
    late: bool = False
    requests: Annotated[dict[_Text, int], Meta(max_length=16)] = {}


class Evicted(msgspec.Struct, frozen=True, tag="evicted"):
    """Whether the block of `AskEvicted` was evicted lately."""

    evicted: bool


QUESTIONS: Final = msgspec.msgpack.Decoder(
    AskEngine
    | AskPrompt
    | AskEvicted
    | ListPrompts
    | PinPrompt
    | DropPrompts
    | AskKeys
    | BringBlocks
)
ANSWERS: Final = msgspec.msgpack.Decoder(
    ThisEngine | Later | Explained | Evicted | Prompts | Done | Keys | Refusal
)
