# SPDX-License-Identifier: Apache-2.0
"""Pins the memory of arenas, so that a device copies to and from it by itself.

A thread of its own pins, and not before the engine has captured its CUDA graphs: a registration of
memory by another thread makes a capture fail, or fails itself (vLLM #46933).

Launches wait while the driver registers memory, 2.5 ms for 64 MiB. Arenas of neighbours come while
the engine serves, so they are pinned in smaller pieces, each begun when a step has been launched.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier
from omni_connector.runtime.backoff import Backoff
from omni_connector.runtime.turns import WOKEN, MakeLock, StartTurns, Turns

logger = logging.getLogger("vllm.omni_connector.staging")

CAPTURING: Final = frozenset({900, 901})
"""CUDA errors of a call that no thread may make while some thread captures a graph."""

_CAPTURE_S: Final = 0.5
"""Seconds after a refusal because of a capture in which nothing is pinned."""

_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 300.0
"""Seconds after which a piece that was refused is tried again; doubled each time."""

_SETTLED_S: Final = 2.0
"""Seconds without new memory after which less than a whole piece is pinned. Hosts have a limit on
registrations (about 65,000 were seen), so that pieces must not be small."""

_OF_A_NEIGHBOUR: Final = 8
"""Pieces of a neighbour's arena for one of the own arena: 128 MiB, 5 ms of the driver. 64 GiB are
512 registrations then, of the 65,000 that a host has."""

_IDLE_S: Final = 0.05
"""Seconds after a step in which another piece of a neighbour's arena waits for the next step."""

_CLOSE_S: Final = 5.0
"""Longest wait of `close` for the thread, in seconds."""


class PinnedBytes(NamedTuple):
    """Bytes of slots that have memory. A device copies pinned ones by itself, and no others."""

    pinned: int = 0
    unpinned: int = 0


class _Piece:
    """Slots that the device is asked for in one call, and when it is asked again."""

    def __init__(self, slots: NDArray[np.uint8], clock: Callable[[], float]) -> None:
        self.slots = slots
        self.retry_at = 0.0
        self.backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S, clock)


class _Memory:
    """One mapping; see `PinnedMemory`.

    Attributes:
        slots: all of them.
        of_a_neighbour: whether they are another engine's, which this one only reads.
        pinned: the pieces that the device has.
        refused: the pieces that it did not take.
        tried: the end of the slots in these pieces.
        ready: the end of the slots that have memory.
        ready_at: when the last of them came.
    """

    def __init__(self, owner: "Pinning", slots: NDArray[np.uint8]) -> None:
        self.slots = slots
        self.of_a_neighbour = not slots.flags.writeable
        self.pinned: list[NDArray[np.uint8]] = []
        self.refused: list[_Piece] = []
        self.tried = 0
        self.ready = 0
        self.ready_at = 0.0
        self._owner = owner

    def populated(self, end: int) -> None:
        """See `PinnedMemory.populated`."""
        self.ready_at = self._owner.clock()
        self.ready = end
        self._owner.wake()

    def close(self) -> None:
        """See `PinnedMemory.close`."""
        self._owner.let_go(self)

    def due(self, at_once: int, now: float) -> tuple[float, slice | _Piece]:
        """The next piece of `at_once` bytes, or one to ask for again; and from when on."""
        if self.of_a_neighbour:
            at_once //= _OF_A_NEIGHBOUR
        whole = min(len(self.slots), self.tried + max(1, at_once // self.slots.shape[1]))
        end = min(self.ready, whole)
        new = slice(self.tried, end)
        found: list[tuple[float, slice | _Piece]] = [(each.retry_at, each) for each in self.refused]
        if end > self.tried:
            found.append((0.0 if end == whole else self.ready_at + _SETTLED_S, new))
        if not found:
            return WOKEN, new
        due, piece = min(found, key=lambda each: each[0])
        if self.of_a_neighbour and due <= now:
            due = max(due, self._owner.between_steps())
        return due, piece


class Pinning:
    """Has a copier's device pin the arenas that one rank copies to and from.

    What a device refuses it is asked for again, later. Neither other pieces of the same arena nor
    other arenas wait for that.

    Args:
        copier: pins pieces; closed after this.
        clock: seconds, monotonic.
        start: starts the thread.
        lock: makes a lock.

    Attributes:
        bytes: of all arenas that are mapped, once pinning has begun.
    """

    def __init__(
        self,
        copier: BlockCopier,
        clock: Callable[[], float],
        start: StartTurns,
        lock: MakeLock,
    ) -> None:
        self.clock = clock
        self.bytes = PinnedBytes()
        self._copier = copier
        self._start = start
        self._memories: list[_Memory] = []
        # Held while the device pins a piece or lets go of one.
        self._lock = lock()
        self._thread: Turns | None = None
        self._not_before = 0.0
        # Written by the engine's thread; `_taken` by both, and a piece too many does no harm.
        self._launching = False
        self._launched_at = 0.0
        self._taken = False  # whether a piece was begun since then
        self._awaited = False  # whether the thread waits for the next step
        self._closed = False
        self._warned = False

    def follow(self, slots: NDArray[np.uint8]) -> _Memory:
        """See `Pins.follow`."""
        memory = _Memory(self, slots)
        self._memories.append(memory)
        return memory

    def begin(self) -> None:
        """The engine has captured its graphs: pin what has memory. Cheap, also when called again.
        For the engine's thread."""
        if self._thread is None and self._copier.pinned_at_once and not self._closed:
            self._thread = self._start("omni-pin", self._turn)

    def step_begins(self) -> None:
        """The engine is about to launch a step: begin no piece of a neighbour's arena."""
        self._launching = True

    def step_launched(self) -> None:
        """It has launched it, and the device has work meanwhile: one piece may be pinned."""
        self._launched_at = self.clock()
        self._taken = self._launching = False
        if self._awaited:
            self._awaited = False
            self.wake()

    def between_steps(self) -> float:
        """From when on a piece of a neighbour's arena may be pinned."""
        self._awaited = True  # first, so that a step that ends now is not missed
        if self._launching:
            return WOKEN
        return self._launched_at + _IDLE_S if self._taken else 0.0

    def wake(self) -> None:
        """Look for what can be pinned."""
        if (thread := self._thread) is not None:
            thread.wake()

    def let_go(self, memory: _Memory) -> None:
        """See `PinnedMemory.close`."""
        with self._lock:
            if memory not in self._memories:
                return
            self._memories.remove(memory)
            for piece in memory.pinned:
                self._copier.unpin(piece)
            self._count()

    def close(self) -> None:
        """Let go of all memory; no copy may be under way. Idempotent; waits 5 s at most."""
        self._closed = True
        if (thread := self._thread) is not None:
            thread.wake()
            thread.join(_CLOSE_S)
            if thread.is_alive():
                logger.error(
                    "The device did not pin memory in %g s; it may hang. What it has pinned stays "
                    "so until the process ends",
                    _CLOSE_S,
                )
                return
        for memory in list(self._memories):
            memory.close()

    def _turn(self) -> float | None:
        with self._lock:
            if self._closed:
                return None
            wait = self._pin_next()
            self._count()
            return wait

    def _pin_next(self) -> float:
        """Ask for one piece, if one is due; returns the seconds until the next is."""
        now = self.clock()
        if self._not_before > now:
            return self._not_before - now
        dues = [(*each.due(self._copier.pinned_at_once, now), each) for each in self._memories]
        if not dues:
            return WOKEN
        due, piece, memory = min(dues, key=lambda each: each[0])
        if due > now:
            return due - now
        if isinstance(piece, slice):
            self._pin(memory, _Piece(memory.slots[piece], self.clock), now)
            memory.tried = piece.stop
        else:
            memory.refused.remove(piece)
            self._pin(memory, piece, now)
        return 0.0

    def _pin(self, memory: _Memory, piece: _Piece, now: float) -> None:
        self._awaited = False
        self._taken |= memory.of_a_neighbour
        code = self._copier.pin(piece.slots)
        if not code:
            memory.pinned.append(piece.slots)
        else:
            if code in CAPTURING:
                self._not_before = piece.retry_at = now + _CAPTURE_S
            else:
                piece.retry_at = now + piece.backoff.failed()
                self._warn(piece.slots.nbytes, code)
            memory.refused.append(piece)

    def _warn(self, nbytes: int, code: int) -> None:
        log = logger.debug if self._warned else logger.warning
        self._warned = True
        log(
            "The device did not pin %.2f GiB of an arena (CUDA error %d). Copies to and from this "
            "memory take two to four times as long. The device is asked again, for this and for "
            "the rest; see docs/troubleshooting.md",
            nbytes / 2**30,
            code,
        )

    def _count(self) -> None:
        pinned = unpinned = 0
        for memory in self._memories:
            of_it = sum(each.nbytes for each in memory.pinned)
            pinned += of_it
            unpinned += memory.ready * int(memory.slots.shape[1]) - of_it
        self.bytes = PinnedBytes(pinned, unpinned)
