# SPDX-License-Identifier: Apache-2.0
"""What a device is asked to pin, when, and what becomes of what it refuses."""

import logging
from collections import Counter
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_connector.copy.pinning import PinnedBytes, Pinning
from omni_connector.testing import FakeClock

SLOT = 64
AT_ONCE = 4 * SLOT + 1  # four slots


class Copier:
    """Pins what it has no error code for.

    Attributes:
        codes: of slots, by the address of the first.
        asked: how often it was asked for the slots that begin there.
        pinned: the bytes of what it has pinned, by address.
    """

    pinned_at_once = AT_ONCE

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.asked: Counter[int] = Counter()
        self.pinned: dict[int, int] = {}

    def pin(self, slots: NDArray[np.uint8]) -> int:
        address = slots.ctypes.data
        self.asked[address] += 1
        assert address not in self.pinned
        if not (code := self.codes.get(address, 0)):
            self.pinned[address] = slots.nbytes
        return code

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        assert self.pinned.pop(slots.ctypes.data) == slots.nbytes


class ByHand:
    """A thread whose turns a test makes."""

    def __init__(self) -> None:
        self.turn: Any = None
        self.hangs = False
        self.wakes = 0

    def __call__(self, name: str, turn: Any) -> "ByHand":
        assert self.turn is None  # it is started once
        self.turn = turn
        return self

    def settle(self) -> float:
        """Make turns until none is due; returns the seconds until the next."""
        while (seconds := self.turn()) == 0:
            pass
        return float(seconds)

    def wake(self) -> None:
        self.wakes += 1

    def join(self, timeout: float) -> None:
        if not self.hangs:
            assert self.turn() is None

    def is_alive(self) -> bool:
        return self.hangs


class Pinned:
    def __init__(self) -> None:
        self.clock, self.copier, self.thread = FakeClock(), Copier(), ByHand()
        copier: Any = self.copier
        self.pinning = Pinning(copier, self.clock, self.thread, Lock)

    def memory(self, slots: int, *, ready: int | None = None) -> Any:
        memory = self.pinning.follow(np.zeros((slots, SLOT), np.uint8))
        memory.populated(slots if ready is None else ready)
        return memory

    def pieces(self, memory: Any) -> dict[int, int]:
        """The number of slots of each piece of a mapping that is pinned, by its first slot."""
        first = memory.slots.ctypes.data
        there = range(first, first + memory.slots.nbytes)
        return {
            (address - first) // SLOT: nbytes // SLOT
            for address, nbytes in sorted(self.copier.pinned.items())
            if address in there
        }


@pytest.fixture
def device() -> Pinned:
    return Pinned()


def address(memory: Any, slot: int) -> int:
    return int(memory.slots[slot:].ctypes.data)


def test_nothing_is_pinned_before_the_engine_has_captured_its_graphs(device):
    memory = device.memory(10)
    assert device.thread.turn is None
    assert not device.copier.asked
    assert device.pinning.bytes == PinnedBytes(0, 0)
    device.pinning.begin()
    device.pinning.begin()
    assert device.thread.settle() == np.inf
    assert device.pieces(memory) == {0: 4, 4: 4, 8: 2}
    assert device.pinning.bytes == PinnedBytes(10 * SLOT, 0)


def test_pieces_are_large_where_memory_comes_slot_by_slot(device):
    device.pinning.begin()
    memory = device.memory(12, ready=3)
    assert device.thread.settle() == 2.0
    memory.populated(9)
    assert device.thread.settle() == 2.0
    assert device.pieces(memory) == {0: 4, 4: 4}
    device.clock.advance(2.0)
    assert device.thread.settle() == np.inf
    assert device.pieces(memory) == {0: 4, 4: 4, 8: 1}
    assert device.pinning.bytes == PinnedBytes(9 * SLOT, 0)  # the others have no memory


def test_a_refused_piece_is_asked_for_again_and_keeps_no_other_waiting(device, caplog):
    device.pinning.begin()
    memory, other = device.memory(12), device.memory(8)
    device.copier.codes |= {address(memory, 4): 2, address(other, 0): 801}
    with caplog.at_level(logging.DEBUG):
        assert device.thread.settle() == 1.0
        assert device.pieces(memory) == {0: 4, 8: 4}
        assert device.pieces(other) == {4: 4}
        assert device.pinning.bytes == PinnedBytes(12 * SLOT, 8 * SLOT)
        for pause in (1.0, 2.0, 4.0):
            device.clock.advance(pause)
            assert device.thread.settle() == 2 * pause
        assert device.copier.asked[address(memory, 4)] == 4
        del device.copier.codes[address(memory, 4)]
        device.clock.advance(8.0)
        device.thread.settle()
    assert device.pieces(memory) == {0: 4, 4: 4, 8: 4}
    assert device.pinning.bytes == PinnedBytes(16 * SLOT, 4 * SLOT)
    assert max(device.copier.asked.values()) == 5
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "CUDA error 2)" in told[0]


@pytest.mark.parametrize("code", [900, 901])
def test_while_a_graph_is_captured_nothing_more_is_asked_for(device, caplog, code):
    device.pinning.begin()
    memory, other = device.memory(8), device.memory(8)
    first = {address(each, slot) for each in (memory, other) for slot in (0, 4)}
    device.copier.codes |= dict.fromkeys(first, code)
    for _ in range(4):
        assert device.thread.settle() == 0.5
        device.clock.advance(0.5)
    assert device.copier.asked.total() == 4
    device.copier.codes.clear()
    assert device.thread.settle() == np.inf
    assert device.pieces(memory) == device.pieces(other) == {0: 4, 4: 4}
    assert not caplog.records


def test_what_is_let_go_of_is_pinned_no_more(device):
    device.pinning.begin()
    memory, other = device.memory(8), device.memory(8, ready=4)
    device.copier.codes |= {address(memory, 4): 2}
    device.thread.settle()
    for each in (memory, memory, other):
        each.close()
    assert not device.copier.pinned
    memory.populated(8)
    other.populated(8)
    device.clock.advance(10.0)
    assert device.thread.settle() == np.inf
    assert not device.copier.pinned
    assert device.pinning.bytes == PinnedBytes(0, 0)


def test_the_arena_of_a_neighbour_is_pinned_piece_by_piece_between_steps(device):
    """No launch waits for the driver, whose calls take less time here than the device for a step;
    the own arena is there before requests are."""
    device.pinning.begin()
    own = device.memory(4)
    assert device.thread.settle() == np.inf
    device.copier.pinned_at_once = 8 * AT_ONCE
    slots = np.zeros((22, SLOT), np.uint8)
    slots.flags.writeable = False
    device.pinning.step_begins()
    memory = device.pinning.follow(slots)
    memory.populated(22)
    assert device.thread.settle() == np.inf
    assert device.pieces(memory) == {}
    for step in range(1, 5):
        device.pinning.step_launched()
        assert 0 < device.thread.settle() <= 0.05
        assert device.pieces(memory) == {4 * number: 4 for number in range(step)}
        device.pinning.step_begins()
        device.clock.advance(1.0)
        assert device.thread.settle() == np.inf
        assert len(device.pieces(memory)) == step
    device.pinning.step_launched()
    device.thread.settle()
    device.clock.advance(0.05)  # no step follows
    device.thread.settle()
    device.clock.advance(2.0)
    assert device.thread.settle() == np.inf
    assert sum(device.pieces(memory).values()) == 22
    assert device.pieces(own) == {0: 4}


@pytest.mark.parametrize("code", [2, 900])
def test_steps_wake_nobody_while_a_device_is_not_to_be_asked_again(device, code):
    device.copier.pinned_at_once = 8 * AT_ONCE
    device.pinning.begin()
    slots = np.zeros((4, SLOT), np.uint8)
    slots.flags.writeable = False
    device.copier.codes[slots.ctypes.data] = code
    device.pinning.follow(slots).populated(4)

    def step() -> int:
        """How often a step wakes the thread."""
        wakes = device.thread.wakes
        device.pinning.step_begins()
        device.thread.settle()
        device.pinning.step_launched()
        return int(device.thread.wakes - wakes)

    assert step() == 1  # there is a piece to ask for
    device.thread.settle()
    assert device.copier.asked.total() == 1
    for _ in range(3):
        assert step() == 0
        assert 0 < device.thread.settle() <= 1.0
    device.clock.advance(1.0)
    assert step() == 1  # there is again


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_lets_go_of_all_unless_the_device_hangs(device, caplog, hangs):
    device.memory(8)
    device.pinning.begin()
    device.thread.settle()
    device.thread.hangs = hangs
    device.pinning.close()
    device.pinning.close()
    assert bool(device.copier.pinned) == hangs
    assert ("may hang" in caplog.text) == hangs


def test_a_copier_that_has_no_use_for_pinned_memory_has_no_thread(device):
    device.copier.pinned_at_once = 0
    device.memory(8)
    device.pinning.begin()
    device.pinning.close()
    assert device.thread.turn is None
