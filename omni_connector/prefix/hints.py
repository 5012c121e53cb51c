# SPDX-License-Identifier: Apache-2.0
"""Hints of requests to the prefix cache: `omni_hints: {...}` (or `omni`) in their
`kv_transfer_params`, or `omni_...` in their `vllm_xargs`. Routers forward both unchanged.

A hint that cannot be followed is counted, and the request goes on without it. No hint gives one
client the blocks of another, because a block's key includes the cache salt.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from omni_connector.arena.slot_index import Ints
from omni_connector.arena.slot_pool import NONE, Bools, Floats
from omni_connector.config import HintName
from omni_connector.errors import unknown

KEYS: Final = ("omni", "omni_hints")
"""Keys of the hints in `kv_transfer_params`. Of a hint under both, the second counts."""

XARGS_PREFIX: Final = "omni_"
"""Names of hints begin with this in vLLM's `extra_args`, where `vllm_xargs` arrive."""

MAX_PIN_S: Final = 86400.0
"""Longest pin that a request may ask for, in seconds: a day."""

# Most hints that a request may have in one place. If it has more, none is read there.
_MAX_HINTS: Final = 16

_MAX_NAME: Final = 128  # characters of a session's name


class PinPrefix(msgspec.Struct, frozen=True):
    """A pin in the words of Dynamo's `pin_prefix`.

    Attributes:
        token_ids: with which the prompt begins; the full blocks of these are pinned.
        ttl_seconds: for how long.
    """

    token_ids: Annotated[tuple[int, ...], Meta(min_length=1)]
    ttl_seconds: Annotated[float, Meta(ge=0, le=MAX_PIN_S)]


class Hints(msgspec.Struct, frozen=True):
    """The hints of a request.

    Attributes:
        cache: `no`: its blocks are neither kept in the arena nor stored.
        pin_s: seconds for which its blocks are not evicted from this engine's arena.
        prefetch: whether the request is sent only to bring its blocks into this engine's arena.
        thinking: `drop`: the blocks of its answer are not kept from where the model begins to
            think; `keep`: they are; None: they are if it asks for the arena.
        session: whose newer requests end the pins of older ones; see `sessions`.
        over: whether the session ends with this request: its blocks are let go.
        pin_until: `pin_s` by the clock: Unix time in seconds.
        pin_prefix: `pin_s` for a part of the prompt.
        pinned_tokens: the leading tokens whose blocks `pin_s` is for; 0: all. No hint by itself.
    """

    cache: Literal["no", "normal"] = "normal"
    pin_s: Annotated[float, Meta(ge=0, le=MAX_PIN_S)] = 0.0
    prefetch: bool = False
    thinking: Literal["keep", "drop"] | None = None
    session: Annotated[str, Meta(max_length=_MAX_NAME)] = ""
    over: bool = False
    pin_until: Annotated[float, Meta(ge=0)] = 0.0
    pin_prefix: PinPrefix | None = None
    pinned_tokens: int = 0

    @property
    def keeps_here(self) -> bool:
        """Whether this engine's arena keeps each of its blocks: also those that a neighbour has
        already, and those that would be passed over."""
        pins = self.pin_s > 0 or self.pin_until > 0 or self.pin_prefix is not None
        return self.prefetch or pins

    def allowed(self, names: Collection[HintName]) -> "tuple[Hints, int]":
        """The hints that the operator allows, and the number of hints that were refused."""
        refused: dict[str, Any] = {}
        if self.cache != "normal" and self.cache not in names:
            refused["cache"] = "normal"
        for name, value in (("pin_s", 0.0), ("prefetch", False), ("thinking", None)):
            if getattr(self, name) != value and name not in names:
                refused[name] = value
        if self.over and "over" not in names:
            refused["over"] = False
        return msgspec.structs.replace(self, **refused) if refused else self, len(refused)

    def parts(self, first: int, blocks: int, block_size: int) -> "list[tuple[range, Hints]]":
        """The hints for consecutive blocks of a group: the places of blocks, and what they have.

        Args:
            first: the index of the first of the blocks in its group.
            blocks: their number.
            block_size: their tokens.
        """
        pinned = blocks
        if self.pinned_tokens:
            pinned = min(max(0, self.pinned_tokens // block_size - first), blocks)
        if pinned == blocks:
            return [(range(blocks), self)]
        rest = msgspec.structs.replace(self, pin_s=0.0)
        return [(range(pinned), self), (range(pinned, blocks), rest)]

    def joined(self, other: "Hints") -> "Hints":
        """The hints for a block of two requests: the stronger of each. A pin of a request without
        a session is not ended with one."""
        pins = [each for each in (self, other) if each.pin_s]
        session = pins[0].session if pins and all(each.session for each in pins) else ""
        return Hints(
            pin_s=max(self.pin_s, other.pin_s),
            prefetch=self.prefetch or other.prefetch,
            session=session,
        )


NO_HINTS: Final = Hints()

_NAMES: Final = tuple(name for name in Hints.__struct_fields__ if name != "pinned_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A block that has filled, and may be kept in the arena.

    Attributes:
        group: position among the transferred groups.
        block_hash: its key in arenas; see `SharedPrompt.keys`.
        block_id: vLLM's.
        prompt: a small number for the request that has filled it; see `EvictionOrder.fill`.
        hints: of the requests that have filled it.
        cached_as: vLLM's hash. While vLLM finds the block by it, the block's content is unchanged.
    """

    group: int
    block_hash: bytes
    block_id: int
    prompt: int = 0
    hints: Hints = NO_HINTS
    cached_as: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class FilledBlocks:
    """Blocks of one group that have filled, and may be kept in the arena: `Candidate`s by column.

    Attributes:
        keys, cached_as: of each block, no key twice (but before `each_once`).
        block_ids, prompts: int64 (blocks,).
        hints: of each block; None where no request has any.
    """

    keys: list[bytes]
    cached_as: list[bytes]
    block_ids: Ints
    prompts: Ints
    hints: list[Hints] | None

    @classmethod
    def of(cls, blocks: Sequence[Candidate]) -> "FilledBlocks":
        """The same blocks, of one group."""
        numbers = [(each.block_id, each.prompt) for each in blocks]
        block_ids, prompts = np.array(numbers, np.int64).reshape(-1, 2).T
        hints = [each.hints for each in blocks]
        return cls(
            [each.block_hash for each in blocks],
            [each.cached_as for each in blocks],
            block_ids,
            prompts,
            hints if any(each is not NO_HINTS for each in hints) else None,
        )

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, places: Ints) -> "FilledBlocks":
        """The blocks at these places, which are in ascending order."""
        if len(places) == len(self.keys):
            return self
        chosen = places.tolist()
        return FilledBlocks(
            [self.keys[i] for i in chosen],
            [self.cached_as[i] for i in chosen],
            self.block_ids[places],
            self.prompts[places],
            None if self.hints is None else [self.hints[i] for i in chosen],
        )

    @classmethod
    def joined(cls, parts: "Sequence[FilledBlocks]") -> "FilledBlocks":
        """The blocks of several of these, each key once, with the hints of all its requests."""
        hinted = any(part.hints is not None for part in parts)
        hints = [each for part in parts for each in part.hints or [NO_HINTS] * len(part)]
        return cls(
            [key for part in parts for key in part.keys],
            [each for part in parts for each in part.cached_as],
            np.concatenate([NONE, *(part.block_ids for part in parts)]),
            np.concatenate([NONE, *(part.prompts for part in parts)]),
            hints if hinted else None,
        ).each_once()

    def each_once(self) -> "FilledBlocks":
        """Each key once, where it is last, with the hints of all places."""
        places = {key: place for place, key in enumerate(self.keys)}
        if len(places) == len(self.keys):
            return self
        blocks = self
        if self.hints is not None:
            joined: dict[bytes, Hints] = {}
            for key, asked in zip(self.keys, self.hints, strict=True):
                joined[key] = asked.joined(joined.get(key, asked))
            blocks = replace(self, hints=[joined[key] for key in self.keys])
        return blocks.at(np.sort(np.fromiter(places.values(), np.int64, len(places))))

    @property
    def keeps_here(self) -> Bools:
        """Which blocks hints ask to have in the own arena."""
        if self.hints is None:
            return np.zeros(len(self.keys), bool)
        return np.array([each.keeps_here for each in self.hints], bool)

    @property
    def of_sessions(self) -> Bools:
        """Which blocks are pinned for a session."""
        if self.hints is None:
            return np.zeros(len(self.keys), bool)
        return np.array([bool(each.session) for each in self.hints], bool)

    @property
    def pins_s(self) -> Floats:
        """For how many seconds hints ask to pin each block; 0 for no pin."""
        if self.hints is None:
            return np.zeros(len(self.keys))
        return np.array([each.pin_s for each in self.hints], np.float64)


def read_hints(
    params: Mapping[Any, Any],
    extra_args: Mapping[Any, Any] | None = None,
    token_ids: Sequence[int] | None = None,
    now: Callable[[], float] = time.time,
) -> tuple[Hints, int]:
    """The hints of a request, and the number of its hints that are unknown, wrong or contradict.

    Args:
        params: `kv_transfer_params`, from outside. Their hints win over those of `extra_args`.
        extra_args: of the sampling parameters, from outside. vLLM turns booleans of `vllm_xargs`
            into numbers, and users may write numbers as texts, so both are converted.
        token_ids: of the prompt; None where it has none.
        now: Unix time in seconds.

    >>> read_hints({"omni": {"pin_s": 60}}, {"omni_prefetch": 1, "omni_cache": "maybe"})[1]
    1
    """
    known: dict[str, Any] = {}
    bad = 0
    for _, given, strict in _places(params, extra_args):
        fitting, wrong = _fitting(given, strict=strict)
        known |= fitting
        bad += wrong
    hints = Hints(**known)
    if (hints.cache == "no" or hints.over) and hints.keeps_here:
        over = hints.over and hints.session != ""
        return Hints(hints.cache, session=hints.session, over=over), bad + 1
    if hints.over and not hints.session:
        return msgspec.structs.replace(hints, over=False), bad + 1
    if (until := hints.pin_until) > 0:
        left = min(max(0.0, until - now()), MAX_PIN_S)
        hints = msgspec.structs.replace(hints, pin_until=0.0, pin_s=max(hints.pin_s, left))
    if (part := hints.pin_prefix) is not None:
        hints = msgspec.structs.replace(hints, pin_prefix=None)
        begins = token_ids is not None and [*token_ids[: len(part.token_ids)]] == [*part.token_ids]
        if hints.pin_s or not begins:
            bad += 1
        else:
            tokens = len(part.token_ids)
            hints = msgspec.structs.replace(hints, pin_s=part.ttl_seconds, pinned_tokens=tokens)
    return hints, bad


def _places(
    params: Mapping[Any, Any], extra_args: Mapping[Any, Any] | None
) -> Iterator[tuple[str, object, bool]]:
    """Where a request may have hints: the place's name, what stands there, and whether values must
    have their types. What stands in a later place wins."""
    named = {
        name.removeprefix(XARGS_PREFIX): value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(XARGS_PREFIX)
    }
    yield "vllm_xargs", named, False
    for key in KEYS:
        if (given := params.get(key)) is not None:
            yield key, given, True


def _fitting(given: object, *, strict: bool) -> tuple[dict[str, Any], int]:
    """The valid hints, with values of their types, and the number of the others."""
    if not isinstance(given, Mapping) or len(given) > _MAX_HINTS:
        return {}, 1
    known: dict[str, Any] = {}
    for key, value in given.items():
        if key in _NAMES:
            try:
                known[key] = getattr(msgspec.convert({key: value}, Hints, strict=strict), key)
            except (msgspec.ValidationError, UnicodeError, RecursionError):
                continue
    return known, len(given) - len(known)


def wrong_hint(
    params: Mapping[Any, Any], extra_args: Mapping[Any, Any] | None = None
) -> str | None:
    """What is wrong with the first hint that `read_hints` counts, and what was meant; None where
    each hint fits by itself.

    >>> wrong_hint({"omni": {"prefech": True}})[:47]
    "unknown hint 'prefech'; did you mean 'prefetch'"
    """
    for place, hints, strict in reversed(list(_places(params, extra_args))):
        if not isinstance(hints, Mapping):
            return f"{place} must be an object of hints, not {type(hints).__name__}"
        if len(hints) > _MAX_HINTS:
            return f"a request may have {_MAX_HINTS} hints, not {len(hints)}"
        for key, value in hints.items():
            if key not in _NAMES:
                return unknown("hint", key, _NAMES)
            try:
                msgspec.convert({key: value}, Hints, strict=strict)
            except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
                return f"hint {key}: {error}"
    return None
