# SPDX-License-Identifier: Apache-2.0
"""A schedule before it is run: the engines, what goes wrong in general, what happens in order."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.simulation.engines.settings import EngineShape
from tests.toy import GROUPS

LONGEST: Final = 60
"""Tokens of a prompt and its answer, at most."""


SLOW_S: Final = 0.01
"""Seconds that a slow copy may take without any request's being late for it."""


def groups_of(family: str) -> int:
    """How many cache groups models of a family have."""
    return len(GROUPS[family])


def has_states(family: str) -> bool:
    """Whether models of a family keep recurrent states."""
    return "state" in GROUPS[family]


def blocks_of(family: str, block_size: int, spare: int) -> int:
    """KV blocks with which one request of `LONGEST` tokens fits, and `spare` blocks in each group
    beside it."""
    return groups_of(family) * (LONGEST // block_size + spare)


@dataclass(frozen=True)
class Event:
    """Something that happens.

    Attributes:
        what: name of a method of `Cluster`.
        how: its arguments.
        acts: how many acts of anybody come before it, since the event before.
        number: its place in the plan of the seed, by which it is named.
    """

    what: str
    how: dict[str, Any]
    acts: int
    number: int

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value!r}" for name, value in self.how.items())
        return f"{self.number}: {self.what}({how}), {self.acts} acts later"


@dataclass(frozen=True)
class Plan:
    """One schedule.

    Attributes:
        seed: that drew it.
        engines: that take part.
        events: in order.
        pace: seconds of the clock that an act takes, at most.
        mapped: whether peers' arenas are read in place.
        piece_bytes: that are copied in one go, at least a block.
        trouble: settings of what goes wrong at any time; see `Cluster`.
        native: whether machine code copies, hashes and looks up, where it can be had; else numpy
            and Python do.
        buffers: slots that a staging buffer of a simulated accelerator holds, on which every engine
            computes then; 0: all compute on the host.
        interrupts: how often a thread is interrupted where it takes a lock or lets go of one.
        pin_part: at most one slot in so many is pinned.
    """

    seed: str
    engines: tuple[EngineShape, ...]
    events: tuple[Event, ...]
    pace: float
    mapped: bool
    piece_bytes: int
    trouble: dict[str, float] = field(default_factory=dict)
    native: bool = True
    buffers: int = 0
    interrupts: float = 0.0
    pin_part: int = 4

    def only(self, numbers: set[int]) -> "Plan":
        """The same with these events only."""
        return replace(self, events=tuple(each for each in self.events if each.number in numbers))
