# SPDX-License-Identifier: Apache-2.0
"""Hints of requests to the prefix cache: `omni: {...}` in their `kv_transfer_params`, or `omni_...`
in their `vllm_xargs`. Routers forward both unchanged.

A hint that cannot be followed is counted, and the request goes on without it. No hint gives a
tenant the blocks of another, because a block's key includes the cache salt.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from omni_connector.arena.slot_index import Ints, SlotKey
from omni_connector.arena.slot_pool import NONE, Bools, SlotPool
from omni_connector.config import HintName
from omni_connector.errors import unknown
from omni_connector.runtime.context import EngineContext

KEY: Final = "omni"
"""The key of the hints in `kv_transfer_params`."""

XARGS_PREFIX: Final = "omni_"
"""Names of hints begin with this in vLLM's `extra_args`, where `vllm_xargs` arrive."""

MAX_PIN_S: Final = 86400.0
"""Longest pin that a request may ask for, in seconds: a day."""

ANY_SALT: Final = "*"
"""In the setting `tenants`: each cache salt is a tenant of its own."""

# Most hints that a request may have. If it has more, none is read.
_MAX_HINTS: Final = 16

# Values of `Hints.cache`, the strongest last.
_ORDER: Final = ("no", "normal", "high")


class Hints(msgspec.Struct, frozen=True):
    """The hints of a request.

    Attributes:
        cache: `no`: its blocks are neither kept in the arena nor stored; `high`: those in the arena
            are evicted later than others.
        pin_s: seconds for which its blocks are not evicted from this engine's arena.
        prefetch: whether the request is sent only to bring its blocks into this engine's arena.
        thinking: `drop`: the blocks of its answer are not kept from where the model begins to
            think; `keep`: they are; None: they are if it asks for the arena.
    """

    cache: Literal["no", "normal", "high"] = "normal"
    pin_s: Annotated[float, Meta(ge=0, le=MAX_PIN_S)] = 0.0
    prefetch: bool = False
    thinking: Literal["keep", "drop"] | None = None

    @property
    def keeps_here(self) -> bool:
        """Whether this engine keeps even blocks that a neighbour has already."""
        return self.prefetch or self.pin_s > 0

    @property
    def is_privileged(self) -> bool:
        """Whether its slots are evicted later than others, or not at all."""
        return self.cache == "high" or self.pin_s > 0

    @property
    def asks_arena(self) -> bool:
        """Whether the hints need an arena."""
        return self.keeps_here or self.cache == "high"

    def allowed(self, names: Collection[HintName]) -> "tuple[Hints, int]":
        """The hints that the operator allows, and the number of hints that were refused."""
        cache = self.cache if self.cache == "normal" or self.cache in names else "normal"
        pin_s = self.pin_s if "pin_s" in names else 0.0
        prefetch = self.prefetch and "prefetch" in names
        thinking = self.thinking if "thinking" in names else None
        allowed = Hints(cache, pin_s, prefetch, thinking)
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(allowed), strict=True)
        return allowed, sum(asked != given for asked, given in pairs)

    def joined(self, other: "Hints") -> "Hints":
        """The hints for a block of two requests: the stronger of each."""
        return Hints(
            max(self.cache, other.cache, key=_ORDER.index),
            max(self.pin_s, other.pin_s),
            self.prefetch or other.prefetch,
        )


NO_HINTS: Final = Hints()


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A block that has filled, and may be kept in the arena.

    Attributes:
        group: position among the transferred groups.
        block_hash: its key in arenas; see `SharedPrompt.keys`.
        block_id: vLLM's.
        prompt: a small number for the request that has filled it; see `EvictionOrder.fill`.
        tenant: see `tenant_of`.
        hints: of the requests that have filled it.
        cached_as: vLLM's hash. While vLLM finds the block by it, the block's content is unchanged.
    """

    group: int
    block_hash: bytes
    block_id: int
    prompt: int = 0
    tenant: int = 0
    hints: Hints = NO_HINTS
    cached_as: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class FilledBlocks:
    """Blocks of one group that have filled, and may be kept in the arena: `Candidate`s by column.

    Attributes:
        keys, cached_as: of each block, no key twice.
        block_ids, prompts, tenants: int64 (blocks,).
        hints: of each block; None where no request has any.
    """

    keys: list[bytes]
    cached_as: list[bytes]
    block_ids: Ints
    prompts: Ints
    tenants: Ints
    hints: list[Hints] | None

    @classmethod
    def of(cls, blocks: Sequence[Candidate]) -> "FilledBlocks":
        """The same blocks, of one group."""
        numbers = [(each.block_id, each.prompt, each.tenant) for each in blocks]
        block_ids, prompts, tenants = np.array(numbers, np.int64).reshape(-1, 3).T
        hints = [each.hints for each in blocks]
        return cls(
            [each.block_hash for each in blocks],
            [each.cached_as for each in blocks],
            block_ids,
            prompts,
            tenants,
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
            self.tenants[places],
            None if self.hints is None else [self.hints[i] for i in chosen],
        )

    @classmethod
    def joined(cls, parts: "Sequence[FilledBlocks]") -> "FilledBlocks":
        """The blocks of several of these, each key once."""
        known = set[bytes]()
        new: list[FilledBlocks] = []
        for part in parts:
            places = [i for i, key in enumerate(part.keys) if key not in known]
            known.update(part.keys)
            new.append(part.at(np.array(places, np.int64)))
        if len(new) == 1:
            return new[0]
        return cls(
            [key for part in new for key in part.keys],
            [each for part in new for each in part.cached_as],
            np.concatenate([NONE, *(part.block_ids for part in new)]),
            np.concatenate([NONE, *(part.prompts for part in new)]),
            np.concatenate([NONE, *(part.tenants for part in new)]),
            [hints for part in new for hints in part.hints or [NO_HINTS] * len(part)]
            if any(part.hints is not None for part in new)
            else None,
        )

    def mask(self, wanted: Callable[[Hints], bool]) -> Bools:
        """Which blocks have hints of a kind."""
        if self.hints is None:
            return np.zeros(len(self.keys), bool)
        return np.fromiter(map(wanted, self.hints), bool, len(self.keys))


def read_hints(
    params: Mapping[Any, Any], extra_args: Mapping[Any, Any] | None = None
) -> tuple[Hints, int]:
    """The hints of a request, and the number of its hints that are unknown, wrong or contradict.

    Args:
        params: `kv_transfer_params`, from outside. Their hints win over those of `extra_args`.
        extra_args: of the sampling parameters, from outside. vLLM turns booleans of `vllm_xargs`
            into numbers, and users may write numbers as texts, so both are converted.

    >>> read_hints({"omni": {"pin_s": 60}}, {"omni_prefetch": 1, "omni_cache": "maybe"})
    (Hints(cache='normal', pin_s=60.0, prefetch=True, thinking=None), 1)
    """
    named = {
        name.removeprefix(XARGS_PREFIX): value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(XARGS_PREFIX)
    }
    xargs, bad_xargs = _fitting(named, strict=False)
    known, bad = _fitting({} if (given := params.get(KEY)) is None else given, strict=True)
    bad += bad_xargs
    hints = Hints(**{**xargs, **known})
    if hints.cache == "no" and hints.keeps_here:
        return Hints("no"), bad + 1
    return hints, bad


def _fitting(given: object, *, strict: bool) -> tuple[dict[str, Any], int]:
    """The valid hints, with values of their types, and the number of the others."""
    if not isinstance(given, Mapping) or len(given) > _MAX_HINTS:
        return {}, 1
    known: dict[str, Any] = {}
    for key, value in given.items():
        if key in Hints.__struct_fields__:
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

    >>> wrong_hint({"omni": {"prefech": True}})
    "unknown hint 'prefech'; did you mean 'prefetch'? Known are cache, pin_s, prefetch, thinking"
    """
    given = params.get(KEY)
    if given is not None and not isinstance(given, Mapping):
        return f"{KEY} must be an object of hints, not {type(given).__name__}"
    named = {
        name.removeprefix(XARGS_PREFIX): value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(XARGS_PREFIX)
    }
    for hints, strict in ((given or {}, True), (named, False)):
        if len(hints) > _MAX_HINTS:
            return f"a request may have {_MAX_HINTS} hints, not {len(hints)}"
        for key, value in hints.items():
            if key not in Hints.__struct_fields__:
                return unknown("hint", key, Hints.__struct_fields__)
            try:
                msgspec.convert({key: value}, Hints, strict=strict)
            except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
                return f"hint {key}: {error}"
    return None


def tenant_of(cache_salt: str | None, tenants: Collection[str] = (ANY_SALT,)) -> int:
    """The number with which the slots of a tenant are marked, never 0.

    Args:
        cache_salt: of a request; its client may have chosen it.
        tenants: salts that are tenants of their own; with `ANY_SALT` among them, each salt is one.
            All other requests, and those without a salt, are one tenant together.
    """
    if cache_salt is None or not (ANY_SALT in tenants or cache_salt in tenants):
        return _UNSALTED
    return _number_of(b"=" + cache_salt.encode("utf-8", "surrogatepass"))


def _number_of(salt: bytes) -> int:
    return int.from_bytes(blake2b(salt, digest_size=8).digest(), "little", signed=True) or 1


_UNSALTED: Final = _number_of(b"")


@dataclass(frozen=True)
class HintRules:
    """The operator's settings for hints and tenants.

    Attributes:
        allowed: the hints that are followed.
        tenants: see `tenant_of`.
    """

    allowed: frozenset[HintName]
    tenants: frozenset[str]

    def tenant(self, cache_salt: str | None) -> int:
        """See `tenant_of`."""
        return tenant_of(cache_salt, self.tenants)


class HintPolicy:
    """Follows the hints of requests in this engine's arena, as far as the operator allows.

    A slot is *privileged* if it is pinned or if `cache: high` favours it. Clients choose their
    hints, so the number of privileged slots is bounded, in all and for each tenant.

    Args:
        pool: the slots.
        context: the clock of `SlotPool.end_pins`; statistics, which count refused hints.
        pin_part: part of all slots that may be privileged.
        tenant_quota: part of all slots that one tenant may have; also the part of the privileged
            slots.
    """

    def __init__(
        self,
        pool: SlotPool,
        context: EngineContext,
        pin_part: float,
        tenant_quota: float,
    ) -> None:
        self._pool = pool
        self._clock = context.clock
        num_slots = len(pool.generation)
        pool.quota = int(tenant_quota * num_slots) if tenant_quota < 1 else None
        self._max_privileged = int(pin_part * num_slots)
        self._max_of_tenant = int(tenant_quota * pin_part * num_slots)
        self._stats = context.stats

    def grant(self, group: int, blocks: FilledBlocks) -> None:
        """Follow the hints for blocks of a group that are in the arena, or are being copied there.

        If there is no room for all, the first blocks of each request get it: later ones cannot be
        used without them.
        """
        if blocks.hints is None:
            return
        asking = blocks.at(np.flatnonzero(blocks.mask(attrgetter("is_privileged"))))
        if not len(asking) or self._grant_all(group, asking):
            return
        assert asking.hints is not None
        whose = zip(asking.tenants.tolist(), asking.hints, asking.keys, strict=True)
        for (tenant, hints), run in groupby(whose, key=itemgetter(0, 1)):
            self._grant(hints, tenant, group, [key for _, _, key in run])

    def _grant_all(self, group: int, blocks: FilledBlocks) -> bool:
        """Follow all hints of these blocks at once, if there is room for each; whether there is."""
        assert blocks.hints is not None
        pins = np.array([each.pin_s for each in blocks.hints])
        high = blocks.mask(lambda hints: hints.cache == "high")
        with self._pool.lock:
            pool = self._pool
            slots = pool.places(group, blocks.keys)
            found = slots >= 0
            there = slots[found]
            tenants = blocks.tenants[found]
            new = ~pool.privileged(there)
            if not pool.may_own(there, tenants):
                return False
            if pool.num_privileged + np.count_nonzero(new) > self._max_privileged:
                return False
            for tenant, count in zip(*np.unique(tenants[new], return_counts=True), strict=True):
                if pool.privileged_of(int(tenant)) + count > self._max_of_tenant:
                    return False
            favoured = high[found]
            if favoured.any():
                pool.privilege(there[favoured], tenants[favoured], favour=True, pin_until=None)
            pinned = pins[found] > 0
            if pinned.any():
                ends = self._clock() + pins[found][pinned]
                pool.privilege(there[pinned], tenants[pinned], favour=False, pin_until=ends)
        if lacking := int(np.count_nonzero(pins[~found])):
            self._stats.count("pins_refused", lacking)
        return True

    def _grant(self, hints: Hints, tenant: int, group: int, keys: Sequence[SlotKey]) -> None:
        with self._pool.lock:
            pool = self._pool
            slots = pool.find(group, keys)
            left = self._max_privileged - pool.num_privileged
            left_of_tenant = self._max_of_tenant - pool.privileged_of(tenant)
            room = max(0, min(left, left_of_tenant))
            known = pool.privileged(slots)
            granted = pool.privilege(
                slots[known | ((~known).cumsum() <= room)],
                tenant,
                favour=hints.cache == "high",
                pin_until=self._clock() + hints.pin_s if hints.pin_s else None,
            )
        if hints.cache == "high" and len(slots) > granted:
            self._stats.count("high_refused", len(slots) - granted)
        if hints.pin_s and len(keys) > granted:
            self._stats.count("pins_refused", len(keys) - granted)
