# SPDX-License-Identifier: Apache-2.0
"""The prompts whose blocks the own arena has, for operators: they list, pin and drop them.

The arena knows blocks, not prompts. So the keys of the latest prompts are remembered here, when
their requests end. Whether the arena still has a block is looked up when somebody asks.
"""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from omni_connector.errors import ProtocolError
from omni_connector.kv.shapes import GroupShape, leading_group
from omni_connector.net.status import plain
from omni_connector.prefix.cache_orders import (
    MAX_LISTED,
    NAME_BYTES,
    AskKeys,
    BringBlocks,
    Done,
    KeptPrompt,
    Keys,
    Prompts,
)
from omni_connector.prefix.host_blocks import HostBlocks
from omni_connector.prefix.prompts import SharedPrompt
from omni_connector.runtime.bounded import BoundedMap

MOST_PROMPTS: Final = 1024
"""Most prompts that are remembered, which bounds the time of an answer."""

_MOST_MOVES: Final = 4
"""Prompts that are brought here at a time; of more, what the oldest has brought is not told."""

_KEYS: Final = 4
"""Keys that are remembered of all prompts together, for each slot of the arena. Prompts that begin
alike have the same keys."""


_NOTHING: Final = Done(0, 0)


@dataclass(slots=True, eq=False)
class _Move:
    keys: list[list[bytes]]  # by group, as far as they are named
    done: Done | None = _NOTHING  # of the latest blocks; None while they are copied

    def ended(self, blocks: int, others: int) -> None:
        self.done = Done(blocks, others)


@dataclass(slots=True, eq=False)
class _Prompt:
    keys: list[list[bytes]]  # of its full blocks, by group
    hits: int
    used_at: float
    request: str
    pinned_until: float = 0.0  # it is not forgotten before


class KeptPrompts:
    """Remembers prompts. Any thread may call this; only `note` is the engine's.

    Args:
        host: the arenas of this host.
        groups: the cache groups that this engine keeps.
        clock: seconds, monotonic; that of pins.
    """

    def __init__(
        self, host: HostBlocks, groups: Sequence[GroupShape], clock: Callable[[], float]
    ) -> None:
        self._host = host
        self._group = leading_group(groups)
        self._block_sizes = [shape.block_size for shape in groups]
        self._clock = clock
        self._lock = threading.Lock()
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()  # by last key, the oldest first
        self._num_keys = 0
        self._moves: BoundedMap[int, _Move] = BoundedMap(_MOST_MOVES)

    def note(self, prompt: SharedPrompt) -> None:
        """A request has ended. It takes the place of the longest prompt that it begins with."""
        request = prompt.request
        end = prompt.kept_tokens(min(request.num_computed_tokens, request.num_tokens - 1))
        hashes = [prompt.full_hashes(g, 0, end // size) for g, size in enumerate(self._block_sizes)]
        keys = [prompt.keys(prompt.names_of(g, 0, each)) for g, each in enumerate(hashes)]
        if keys[self._group] and prompt.hints.cache != "no":
            self._remember(keys, request.request_id)

    def _remember(self, keys: list[list[bytes]], request_id: str) -> None:
        leading = keys[self._group]
        with self._lock:
            before = next((each for each in reversed(leading) if each in self._prompts), None)
            hits = 0 if before is None else self._forget(before).hits + 1
            self._prompts[leading[-1]] = _Prompt(keys, hits, self._clock(), request_id)
            self._num_keys += sum(map(len, keys))
            while len(self._prompts) > 1 and (
                len(self._prompts) > MOST_PROMPTS or self._num_keys > _KEYS * self._host.num_slots
            ):
                self._forget(self._oldest())

    def _oldest(self) -> bytes:
        now = self._clock()
        unpinned = (last for last, each in self._prompts.items() if each.pinned_until <= now)
        return next(unpinned, next(iter(self._prompts)))

    def _forget(self, last: bytes) -> _Prompt:
        prompt = self._prompts.pop(last)
        self._num_keys -= sum(map(len, prompt.keys))
        return prompt

    def listed(self, first: int) -> Prompts:
        """The prompts of which the arena has blocks, the latest first, without the first ones."""
        with self._lock:
            latest = list(reversed(self._prompts.items()))
        told: list[KeptPrompt] = []
        for at, (last, prompt) in enumerate(latest[first:], first):
            if len(told) == MAX_LISTED:
                return Prompts(tuple(told), at)
            if (kept := self._told(last, prompt)) is not None:
                told.append(kept)
        return Prompts(tuple(told), None)

    def _told(self, last: bytes, prompt: _Prompt) -> KeptPrompt | None:
        keys, size = prompt.keys[self._group], self._block_sizes[self._group]
        kept, pinned_until = self._host.kept_until(self._group, keys)
        if not kept:
            return None
        now = self._clock()
        return KeptPrompt(
            _name(last),
            tokens=len(keys) * size,
            kept=kept * size,
            age=max(0.0, now - prompt.used_at),
            hits=prompt.hits,
            pinned=max(0.0, pinned_until - now),
            request=plain(prompt.request[:64]),
        )

    def pin(self, name: str, seconds: float) -> Done | None:
        """Pin what the arena has of a prompt, its beginning first, as far as pins are allowed; see
        `SlotPool.pin`. None: there is no such prompt."""
        if (prompt := self._named(name)) is None:
            return None
        prompt.pinned_until = until = self._clock() + seconds
        return Done(*self._host.pin(prompt.keys, until))

    def drop(self, name: str) -> Done | None:
        """Let go of the blocks of a prompt, but of those with which others begin. None: there is no
        such prompt."""
        prompt = self._named(name)
        if prompt is None:
            return None
        with self._lock:
            self._prompts.pop(prompt.keys[self._group][-1], None)
            self._num_keys = sum(sum(map(len, each.keys)) for each in self._prompts.values())
            others = list(self._prompts.values())
        keys = [
            of_group[max((_common(of_group, each.keys[g]) for each in others), default=0) :]
            for g, of_group in enumerate(prompt.keys)
        ]
        return Done(*self._host.drop(keys))

    def drop_all(self) -> Done:
        """Let go of all blocks, of whatever prompt."""
        with self._lock:
            self._prompts.clear()
            self._num_keys = 0
        return Done(*self._host.drop_all())

    def keys(self, asked: AskKeys) -> Keys | None:
        """The keys of blocks of a prompt. None: there is no such prompt."""
        prompt = self._named(asked.name)
        if prompt is None or asked.group >= len(prompt.keys):
            return None
        of_group = prompt.keys[asked.group]
        some = of_group[asked.first : asked.first + MAX_LISTED]
        return Keys(tuple(some), len(of_group), len(prompt.keys))

    def bring(self, asked: BringBlocks) -> Done | None:
        """Copy blocks of a prompt here from the arenas of other engines. One thread calls this.

        Returns:
            None while they are copied.

        Raises:
            ProtocolError: as `HostBlocks.bring`; or other blocks of the prompt are being copied.
        """
        move = self._moves.get(asked.ticket)
        if move is None:
            move = self._moves[asked.ticket] = _Move([[] for _ in self._block_sizes])
        if asked.keys:
            if move.done is None or asked.group >= len(move.keys):
                raise ProtocolError("other blocks are being copied, or there is no such group")
            move.done = None
            move.keys[asked.group] += asked.keys
            try:
                self._host.bring(asked.group, list(asked.keys), move.ended)
            except ProtocolError:
                del self._moves[asked.ticket]
                raise
        elif asked.whole and move.done is not None:
            del self._moves[asked.ticket]
            if move.keys[self._group]:
                self._remember(move.keys, "")
        return move.done

    def _named(self, name: str) -> _Prompt | None:
        with self._lock:
            return next(
                (prompt for last, prompt in self._prompts.items() if _name(last) == name), None
            )


def _name(last: bytes) -> str:
    return last[:NAME_BYTES].hex()


def _common(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Length of the common beginning. A key covers all blocks before its own.

    >>> _common([b"a", b"b", b"c"], [b"a", b"b", b"x", b"y"])
    2
    """
    return bisect_left(range(min(len(keys), len(others))), True, key=lambda i: keys[i] != others[i])
