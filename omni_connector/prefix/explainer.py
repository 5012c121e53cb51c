# SPDX-License-Identifier: Apache-2.0
"""An engine's answers to `omni-connector explain`, which asks where the KV of a prompt is.

A prompt that is asked about is treated as that of a request: `SharedPrefix` says what of it can be
loaded, `PrefixLoads` from where, and `Misses` why no more. Nothing is loaded, no block counts as
used, and no statistics change.

A thread of its own answers, and the engine's thread waits for the interpreter's lock meanwhile. So
tokens are hashed, and looked up in vLLM's own KV cache, part by part. The rest takes as long as the
look-up of a request. It reads only what any thread may read: block indexes, the pool under its
lock, and single entries of dicts.
"""

import enum
import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from msgspec import UNSET

from omni_connector.copy.held_blocks import EngineRequest
from omni_connector.errors import ProtocolError
from omni_connector.identity.epochs import WeightsEpoch
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Listener
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
from omni_connector.prefix.explain import (
    KIND,
    MAX_RUNS,
    MAX_TOKENS,
    QUESTIONS,
    AskEngine,
    AskEvicted,
    AskPrompt,
    Evicted,
    Explained,
    FoundTail,
    Later,
    Place,
    ThisEngine,
    Tokenizer,
)
from omni_connector.prefix.hints import NO_HINTS
from omni_connector.prefix.host_blocks import Found, HostBlocks
from omni_connector.prefix.kept_prompts import KeptPrompts
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.loads import PrefixLoads
from omni_connector.prefix.lookups import Held, reach
from omni_connector.prefix.misses import Misses
from omni_connector.prefix.neighbours import index_socket
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt
from omni_connector.requests.phases import Phase
from omni_connector.requests.state import Requests, RequestState
from omni_connector.stores.shared_blocks import encodable, reader_traits

_SOURCES: Final = {
    "tokens_kept": Place.ARENA,
    "tokens_from_host": Place.HOST,
    "tokens_shared": Place.STORE,
}

# Most prompts that are being told, or wait for the store; of more, the oldest is given up. It
# bounds memory: the longest prompt takes some 15 MB.
_MAX_PROMPTS: Final = 4


@dataclass(frozen=True, kw_only=True)
class ExplainedEngine:
    """The engine for which `Explainer` answers.

    Attributes:
        folder: the runtime folder.
        engine_id, name, compatibility, hash_id: of the engine; its model's name, as in its status.
        model: vLLM's configuration of its model.
        groups: what it keeps.
        hash_tokens: returns vLLM's hashes of blocks, given their tokens, the cache salt and the
            hash of the block before them.
        cached: looks a block up in vLLM's own prefix cache, by its hash and groups; returns None if
            it is not there.
        weights: of the engine.
        requests: that it has.
    """

    folder: Path
    engine_id: str
    name: str
    compatibility: CompatibilityKey
    hash_id: str
    model: Any
    groups: SharedGroups
    hash_tokens: Callable[[list[int], str | None, bytes | None], Sequence[bytes]]
    cached: Callable[[Any, list[int]], object]
    weights: WeightsEpoch
    requests: Requests


class Offers(Protocol):
    """`SharedPrefix`, which says of a request's prompt what can be loaded."""

    loads: PrefixLoads

    def look_up(self, prompt: SharedPrompt) -> None: ...
    def offer(self, state: RequestState, num_computed: int) -> int | None: ...


@dataclass
class _AskedRequest:
    """In the place of a request with the prompt."""

    cache_salt: str | None
    cached: list[list[bool]]  # for each group which of its blocks vLLM's own KV cache has
    all_token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    block_hashes: list[bytes] = field(default_factory=list)
    prompt: SharedPrompt | None = None  # once all tokens are told
    own: int = 0  # tokens that vLLM's own KV cache has
    request_id: str = ""
    status: enum.Enum = Phase.ARRIVED
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    num_prompt_tokens = num_tokens

    def is_like(self, request: EngineRequest) -> bool:
        """Whether a request has this prompt, with this salt."""
        end, hashes = self.num_tokens, self.block_hashes
        return (
            request.num_prompt_tokens == end
            and list(request.block_hashes[: len(hashes)]) == hashes
            and list(request.all_token_ids[:end]) == self.all_token_ids.tolist()
        )


class Explainer:
    """Answers at a socket in the runtime folder, on a thread of its own.

    Args:
        engine: the engine to explain.
        shared: says what a request would load.
        misses: says why it would load no more.
        host: the arenas that it uses; None for none.
        prefix: of its keys.
        kept: obeys `omni-connector cache`; None where there is no arena that it could tell of.

    Raises:
        TransportError: another process has this engine's socket.
        ConfigError: the runtime folder's path is too long.
    """

    def __init__(
        self,
        engine: ExplainedEngine,
        shared: Offers,
        misses: Misses,
        host: HostBlocks | None,
        prefix: KeyPrefix,
        kept: KeptPrompts | None = None,
    ) -> None:
        self._engine = engine
        self._groups = engine.groups.shapes
        self._shared = shared
        self._misses = misses
        self._host = host
        self._prefix = prefix
        self._kept = kept
        self._asked: OrderedDict[int, _AskedRequest] = OrderedDict()
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
        """Answer one of `QUESTIONS`.

        Raises:
            ProtocolError: the prompt has no tokens, or too many, or was given up.
        """
        match question:
            case AskPrompt():
                return self._hear(question), None
            case AskEvicted():
                return Evicted(self._misses.evicted(question.key)), None
            case AskEngine():
                return self._introduce(), None
        return self._obey(question), None

    def _obey(self, order: msgspec.Struct) -> msgspec.Struct:
        kept = self._kept
        if kept is None:
            return Refusal("this engine shares no arena (`share` is off)", package=PACKAGE)
        done: Prompts | Done | Keys | Later | None = None
        match order:
            case ListPrompts():
                done = kept.listed(order.first)
            case PinPrompt():
                done = kept.pin(order.name, order.seconds)
            case DropPrompts():
                done = kept.drop_all() if order.name is None else kept.drop(order.name)
            case AskKeys():
                done = kept.keys(order)
            case BringBlocks():
                try:
                    done = kept.bring(order) or Later()
                except ProtocolError as error:  # it is no fault of the message's form
                    return Refusal(str(error), package=PACKAGE)
        return done or Refusal("there is no such prompt here (any more)", package=PACKAGE)

    def _introduce(self) -> ThisEngine:
        engine, weights = self._engine, self._engine.weights
        model = engine.model
        name = str(model.tokenizer)
        host = self._host
        neighbours = () if host is None else host.find([[] for _ in self._groups]).engines
        stained = "vLLM's prefix cache may hold KV of other weights, until it is reset"
        return ThisEngine(
            engine_id=engine.engine_id[:1024],
            model=encodable(engine.name),
            tokenizer=Tokenizer(
                encodable(os.path.abspath(name) if os.path.isdir(name) else name),
                model.tokenizer_revision,
                bool(model.trust_remote_code),
            ),
            groups=tuple(
                msgspec.structs.replace(shape, layers="", pages=("any",), names=UNSET)
                for shape in self._groups
            ),
            traits=reader_traits(engine.compatibility, engine.hash_id),
            weights=weights.sharing_id or "",
            socket=index_socket(engine.folder, engine.engine_id).name,
            neighbours=tuple(each.name for each in neighbours if not each.own),
            shares=host is not None,
            alone=self._prefix.is_own,
            unsettled=weights.unsettled,
            problem=encodable(weights.problem or (stained if weights.stained else "")),
        )

    def _hear(self, question: AskPrompt) -> Later | Explained:
        asked = self._asked.pop(question.ticket, None)
        if asked is None:
            asked = _AskedRequest(question.salt, [[] for _ in self._groups])
        told = question.first + len(question.tokens)
        if question.first != asked.num_tokens or (question.tokens and asked.prompt is not None):
            raise ProtocolError("the prompt was given up, as others were asked about meanwhile")
        if not 1 <= told <= MAX_TOKENS:
            raise ProtocolError(f"a prompt of {told} tokens")
        if question.tokens:
            self._take(asked, question.tokens)
        explained = self._explain(asked) if question.whole else None
        if explained is not None:
            return explained
        self._asked[question.ticket] = asked
        if len(self._asked) > _MAX_PROMPTS:
            self._asked.popitem(last=False)
        return Later()

    def _take(self, asked: _AskedRequest, tokens: list[int]) -> None:
        """Hash the next tokens, and look for their blocks in vLLM's own KV cache."""
        groups, hashes = self._engine.groups, asked.block_hashes
        asked.all_token_ids.extend(tokens)
        left = asked.all_token_ids[len(hashes) * groups.hash_block_size :].tolist()
        after = hashes[-1] if hashes else None
        hashes += map(bytes, self._engine.hash_tokens(left, asked.cache_salt, after))
        for cached, group, (_, step) in zip(
            asked.cached, groups.ids, groups.block_sizes, strict=True
        ):
            if step:
                new = hashes[(len(cached) + 1) * step - 1 :: step]
                cached += [self._has(each, [group]) for each in new]

    def _has(self, block_hash: bytes, groups: list[int]) -> bool:
        try:
            return self._engine.cached(block_hash, groups) is not None
        except RuntimeError:  # the engine's thread has changed the entry meanwhile
            return self._engine.cached(block_hash, groups) is not None

    def _explain(self, asked: _AskedRequest) -> Explained | None:
        """What a request would find; None while the store is asked."""
        shared = self._shared
        prompt = asked.prompt or self._look_up(asked)
        known = not (self._prefix.is_own and self._engine.weights.unsettled)
        state = RequestState(asked, NO_HINTS, prefix=prompt)
        offered = shared.offer(state, asked.own) if known else 0
        if offered is None:
            return None
        end = asked.own + offered
        sources = {Place.OWN: asked.own}
        for counter, tokens in shared.loads.sources(prompt, asked.own, end).items():
            sources[_SOURCES[counter]] = tokens
        miss, key = (self._misses.missing(prompt, end) if known else None) or (None, b"")
        return Explained(
            known=known,
            sources=sources,
            groups=self._runs(asked, prompt, known),
            tail=self._tail(prompt) if offered else None,
            missing=miss,
            key=key,
            late=prompt.late,
            requests=Counter(
                state.phase.value
                for state in list(self._engine.requests.values())
                if asked.is_like(state.request)
            ),
        )

    def _look_up(self, asked: _AskedRequest) -> SharedPrompt:
        """Begin to look up a prompt whose tokens are all told."""
        groups = self._engine.groups
        asked.prompt = prompt = SharedPrompt(
            request=asked,
            loads=True,
            hashed_tokens=None,
            adapter="",
            block_sizes=groups.block_sizes,
            sent=[],
            hints=NO_HINTS,
            tokens_ahead=groups.tokens_ahead,
        )
        held = zip(self._groups, map(Held.of, asked.cached), strict=True)
        last = prompt.last_reachable(asked.num_tokens, groups.unit)
        asked.own = reach(list(held), groups.unit, 0, last)
        self._shared.look_up(prompt)
        return prompt

    def _runs(
        self, asked: _AskedRequest, prompt: SharedPrompt, known: bool
    ) -> tuple[tuple[tuple[Place, str, int], ...], ...]:
        """See `Explained.groups`."""
        found = prompt.found
        if prompt.tail is not None and self._host is not None:
            # In `found` the tail stands in the place of a full block.
            found = self._host.find(prompt.names, prompt.keys, alone=prompt.lookup is None)
        stored = None if prompt.lookup is None else prompt.lookup.held
        left = MAX_RUNS
        groups = []
        for g, cached in enumerate(asked.cached):
            places = [(Place.MISSING if known else Place.UNKNOWN, "")] * len(cached)
            if stored is not None:
                for block in np.flatnonzero(stored[g].blocks[: len(cached)]):
                    places[block] = Place.STORE, ""
            if found is not None:
                owners = found.groups[g].owners[: len(cached)]
                for block in np.flatnonzero(owners >= 0):
                    places[block] = _whose(found, owners[block])
            own = Held.of(cached).reach(0) if self._groups[g].attention_type == "all" else None
            for block in np.flatnonzero(cached[:own]):
                places[block] = Place.OWN, ""
            runs = tuple((*place, len(list(run))) for place, run in groupby(places))
            groups.append(runs[:left])
            left -= len(groups[-1])
        return tuple(groups)

    def _tail(self, prompt: SharedPrompt) -> FoundTail | None:
        if prompt.tail is None:
            return None
        unit = self._engine.groups.unit
        block = prompt.tail.end // unit
        place = Place.STORE, ""
        if prompt.found is not None:
            states = [shape.attention_type for shape in self._groups].index("last")
            for owner in prompt.found.groups[states].owners[block : block + 1]:
                place = _whose(prompt.found, owner) if owner >= 0 else place
        return FoundTail(block, block * unit, prompt.tail.end, *place)


def _whose(found: Found, owner: int) -> tuple[Place, str]:
    name = found.engines[owner].name
    return (Place.HOST if name else Place.ARENA), name
