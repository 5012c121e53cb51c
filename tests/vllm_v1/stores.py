# SPDX-License-Identifier: Apache-2.0
"""A store that engines of this process share, and what can go wrong with one."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import inspection
from tests.simulation.surroundings.memory import Shelf, SimulatedStore
from tests.toy import BLOCK

from .harness import InProcessEngine, prompt, wait

PREFIX = prompt(6 * BLOCK)
QUESTION = PREFIX + prompt(10, seed=1)
# Patient, so that a busy machine makes no lookup late; `IMPATIENT` waits as long as users do.
MASTER = {"store": {"master": "127.0.0.1:50051", "lookup_timeout_s": 30}}
IMPATIENT = {"store": {"master": "127.0.0.1:50051"}}


class SwitchedShelf(Shelf):
    """The entries, and switches; one for all clients.

    Attributes:
        entries: by key.
        unreachable: nothing is found, taken or handed out.
        stalled: whatever is asked answers at its deadline only, or when this ends.
        endless: what is stalled does not keep to its deadline either.
        before_get: called with the keys of each load.
        puts, asked: keys of every entry that was offered, or asked for.
        failures: what every client says has failed.
        open: clients that are not closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unreachable = False
        self._flows = threading.Event()
        self._flows.set()
        self.endless = False
        self.before_get: Callable[[Sequence[str]], object] = lambda keys: None
        self.puts: list[str] = []
        self.asked: list[str] = []
        self.failures: Counter[str] = Counter()
        self.open = 0
        self._lock = threading.Lock()

    @property
    def stalled(self) -> bool:
        return not self._flows.is_set()

    @stalled.setter
    def stalled(self, stalled: bool) -> None:
        if stalled:
            self._flows.clear()
        else:
            self._flows.set()

    def connect(self, *_: Any, **__: Any) -> "ShelfStore":
        """A client of its own for each half of each engine."""
        return ShelfStore(self)

    def evict(self, wanted: Callable[[str], bool] = lambda key: True) -> None:
        """Lose entries."""
        with self._lock:
            self.entries = {key: row for key, row in self.entries.items() if not wanted(key)}

    def spoil(self, place: int) -> None:
        """Change a byte of every entry."""
        with self._lock:
            for key, row in self.entries.items():
                changed = bytearray(row)
                changed[place] ^= 0x10
                self.entries[key] = bytes(changed)

    def answers(self, timeout: float) -> bool:
        return self._flows.wait(None if self.endless else timeout) and not self.unreachable


class ShelfStore(SimulatedStore):
    """One client, which is asked to copy to and from its own buffers alone."""

    def __init__(self, shelf: SwitchedShelf) -> None:
        super().__init__(shelf)
        self._switched = shelf
        self._buffers: list[NDArray[np.uint8]] = []
        self._closed = False
        shelf.open += 1

    def exists(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        self._switched.asked += keys
        return super().exists(keys, timeout=timeout)

    def buffer(self, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        self._buffers.append(super().buffer(rows, row_bytes))
        return self._buffers[-1]

    def put(
        self,
        keys: Sequence[str],
        rows: NDArray[np.uint8],
        lengths: Sequence[int],
        *,
        timeout: float,
    ) -> list[bool]:
        assert any(np.shares_memory(rows, each) for each in self._buffers)
        self._switched.puts += keys
        return super().put(keys, rows, lengths, timeout=timeout)

    def get(
        self,
        keys: Sequence[str],
        rows: NDArray[np.uint8],
        lengths: Sequence[int],
        *,
        timeout: float,
    ) -> list[bool]:
        assert any(np.shares_memory(rows, each) for each in self._buffers)
        self._switched.before_get(keys)
        return super().get(keys, rows, lengths, timeout=timeout)

    @property
    def failures(self) -> Mapping[str, int]:
        return self._switched.failures

    def close(self) -> None:
        self._switched.open -= not self._closed
        self._closed = True


def landed(*engines: InProcessEngine) -> None:
    """Wait until nothing is on its way to the store."""
    for engine in engines:
        for half in engine.worker_halves:
            wait(partial(inspection.stored, half))
            half.collect()  # what became of it is counted with the next step


def publish(engine: InProcessEngine, shelf: SwitchedShelf, tokens: list[int] = PREFIX, **options):
    """Have an engine compute a prompt, and wait until its full blocks are in the store."""
    before = len(shelf.entries)
    answer = engine.generate(tokens, **options)
    landed(engine)
    assert len(shelf.entries) > before
    return answer
