# SPDX-License-Identifier: Apache-2.0
"""A simulated accelerator: what is launched on it happens later, in an order that the seed draws.

Each stream does its work in order. Between two streams only fences order anything, and only a
stream that was finished has done its work. So whoever reads a layer before the forward pass has
written it reads what was there before; whoever reads host memory before a copy into it has ended
reads poison; and of two writers without a fence between them either comes last, or they mix, as a
piece of work is split where it can be.
"""

import copy as copying
import ctypes
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.device_hash import hashable
from omni_connector.copy.pinning import CAPTURING
from omni_connector.copy.staged import StagedCopier
from omni_connector.copy.stream import RowPart, Stream
from omni_connector.kv.segments import reserved_of
from tests.kv.digests import Digests
from tests.simulation.surroundings.world import (
    NEVER,
    Actor,
    Killed,
    Violation,
    World,
)
from tests.toy_runner import WrongBytes

_POISON: Final = 0x5A

_CODES: Final = (2, 712, 801, 900, 901)
"""Errors of CUDA with which memory is not pinned: there is no more of it, it is pinned already, it
cannot be done, and some thread captures a graph."""

_WHILE_IT_CAPTURES: Final = 6
"""Acts of other threads, at most, while an engine captures graphs."""

_EVER: Final = 3
"""How often what is refused that often is refused for ever."""

_FAILED: Final = 700
"""CUDA's error of an illegal address, with which every later call of the process fails."""

_SPINS: Final = 2000
"""Calls in vain at one moment, by which a thread is known to spin."""

_Work = Callable[[], object]


class DeviceFailed(RuntimeError):
    """What a call of a failed device raises, or of one without memory."""


class Event:
    """A place in the work of a stream.

    Attributes:
        done: whether all work before it is done.
    """

    def __init__(self) -> None:
        self.done = False


class Queue:
    """The work of one stream that is not done yet: work, events to reach, and events to wait for.

    Attributes:
        failed: whether the stream does no more work.
    """

    def __init__(self) -> None:
        self.failed = False
        self._entries: deque[tuple[str, Any]] = deque()

    def launch(self, work: _Work) -> None:
        """Put work on it."""
        self._entries.append(("work", work))

    def mark(self) -> Event:
        """Mark the work so far."""
        event = Event()
        self._entries.append(("mark", event))
        self._pass()
        return event

    def wait(self, event: Event) -> None:
        """Do nothing that is launched from now on before an event."""
        self._entries.append(("wait", event))
        self._pass()

    @property
    def ready(self) -> bool:
        """Whether it can do some work now."""
        self._pass()
        return bool(self._entries) and self._entries[0][0] == "work"

    def take(self) -> _Work:
        """The next work, which the caller does."""
        _, work = self._entries.popleft()
        done: _Work = work
        return done

    def fail(self) -> None:
        """Lose all work, and do none any more."""
        self.failed = True
        self._entries.clear()

    def _pass(self) -> None:
        """Go past events that are reached."""
        while self._entries:
            kind, event = self._entries[0]
            if kind == "work" or (kind == "wait" and not event.done):
                return
            event.done = True
            self._entries.popleft()


class Device(Actor):
    """One engine's accelerator: all its ranks' streams, whose work it does when it is drawn.

    Args:
        world: that it lives in.
        owner: the engine's incarnation.
        failing: how often an allocation fails, and `finish` finds that the device has failed, for
            this and all later calls of the rank.
        failed: called when it has failed.

    Attributes:
        engine: the engine's own stream.
        closing: whether the engine ends, whose thread may then wait.
        capturing: whether the engine captures a graph, so that no other thread may pin.
        copies: "save" or "load" while the copier does one.
        forbids_buffers: whether copies may not cross through buffers of the host.
        finishes: how often its streams were waited for.
    """

    def __init__(
        self,
        world: World,
        owner: str,
        failing: tuple[float, float],
        failed: Callable[[], object],
    ) -> None:
        super().__init__(f"{owner}'s device", owner)
        self.world = world
        self.engine = Queue()
        self.others = Queue()
        self.closing = False
        self.capturing = False
        self.copies = ""
        self.forbids_buffers = False
        self.finishes = 0
        self._in_vain: Counter[tuple[float, int]] = Counter()  # calls by moment and address
        self._refusals: dict[int, list[int]] = {}  # codes that are left, by address
        self._failing = failing
        self._failed = failed
        self._queues = [self.engine, self.others]
        world.add(self)

    def queue(self) -> Queue:
        """The work of one more stream."""
        queue = Queue()
        self._queues.append(queue)
        return queue

    def stream(self) -> "SimulatedStream":
        """A stream beside the engine's own."""
        return SimulatedStream(self, self.queue())

    def launch(self, queue: Queue, work: _Work) -> None:
        """Put work on a stream."""
        queue.launch(work)
        self.due = min(self.due, self.world.now)

    def act(self) -> None:
        self.due = self.world.now if self._step() else NEVER

    def finish(self, event: Event, queue: Queue) -> None:
        """Do work until an event of a stream is reached, and perhaps other work meanwhile."""
        while not event.done:
            if queue.failed:
                raise DeviceFailed("the device has failed")
            if not self._step() and not event.done:
                raise Violation("hangs", f"{self.name} waits for a fence that nothing marks")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that holds poison."""
        if self.world.chance(self._failing[0]):
            self.world.tell(f"{self.name} has no memory")
            raise DeviceFailed("out of memory")
        return torch.full((nbytes,), _POISON, dtype=torch.int8)

    def capture(self) -> None:
        """Its engine captures graphs, while other threads of it act."""
        self.capturing = True
        self.world.beside(str(self.owner), _WHILE_IT_CAPTURES)
        self.capturing = False

    def refusal(self, address: int) -> int:
        """The code with which it refuses to pin what lies there, once, twice or for ever; 0 if it
        does not."""
        if self.capturing:
            self.blame(Violation("engine_died", f"{self.name} pins, and breaks a capture"))
            return 900
        codes = self._refusals.get(address)
        if codes is None:
            world = self.world
            code = world.draw.choice(_CODES)
            times = world.draw.choice((1, 2, _EVER)) if world.chance(0.2) else 0
            if code in CAPTURING:  # which ends
                times = min(times, 2)
            codes = self._refusals[address] = [code] * times
        if len(codes) == _EVER:
            return codes[0]
        return codes.pop() if codes else 0

    def in_vain(self, address: int = 0) -> None:
        """A call has failed, for memory there: whoever goes on with that at once spins."""
        call = self.world.now, address
        self._in_vain[call] += 1
        if self._in_vain[call] > _SPINS:
            self.blame(Violation("hangs", f"a thread spins at calls of {self.name} that fail"))

    def refuses_for_ever(self, address: int) -> bool:
        """Whether it never pins what lies there."""
        if any(queue.failed for queue in self._queues):
            return True
        return len(self._refusals.get(address, ())) == _EVER

    def fails(self) -> bool:
        """Whether a stream fails now."""
        fails = self.world.chance(self._failing[1])
        if fails:
            self._failed()
        return fails

    def close(self) -> None:
        """Lose all work."""
        self.world.remove(self)
        for queue in self._queues:
            queue.fail()

    def _step(self) -> bool:
        """Do one piece of work; False where there is none, but perhaps events that are reached."""
        if self.owner in self.world.dead:
            raise Killed
        ready = [queue for queue in self._queues if queue.ready]
        if not ready:
            return False
        work = (ready[0] if len(ready) == 1 else self.world.draw.choice(ready)).take()
        try:
            work()
        except Violation as violation:
            self.blame(violation)
        except WrongBytes as error:
            self.blame(Violation("wrong_bytes", f"{self.name}: {error}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed has failed
            text = f"{self.name}: {type(error).__name__}: {error}"
            self.blame(Violation("engine_died", text))
        return True

    def blame(self, violation: Violation) -> None:
        """Have the schedule fail. The thread that happens to wait for the device goes on, as a copy
        thread would take what is raised for the failure of its job."""
        self.world.violation = self.world.violation or violation


class SimulatedStream(Stream):
    """A stream of a simulated device, as the copier of devices uses it.

    Args:
        device: whose.
        queue: its work.

    """

    def __init__(self, device: Device, queue: Queue) -> None:
        self._device = device
        self._queue = queue
        self._hashing = device.queue()
        self._digests = Digests()
        self._entered = 0
        self._closed = False
        self._waits_in: set[str] = set()  # which copies have waited for a fence
        self._process = [queue, self._hashing]  # an error of one stream is the process's
        self._hashes = device.world.chance(0.6)
        self._moves = device.world.chance(0.6)
        # Addresses of the host's memory that the device may use: a piece may not be left in a copy.
        self._host: list[tuple[int, int]] = []
        self._buffers: list[tuple[int, int]] = []  # of these, what are no slots
        self._used: list[tuple[int, int]] = []  # of it, by work that is not done

    def beside(self) -> "SimulatedStream":
        other = copying.copy(self)  # they share what is pinned
        other._queue = self._device.queue()
        other._hashing = self._device.queue()
        other._waits_in = set()
        self._process += [other._queue, other._hashing]
        return other

    def _require(self) -> None:
        """Raise if the device has failed: for a process that is so until it ends."""
        if self._queue.failed:
            self._device.in_vain()
            raise DeviceFailed("the device has failed")

    @contextmanager
    def active(self) -> Iterator[None]:
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1

    def launch(self, work: _Work, *, host: torch.Tensor | None = None, lands: bool = False) -> None:
        self._require()
        queue = self._active
        if host is None:
            self._device.launch(queue, work)
            return
        extent = _extent(host)
        if not any(_within(extent, piece) for piece in self._host):
            raise Violation("wrong_bytes", "a device copies to memory that is not pinned")
        crosses = self._device.forbids_buffers and host.dtype == torch.int8  # and no ids
        if crosses and any(_within(extent, piece) for piece in self._buffers):
            raise Violation("slow", "a copy of slots that are pinned passes through a buffer")
        if lands:
            host.fill_(_POISON)

        def copy() -> None:
            self._used.remove(extent)
            work()

        self._used.append(extent)
        self._device.launch(queue, copy)

    @property
    def _active(self) -> Queue:
        # As with CUDA, what is launched outside goes to a stream that no fence is waited for on.
        return self._queue if self._entered else self._device.others

    def fence(self) -> object:
        # Of the stream that the calling thread uses: another thread's is not the engine's.
        acting = self._device.world.acting
        is_engine = not acting or acting[-1].on_engine_thread
        return (self._device.engine if is_engine else self._device.others).mark()

    def reached(self, fence: object) -> bool:
        self._require()
        assert isinstance(fence, Event)
        return fence.done

    def wait(self, fence: object) -> None:
        if isinstance(fence, tuple):  # the mark of another stream of the copier's
            for event in fence:
                self._queue.wait(event)
            return
        if not isinstance(fence, Event):
            raise TypeError(f"not a fence of this device: {fence!r}")
        self._waits_in |= {self._device.copies} - {""}
        if len(self._waits_in) > 1:
            self._device.blame(Violation("slow", "loads stand behind the fences of saves"))
        self._queue.wait(fence)

    def mark(self) -> "tuple[Event, Event]":
        return self._queue.mark(), self._hashing.mark()

    def finish(self, mark: object | None) -> None:
        self._device.finishes += 1
        if not self._device.closing:
            self._device.world.forbid_engine("an accelerator's copy")
        if self._device.fails():
            self._device.world.tell(f"a stream of {self._device.name} fails")
            for queue in self._process:
                queue.fail()
        self._require()
        events = mark if isinstance(mark, tuple) else self.mark()
        for event, queue in zip(events, (self._queue, self._hashing), strict=True):
            self._device.finish(event, queue)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self._require()
        buffer = self._device.allocate(nbytes)
        self._host.append(_extent(buffer))
        self._buffers.append(_extent(buffer))
        return buffer

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        self._require()
        return self._device.allocate(nbytes)

    def can_hash(self, nbytes: int) -> bool:
        return self._hashes and hashable(nbytes)

    def prepare_hash(self, nbytes: int) -> None:
        self._device.allocate(0)

    def hash(
        self,
        rows: torch.Tensor,
        *,
        there: object,
        sums: torch.Tensor,
        part: RowPart | None = None,
    ) -> None:
        assert isinstance(there, tuple)
        self._require()
        sums.fill_(_POISON)

        self._hashing.wait(there[0])
        self._device.launch(self._hashing, partial(self._digests.hash, rows, sums, part))

    def can_move(self, nbytes: int) -> bool:
        return self._moves and not nbytes % 16

    def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        self._require()
        for row, address in zip(staged, rows, strict=True):
            self._device.launch(self._active, partial(self._move, row, address, to_host=to_host))

    def _move(self, row: torch.Tensor, address: torch.Tensor, *, to_host: bool) -> None:
        start = int(address)  # which the device has only by now
        if not any(_within((start, start + len(row)), piece) for piece in self._host):
            raise Violation("wrong_bytes", "a kernel reaches memory that is not pinned")
        there = torch.frombuffer((ctypes.c_int8 * len(row)).from_address(start), dtype=torch.int8)
        if to_host:
            there.copy_(row)
        else:
            row.copy_(there)

    def pin(self, slots: NDArray[np.uint8]) -> int:
        assert not self._closed
        piece = _addresses(slots)
        if piece in self._host:
            raise Violation("wrong_bytes", "a device is to pin what it has pinned")
        code = _FAILED if self._queue.failed else self._device.refusal(piece[0])
        if code:
            self._device.in_vain(piece[0])
            return code
        self._host.append(piece)
        return 0

    def has_pinned(self, slots: NDArray[np.uint8], slot_ids: NDArray[np.int64]) -> bool:
        """Whether each of some slots is pinned."""
        return all(
            any(_within(_addresses(slots[each]), piece) for piece in self._host)
            for each in slot_ids.tolist()
        )

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        if self._closed:
            return
        piece = _addresses(slots)
        self._host.remove(piece)
        if not self._queue.failed and any(_within(each, piece) for each in self._used):
            raise Violation("wrong_bytes", "a device still copies from memory that is let go of")

    def close(self) -> None:
        self._closed = True


def _addresses(slots: NDArray[np.uint8]) -> tuple[int, int]:
    """The first byte of slots, and the one behind them."""
    return slots.ctypes.data, slots.ctypes.data + slots.nbytes


def _within(extent: tuple[int, int], piece: tuple[int, int]) -> bool:
    return piece[0] <= extent[0] and extent[1] <= piece[1]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor with no gaps but between its rows."""
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    last = (rows - 1) * tensor.stride(0) + tensor[0].numel() if rows > 1 else tensor.numel()
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


class DeviceCopier:
    """The copier for devices, with slots that are pinned in pieces of a few.

    Looks whether blocks that it has zeroed stay zero, as no answer depends on all of them; and
    whether slots that are pinned are copied without a buffer of the host.

    Args:
        device: that it copies on.
        canonical, layout: the cache, and the slots.
        buffers: slots that a staging buffer holds.
        maps: whether the engine has an arena of a peer mapped at an address.
    """

    def __init__(
        self,
        device: Device,
        canonical: Any,
        layout: Any,
        buffers: int,
        maps: Callable[[int], bool],
    ) -> None:
        self._device = device
        self._maps = maps
        self._of_peers: set[int] = set()  # the addresses of what is pinned of their arenas
        self._stream = device.stream()
        inner = StagedCopier(
            canonical, layout, self._stream, staging_bytes=buffers * layout.slot_bytes
        )
        # Slots of the toy are small, and so are the pieces of a plan.
        inner.direct_bytes = device.world.draw.choice((0, 1 << 30))
        inner.pinned_at_once = device.world.draw.randrange(1, 5) * layout.slot_bytes
        inner.speed = 1
        self._inner = inner
        self._reserved = [
            [canonical.view(each, torch.uint8) for each in reserved_of(pages)]
            for pages in canonical.pages
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, copy: BlockCopy, **options: Any) -> Any:
        """As the copier for devices."""
        with self._looking(copy, "save"):
            before, ends = self._device.finishes, itertools.count(1)

            def landed(some: slice, sums: NDArray[np.uint64]) -> None:
                # Of a group that this stage has no layers of, nothing is copied.
                if self._device.finishes - before > next(ends):
                    self._device.blame(Violation("slow", "slots that are complete wait for others"))
                options["landed"](some, sums)

            told = {"landed": landed} if "landed" in options else {}
            return self._inner.save(copy, **options | told)

    def load(self, copy: BlockCopy) -> Any:
        """As the copier for devices."""
        with self._looking(copy, "load"):
            return self._inner.load(copy)

    def load_pages(self, copy: BlockCopy, *pages: Any) -> Any:
        """As the copier for devices."""
        with self._looking(copy, "load"):
            return self._inner.load_pages(copy, *pages)

    @contextmanager
    def _looking(self, copy: BlockCopy, verb: str) -> Iterator[None]:
        self.look()
        stream, device = self._stream, self._device
        whole = not self._inner.direct_bytes and stream.has_pinned(copy.slots, copy.slot_ids)
        device.forbids_buffers = whole
        device.copies = verb
        try:
            yield
        finally:
            device.forbids_buffers = False
            device.copies = ""

    def pin(self, slots: NDArray[np.uint8]) -> int:
        """As the copier for devices."""
        self.look()
        address = slots.ctypes.data
        of_peer = not slots.flags.writeable
        if of_peer and not self._maps(address):
            text = "a device is given memory that is not mapped any more"
            self._device.blame(Violation("engine_died", text))
        code = self._inner.pin(slots)
        if of_peer and not code:
            self._of_peers.add(address)
        return code

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        """As the copier for devices."""
        self._of_peers.discard(slots.ctypes.data)
        self._inner.unpin(slots)

    def look(self) -> None:
        """See that all that is pinned is mapped."""
        if not all(map(self._maps, self._of_peers)):
            text = "an arena is let go of while a device has it pinned"
            self._device.blame(Violation("leaks", text))

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        """Zero, and see that nothing launched before the fence comes after it."""
        device = self._device
        self._inner.zero(group, block_ids, fence=fence)
        if isinstance(fence, Event):
            device.finish(fence, device.engine)
        blocks = torch.from_numpy(block_ids)
        if any(bool(view[blocks].any()) for view in self._reserved[group]):
            device.blame(Violation("wrong_bytes", f"{device.name}: zeroed blocks are not zero"))
