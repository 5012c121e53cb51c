# SPDX-License-Identifier: Apache-2.0
"""`FaultyTransport`: any transport, with failures at the moments that a test chooses."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.arena.format import SlotHeader
from omni_connector.arena.pinning import Pins
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena

Verb = Literal["export", "withdraw", "attach", "slots", "verify", "read_into"]


@dataclass(slots=True)
class _Fault:
    error: Exception
    after: int
    times: int | None


class FaultyTransport(ArenaTransport):
    """Passes everything on to another transport, save for the faults injected into it.

    Args:
        inner: the transport that does the work; closed with this one.
    """

    def __init__(self, inner: ArenaTransport) -> None:
        self.inner: Final = inner
        self.transport = inner.transport
        self._lock = threading.Lock()
        self._faults: dict[str, list[_Fault]] = {}
        self._flips: set[tuple[int, int]] = set()
        self._partitioned = False

    def fail(self, verb: Verb, error: Exception, *, after: int = 0, times: int | None = 1) -> None:
        """Raise `error` at later calls of a verb, of this or of arenas attached through it.

        Args:
            verb: which call fails.
            error: what it raises.
            after: calls that still work before.
            times: calls that fail; None: all from there on.
        """
        with self._lock:
            self._faults.setdefault(verb, []).append(_Fault(error, after, times))

    def flip(self, slot: int, offset: int = 0) -> None:
        """Hand out this byte of the peers' slots with one bit changed, from now on."""
        with self._lock:
            self._flips.add((slot, offset))

    def partition(self) -> None:
        """Let all peers look dead (`RemoteArena.alive`), from now on."""
        self._partitioned = True

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()
            self._flips.clear()
            self._partitioned = False

    @property
    def supports_mapping(self) -> bool:
        return self.inner.supports_mapping

    def export(self, arena: Arena, name: str) -> Endpoint:
        self._strike("export")
        return self.inner.export(arena, name)

    def withdraw(self, endpoint: Endpoint) -> None:
        self._strike("withdraw")
        self.inner.withdraw(endpoint)

    def hand_on(self, arena: RemoteArena) -> Endpoint | None:
        return self.inner.hand_on(arena)

    def attach(self, endpoint: Endpoint, *, timeout: float) -> RemoteArena:
        self._strike("attach")
        return _FaultyArena(self, self.inner.attach(endpoint, timeout=timeout))

    def close(self) -> None:
        self.inner.close()

    def details(self) -> dict[str, Any]:
        return self.inner.details()

    def _strike(self, verb: Verb) -> None:
        with self._lock:
            for fault in self._faults.get(verb, ()):
                if fault.after:
                    fault.after -= 1
                elif fault.times is None or fault.times:
                    fault.times = None if fault.times is None else fault.times - 1
                    raise fault.error

    def _flipped(self) -> list[tuple[int, int]]:
        with self._lock:
            return sorted(self._flips)


class _FaultyArena(RemoteArena):
    def __init__(self, transport: FaultyTransport, inner: RemoteArena) -> None:
        self.endpoint = inner.endpoint
        self._transport = transport
        self._inner = inner

    @property
    def slots(self) -> NDArray[np.uint8]:
        self._transport._strike("slots")
        flips = self._transport._flipped()
        if not flips:
            return self._inner.slots
        # The mapping cannot be written: what is handed out is a copy of it.
        spoiled = self._inner.slots.copy()
        for slot, offset in flips:
            spoiled[slot, offset] ^= 1
        spoiled.flags.writeable = False
        return spoiled

    def pin_with(self, pins: Pins) -> None:
        self._inner.pin_with(pins)

    @property
    def alive(self) -> bool:
        return not self._transport._partitioned and self._inner.alive

    def verify(self, slot: int, generation: int) -> SlotHeader:
        self._transport._strike("verify")
        return self._inner.verify(slot, generation)

    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        self._transport._strike("read_into")
        self._inner.read_into(slot_ids, dst)
        for slot, offset in self._transport._flipped():
            for row, each in zip(dst, slot_ids, strict=True):
                if each == slot and offset < len(row):
                    row[offset] ^= 1

    def close(self) -> None:
        self._inner.close()
