# SPDX-License-Identifier: Apache-2.0
"""Engines of a world that share their prefixes: who meets whom and when, and who lies.

Indexes are real memory, mapped as a real engine maps them. The seed draws how late an engine is
found, how long one that has gone is still listed, and what becomes of the hits that it is told of.
"""

import math
import os
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from omni_connector.arena.block_index import BlockIndex, BlockIndexView, Tags
from omni_connector.arena.format import EPOCH_BYTES
from omni_connector.arena.slot_index import Ints
from omni_connector.net.packets import Refusal
from omni_connector.prefix.attaching import Arenas, SlotCopy
from omni_connector.prefix.neighbours import (
    GiveIndex,
    LocalEngine,
    Neighbour,
    Neighbours,
    Orphans,
    opened,
)
from tests import inspection
from tests.simulation.surroundings.world import Violation, World

_LOOK_S = 1.0
_SOON_S = 0.02
_NO_SLOT = 1 << 20


class Home:
    """Where an engine is met, or what is kept of one that has ended.

    Attributes:
        owner: names it.
        fd: of its index.
        gives: what it answers to those that ask for the index.
    """

    owner: str
    fd: int
    gives: GiveIndex

    def meet(self, other: "Home") -> None:
        """Another has come."""

    def ended(self, other: "Home") -> None:
        """Another has gone."""

    def told(self, slots: Ints, generations: Ints) -> None:
        """Another says that it has read these slots."""
        raise NotImplementedError

    def give_orphan(self, epoch: bytes) -> tuple[GiveIndex | Refusal, int | None]:
        """Another asks for what an engine had that has ended."""
        raise NotImplementedError

    def kill(self) -> None:
        """Its process has ended."""
        raise NotImplementedError


class Keeps(Protocol):
    """What keeps what engines leave; see `keep.SimulatedKeep`."""

    def meet(self, home: Home) -> None: ...
    def ended(self, home: Home) -> None: ...


class Neighbourhood:
    """The engines of a world that share, and what goes wrong between them.

    Attributes:
        late: seconds in which an engine is found, or missed, at most.
        lost: how often hits are not told.
        nonsense: how often hits name other slots, too.
        short: how often a look finds that memory is short.
        homes: the engines, by owner.
        keep: the process that keeps what they leave; None for none.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.late = _LOOK_S
        self.lost = 0.0
        self.nonsense = 0.0
        self.short = 0.0
        self.homes: dict[str, Home] = {}
        self.keep: Keeps | None = None
        self._views: weakref.WeakKeyDictionary[BlockIndexView, tuple[str, str]] = (
            weakref.WeakKeyDictionary()
        )

    def join(self, home: Home) -> None:
        """It meets the others, one after the other, and they meet it."""
        for other in self.homes.values():
            self.soon(partial(home.meet, other))
            self.soon(partial(other.meet, home))
        if self.keep is not None and not home.gives.ended:
            self.soon(partial(self.keep.meet, home))
        self.homes[home.owner] = home

    def leave(self, home: Home) -> None:
        """It has gone, which the others notice after a while."""
        if self.homes.pop(home.owner, None) is not None:
            for other in self.homes.values():
                self.soon(partial(other.ended, home))
            if self.keep is not None and not home.gives.ended:
                self.soon(partial(self.keep.ended, home))

    def soon(self, what: Callable[[], object]) -> None:
        """Have something done within the time in which engines are found."""
        self.world.later(self.late * self.world.draw.random(), what)

    def kill(self, owner: str) -> None:
        """The process of an engine has ended."""
        home = self.homes.get(owner)
        if home is not None:
            home.kill()

    def mapped(self, reader: str, owner: str, view: BlockIndexView) -> None:
        """A reader has mapped the index of another engine."""
        self._views[view] = reader, owner

    def mapped_of_the_gone(self, reader: str) -> list[str]:
        """The engines that have gone, and whose indexes a reader has still mapped."""
        return sorted(
            owner
            for whose, owner in self._views.values()
            if whose == reader and owner not in self.homes
        )


class SimulatedNeighbours(Home, Neighbours):
    """Those of one engine.

    Args:
        owner: the engine.
    """

    def __init__(self, neighbourhood: Neighbourhood, owner: str, local_engine: LocalEngine) -> None:
        self.owner = owner
        self.local_engine = local_engine
        self._neighbourhood = neighbourhood
        self._met: dict[Home, Neighbour] = {}
        world = neighbourhood.world
        self.orphans = Orphans(
            self.local_engine, world.clock, lambda: world.chance(neighbourhood.short)
        )
        self._present: tuple[Neighbour, ...] = ()
        self._follows_at = 0.0
        self.fd = os.dup(local_engine.index.fd)
        self._indexes: dict[Home, int] = {}  # descriptors, of those that were met
        neighbourhood.join(self)

    @property
    def gives(self) -> GiveIndex:  # type: ignore[override]
        orphans = self.orphans.offered()
        return msgspec.structs.replace(self.local_engine.gives, orphans=orphans)

    def present(self) -> Sequence[Neighbour]:
        if self._neighbourhood.world.now >= self._follows_at:
            self._follow()
        return self._present

    def _follow(self) -> None:
        """See what the ranks have attached, as a real engine does about once a second."""
        world, met = self._neighbourhood.world, list(self._met.values())
        self.orphans.follow()
        siblings = self.local_engine.siblings
        arenas = [*(each.arenas for each in met), *self.orphans.unkept, *siblings]
        attached = self.local_engine.ranks.attached(arenas)
        there = [each for each, there in zip(met, attached, strict=False) if there]
        there += self.orphans.present()
        self._present = tuple(sorted(there, key=lambda each: each.orphan))
        self._follows_at = world.now + (_LOOK_S if all(attached) else _SOON_S) * world.draw.random()

    def hit(self, neighbour: Neighbour, slots: Ints, generations: Ints) -> None:
        around, draw = self._neighbourhood, self._neighbourhood.world.draw
        if around.world.chance(around.nonsense):
            more = [draw.randrange(-_NO_SLOT, _NO_SLOT), *draw.choices(range(16), k=4)]
            slots = np.concatenate([slots, np.array(more, np.int64)])
            some = [draw.randrange(8) for _ in more]
            generations = np.concatenate([generations, np.array(some, np.int64)])
        for home, each in self._met.items():
            if each is neighbour and not around.world.chance(around.lost):
                around.soon(partial(home.told, slots, generations))

    def avoid(self, arenas: Arenas) -> None:
        for other, each in list(self._met.items()):
            if each.arenas == arenas:
                self.forget(other)
                self._neighbourhood.soon(partial(self.meet, other))

    def copy(self, copy: SlotCopy, ended: Callable[[bool], object]) -> None:
        """Ask the ranks about a copy until it has ended."""
        if self.owner not in self._neighbourhood.homes:
            return
        copied = self.local_engine.ranks.copied(copy)
        if copied is not None:
            ended(copied)
        else:
            self._neighbourhood.world.later(_SOON_S, partial(self.copy, copy, ended))

    def told(self, slots: Ints, generations: Ints) -> None:
        """Another engine says that it has read these slots."""
        if self.owner not in self._neighbourhood.homes:
            return
        try:
            self.local_engine.on_hits(slots, generations)
        except Exception as error:
            raise Violation(
                "exception", f"{self.owner} is told of hits: {type(error).__name__}: {error}"
            ) from error

    def meet(self, other: Home) -> None:
        """Map the index of another engine, if both are there and keep the same."""
        homes, theirs = self._neighbourhood.homes, other.gives
        there = self.owner in homes and other.owner in homes
        if not there or theirs.readers != self.local_engine.readers:
            return
        self.forget(other)
        self._met[other] = self._opened(theirs, os.dup(other.fd), other.owner)
        self._indexes[other] = os.dup(other.fd)
        self.orphans.let_go(theirs.epoch)
        alive = {each.index.epoch for each in self._met.values()}
        for epoch in [each for each in theirs.orphans if each not in alive]:
            gives, descriptor = other.give_orphan(epoch)
            if isinstance(gives, GiveIndex) and descriptor is not None:
                orphan = self._opened(gives, os.dup(descriptor), f"one that {other.owner} knew")
                self._adopt(orphan, descriptor, gives.seconds)
        self._follow()

    def _opened(self, gives: GiveIndex, descriptor: int, owner: str) -> Neighbour:
        neighbour, descriptor = opened(gives, descriptor, self.local_engine, owner)
        os.close(descriptor)
        assert isinstance(neighbour.index, BlockIndexView)
        self._neighbourhood.mapped(self.owner, owner, neighbour.index)
        return neighbour

    def give_orphan(self, epoch: bytes) -> tuple[GiveIndex | Refusal, int | None]:
        return self.orphans.give(epoch)

    def _adopt(self, neighbour: Neighbour, descriptor: int, seconds: float) -> None:
        self.orphans.adopt(neighbour, descriptor, seconds)
        self._neighbourhood.soon(self._follow_orphans)

    def _follow_orphans(self) -> None:
        """An engine that makes no step follows its orphans, too, until there are none."""
        if self.owner in self._neighbourhood.homes and self.orphans:
            self._follow()
            self._neighbourhood.world.later(_LOOK_S, self._follow_orphans)

    def ended(self, other: Home) -> None:
        """Another engine has gone; what it has kept can still be read for a while."""
        met = self._met.get(other)
        if met is not None and met in self._present:
            self._adopt(met, os.dup(self._indexes[other]), math.inf)
        self.forget(other)

    def forget(self, other: Home) -> None:
        """Another engine has gone: its index is mapped as long as a look-up needs it."""
        gone = self._met.pop(other, None)
        if gone is not None:
            os.close(self._indexes.pop(other))
        self._present = tuple(each for each in self._present if each is not gone)

    def close(self) -> None:
        if self.owner in self._neighbourhood.homes:
            self._neighbourhood.leave(self)
            for other in list(self._met):
                self.forget(other)
            self.orphans.close()
            self._present = ()
            os.close(self.fd)

    def kill(self) -> None:
        self.close()
        self.local_engine.index.close()


class _NoRanks:
    """The ranks of a process that reads nothing."""

    def attached(self, engines: Sequence[Arenas]) -> list[bool]:
        return [False] * len(engines)

    def kept(self, orphans: Sequence[tuple[Arenas, float]]) -> list[Arenas | None]:
        return [None] * len(orphans)

    def copied(self, copy: SlotCopy) -> bool | None:
        return False

    def close(self) -> None:
        """Nothing is held."""


class LyingIndex:
    """A process that says to be a neighbour of an engine: its index finds blocks of any engine in
    slots of that one, which hold something else or nothing.

    Args:
        victim: the engine whose arenas it calls its own.
    """

    def __init__(
        self, neighbourhood: Neighbourhood, victim: SimulatedNeighbours, name: str
    ) -> None:
        index = victim.local_engine.index
        self._index = BlockIndex.create(index.num_slots, neighbourhood.world.randbytes(EPOCH_BYTES))
        self._neighbourhood = neighbourhood
        local_engine = replace(
            victim.local_engine, index=self._index, ranks=_NoRanks(), on_hits=lambda *_: None
        )
        self._home = SimulatedNeighbours(neighbourhood, name, local_engine)
        self._home.local_engine = local_engine  # with the very digest of the victim

    def lie(self, tags: Tags, generations: Ints, draw: random.Random) -> None:
        """Write nonsense.

        Args:
            tags: of blocks.
            generations: of the victim's slots.
        """
        if self._index.closed:
            return
        if draw.random() < 0.1:
            memory = inspection.mapped(self._index)
            for _ in range(64):  # whatever reads it, the header has been checked
                memory[draw.randrange(4096, len(memory))] = draw.randrange(256)
            return
        numbers = np.arange(self._index.num_slots)
        draw.shuffle(numbers)  # type: ignore[arg-type]
        slots = numbers[: len(tags)]
        shift = draw.choice((0, 0, 0, 1, -1, 1 << 40))
        chosen = np.array(draw.sample(range(len(tags)), len(slots)), np.int64)
        self._index.add(tags[chosen], slots, np.maximum(generations[slots] + shift, 0))

    def close(self) -> None:
        """Go away."""
        self._home.close()
        self._index.close()
