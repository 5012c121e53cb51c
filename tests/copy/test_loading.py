# SPDX-License-Identifier: Apache-2.0
"""How long a load may take, by which clock, and what is left of one that failed."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from omni_connector.arena.arena import Arena
from omni_connector.copy import jobs
from omni_connector.copy.jobs import Deadline, LoadSpec
from omni_connector.copy.loading import Loader
from omni_connector.copy.threads import CopyThread, Outcome
from omni_connector.errors import PeerRefusedError, PeerUnreachableError
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import BlockSpans
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock
from omni_connector.transports import Endpoint
from omni_connector.transports.peer_arenas import OwnArena

from .test_layered import ByHand

PAGE = 4096
SHAPE = GroupShape(
    kind="full_attention", block_size=16, attention_type="all", layers="one", pages=("H1.N16.C64",)
)
TIMEOUT = 1.0
KEY = b"key"


class SlowCopier:
    """Copies a block in so many seconds of a clock.

    Attributes:
        wrong: whether it copies other bytes.
        zeroed, loaded: the blocks.
    """

    speed = 1

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock = clock
        self.seconds = seconds
        self.wrong = False
        self.zeroed: list[int] = []
        self.loaded: list[int] = []
        self.before: Callable[[], object] = lambda: None

    def load(self, copy: Any) -> Any:
        self.before()
        self._clock.advance(self.seconds)
        self.loaded += copy.block_ids.tolist()
        sums = [xxhash.xxh3_64_intdigest(copy.slots[i].tobytes()) for i in copy.slot_ids]
        return np.array(sums, np.uint64) + np.uint64(self.wrong)

    def zero(self, group: int, block_ids: Any, *, fence: object) -> None:
        self.zeroed += block_ids.tolist()


class Peers:
    """A transport that attaches the arena of a peer once it answers."""

    supports_mapping = True

    def __init__(self, arena: Arena, endpoint: Endpoint) -> None:
        self.arena = OwnArena(endpoint, arena)
        self.attached = 0
        self.silent = False

    def choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[Any, Endpoint]:
        if not endpoints:
            raise PeerRefusedError("no transport")
        return self, endpoints[0]

    def attach(self, endpoint: Endpoint, *, timeout: float) -> OwnArena:
        self.attached += 1
        if self.silent:
            raise PeerUnreachableError("silent")
        return self.arena


class Loads:
    """The loads of one rank, by hand."""

    def __init__(self, arena: Arena, copy_s: float = 0.0, *, own: bool = False) -> None:
        self.clock = FakeClock()
        self.copier = SlowCopier(self.clock, copy_s)
        self.arena = arena
        self.endpoint = Endpoint.of(arena, "shm", "/peer")
        self.peers = Peers(arena, self.endpoint)
        self.fetching: list[ByHand] = []
        self.thread = CopyThread("omni-load", None, ByHand, clock=self.clock)
        transports: Any = self.peers
        copier: Any = self.copier
        self.loader = Loader(
            transports=transports,
            copier=copier,
            layout=SlotLayout((PAGE,), PAGE),
            groups=(SHAPE,),
            rank=0,
            ranks=1,
            checksum=True,
            context=EngineContext(self.clock, self._start),
            notify=self.thread.notify,
            queued=self.thread.queued,
            own=(arena, (self.endpoint,)) if own else None,
        )
        self._ended: dict[int, Outcome] = {}

    def _start(self, name: str, turn: Any, **_: Any) -> ByHand:
        self.fetching += [ByHand(name, turn)] if name == "omni-fetch" else []
        return ByHand(name, turn)

    def submit(
        self,
        job_id: int,
        slots: list[int],
        *,
        lease: float = 100.0,
        under_way: float = 0.0,
        keyed: bool = False,
    ) -> None:
        """Load some slots, in generation 1, to blocks that are ten times their numbers.

        Args:
            lease: seconds until its end, when the job is made.
            under_way: seconds until it arrives.
        """
        spec = LoadSpec(
            request_id=f"r{job_id}",
            blocks=BlockSpans.of([(0, [10 * slot + 10 for slot in slots])]),
            slots=BlockSpans.of([(0, slots)]),
            generations=np.ones(len(slots), np.int64),
            arenas=((self.endpoint,),),
            timeout=TIMEOUT,
            lease=None if keyed else Deadline.of(self.clock() + lease, self.clock),
            keys=np.array([KEY] * len(slots), object) if keyed else None,
        )
        self.clock.advance(under_way)
        self.thread.submit(job_id, self.loader.work(job_id, spec, None))

    def attach(self) -> None:
        """What waits for peers goes on."""
        for each in list(self.fetching):
            while each.turn() == 0.0:
                pass

    def run(self, most: int = 10_000) -> float:
        """Go on until all wait; returns for how long."""
        for _ in range(most):
            if seconds := self.thread._thread.turn():  # type: ignore[attr-defined]
                return seconds
        raise AssertionError("it never rests")

    def go_on(self) -> None:
        """Copy and fetch for a tenth of a second."""
        for _ in range(10):
            self.run()
            self.attach()
            self.clock.advance(0.01)

    def failures(self) -> dict[int, str | None]:
        """How the jobs ended."""
        self._ended |= {each.job_id: each for each in self.thread.take_ended()}
        return {job_id: each.failure for job_id, each in self._ended.items()}

    def bad(self, job_id: int) -> frozenset[int]:
        """The blocks that a job did not fill."""
        return self._ended[job_id].bad_block_ids


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(jobs, "BATCH_BYTES", PAGE)  # one block a piece
    with Arena.create(8, PAGE) as made:
        for slot in range(8):
            publish(made, slot)
        yield made


def publish(arena: Arena, slot: int, key: bytes = KEY) -> None:
    arena.begin_write(slot, 1)
    content = random.Random(slot).randbytes(PAGE)
    arena.slots[slot] = np.frombuffer(content, np.uint8)
    arena.publish(slot, 1, key, PAGE, xxhash.xxh3_64_intdigest(content))


def test_loads_that_queue_have_their_time_from_their_first_piece_on(arena: Arena) -> None:
    loads = Loads(arena, copy_s=0.2)
    for job_id in range(1, 9):
        loads.submit(job_id, [0, 1])
    loads.attach()
    loads.run()
    loads.attach()
    loads.run()
    assert loads.clock() - FakeClock()() > 3 * TIMEOUT
    assert loads.failures() == dict.fromkeys(range(1, 9))


@pytest.mark.parametrize(("speed", "pieces"), [(1, 8), (4, 2)])
def test_a_faster_copier_loads_more_blocks_at_once(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, speed: int, pieces: int
) -> None:
    monkeypatch.setattr(SlowCopier, "speed", speed)
    loads = Loads(arena, copy_s=0)
    copies: list[int] = []
    loads.copier.before = lambda: copies.append(len(loads.copier.loaded))
    loads.submit(1, list(range(8)))
    loads.attach()
    loads.run()
    loads.attach()
    loads.run()
    assert loads.failures() == {1: None}
    assert len(copies) == pieces


def test_time_in_which_others_go_on_does_not_count(arena: Arena) -> None:
    """All begin, and wait for the arena; then their copies queue. The last has yet to wait."""
    loads = Loads(arena, copy_s=0.4)
    arena.begin_write(7, 0)
    for job_id in range(1, 5):
        loads.submit(job_id, [0])
    loads.submit(5, [7])
    loads.run()
    loads.clock.advance(0.5 * TIMEOUT)
    loads.attach()
    loads.run()
    assert loads.failures() == dict.fromkeys(range(1, 5))
    loads.clock.advance(0.4 * TIMEOUT)
    loads.run()
    assert loads.failures() == dict.fromkeys(range(1, 5))
    publish(arena, 7)
    loads.clock.advance(0.05 * TIMEOUT)
    loads.run()
    assert loads.failures() == dict.fromkeys(range(1, 6))


def test_time_in_which_the_peer_does_not_answer_counts(arena: Arena) -> None:
    loads = Loads(arena)
    loads.submit(1, [0])
    loads.submit(2, [1])
    waits = loads.run()
    assert waits <= TIMEOUT
    loads.clock.advance(TIMEOUT - 0.01)
    loads.run()
    assert not loads.failures()
    loads.clock.advance(0.01)
    loads.run()
    assert loads.failures() == dict.fromkeys((1, 2), "peer_unreachable")
    assert loads.bad(1) == {10}


def test_a_load_that_waits_is_looked_at_however_much_others_copy(arena: Arena) -> None:
    """Its peer publishes nothing, and there are always other loads to go on with."""
    arena.begin_write(7, 0)
    loads = Loads(arena, copy_s=0.1)
    loads.submit(1, [7])
    loads.run()
    loads.attach()
    loads.run()
    for job_id in range(2, 40):
        loads.submit(job_id, [0])
    loads.run()
    assert loads.failures().pop(1) == "peer_unreachable"
    taken = list(loads.failures())
    assert taken.index(1) < 15


def test_a_slot_that_comes_while_others_copy_is_loaded(arena: Arena) -> None:
    arena.begin_write(7, 0)
    loads = Loads(arena, copy_s=0.1)
    loads.submit(1, [7])
    loads.submit(2, [0, 1, 2, 3])
    loads.run()
    loads.attach()
    loads.copier.before = lambda: len(loads.copier.loaded) == 3 and publish(arena, 7)
    loads.run()
    loads.clock.advance(0.01)
    loads.run()
    assert loads.failures() == {1: None, 2: None}


def test_nothing_is_read_after_the_end_of_the_lease(arena: Arena) -> None:
    loads = Loads(arena, copy_s=0.2)
    loads.submit(1, [0, 1, 2])
    loads.submit(2, [3, 4, 5], lease=0.85)
    loads.submit(3, [6, 7], lease=0.5)
    loads.run()
    loads.attach()
    loads.run()
    assert loads.failures() == {1: None, 2: "lease_expired", 3: "lease_expired"}
    assert loads.copier.loaded == [10, 20, 30, 40, 50]
    assert loads.bad(2) == {60}
    assert loads.bad(3) == {70, 80}
    assert loads.copier.zeroed == [60, 70, 80]


@pytest.mark.parametrize(("kernel", "left"), [("", 0.2), ("another", 0.5)])
def test_a_lease_is_over_when_the_scheduler_half_says_wherever_its_clock_is_known(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, kernel: str, left: float
) -> None:
    """A worker may begin a step long after it was built."""
    loads = Loads(arena)
    monkeypatch.setattr(jobs, "kernel_name", iter(["", kernel]).__next__)
    loads.submit(1, [0], lease=0.5, under_way=0.3)
    loads.run()
    loads.clock.advance(left - 0.01)
    loads.run()
    assert loads.failures() == {}
    loads.clock.advance(0.02)
    loads.run()
    assert loads.failures() == {1: "lease_expired"}


def test_a_lease_that_ends_while_its_load_waits_ends_the_wait(arena: Arena) -> None:
    loads = Loads(arena)
    loads.submit(1, [0], lease=0.3)
    assert loads.run() <= 0.3
    loads.clock.advance(0.3)
    loads.run()
    assert loads.failures() == {1: "lease_expired"}


@pytest.mark.parametrize("fault", ["bytes", "slot", "copy"])
def test_blocks_of_a_load_that_failed_are_zero_where_they_are_not_filled(
    arena: Arena, fault: str
) -> None:
    loads = Loads(arena)
    loads.submit(1, [0, 1, 2])
    loads.run()
    loads.attach()

    def spoil() -> None:
        if len(loads.copier.loaded) != 1:
            return
        if fault == "bytes":
            loads.copier.wrong = True
        elif fault == "slot":
            arena.begin_write(1, 2)
        elif fault == "copy":
            raise OSError("no such page")

    loads.copier.before = spoil
    loads.run()
    assert loads.failures()[1] is not None
    assert loads.bad(1) == {20, 30}
    assert sorted(loads.copier.zeroed) == [20, 30]


@pytest.mark.parametrize(("fault", "anew"), [("bytes", True), ("lease", False), (None, False)])
def test_what_a_hand_off_failed_to_read_is_attached_anew(
    arena: Arena, fault: str | None, anew: bool
) -> None:
    loads = Loads(arena, copy_s=0.4)
    loads.copier.wrong = fault == "bytes"
    loads.submit(1, [0], lease=0.0 if fault == "lease" else 100.0)
    loads.submit(2, [1])
    loads.run()
    loads.attach()
    loads.run()
    assert loads.peers.attached == 1
    loads.copier.wrong = False
    loads.submit(3, [2])
    loads.run()
    loads.attach()
    loads.run()
    assert loads.failures()[3] is None
    assert loads.peers.attached == 1 + anew


def test_a_load_without_a_lease_waits_for_no_peer(arena: Arena) -> None:
    loads = Loads(arena)
    for job_id in (1, 2):
        loads.submit(job_id, [0], keyed=True)
        loads.run()
        assert loads.failures()[job_id] == "peer_unreachable"
    assert not loads.peers.attached
    assert not loads.loader.arenas.attach_ahead((loads.endpoint,))
    loads.submit(3, [0], keyed=True)  # it is under way, which is not waited for either
    loads.run()
    assert loads.failures()[3] == "peer_unreachable"
    loads.attach()
    assert loads.loader.arenas.attach_ahead((loads.endpoint,))
    loads.submit(4, [0], keyed=True)
    loads.run()
    assert loads.failures()[4] is None
    assert loads.peers.attached == 1


@pytest.fixture(params=[True, False], ids=["mapped", "fetched"])
def attached(arena: Arena, request: pytest.FixtureRequest) -> Loads:
    """Loads of a peer whose arena is attached, and is read in place or fetched."""
    loads = Loads(arena)
    loads.peers.supports_mapping = request.param
    loads.loader.arenas.attach_ahead((loads.endpoint,))
    loads.attach()
    return loads


def test_a_slot_that_is_not_published_is_waited_for_only_with_a_lease(
    arena: Arena, attached: Loads
) -> None:
    """What an index lists is there, or was: nobody is about to publish it."""
    arena.begin_write(7, 0)
    attached.submit(1, [7])
    attached.submit(2, [7], keyed=True)
    attached.go_on()
    assert attached.failures() == {2: "stale_slot"}
    assert attached.bad(2) == {80}
    publish(arena, 7)
    attached.go_on()
    assert attached.failures() == {1: None, 2: "stale_slot"}


def test_a_slot_that_holds_another_block_than_its_index_lists_is_not_used(
    arena: Arena, attached: Loads
) -> None:
    """Its generation and its checksum are right: only the key in its header tells."""
    arena.begin_write(1, 0)
    publish(arena, 1, b"another")
    attached.submit(1, [0, 1, 2], keyed=True)
    attached.go_on()
    assert attached.failures() == {1: "stale_slot"}
    assert attached.bad(1) == {20, 30}
    assert attached.copier.zeroed == [20, 30]


def test_an_attempt_ahead_that_fails_is_made_again(arena: Arena) -> None:
    loads = Loads(arena)
    loads.peers.silent = True
    for _ in range(2):
        assert not loads.loader.arenas.attach_ahead((loads.endpoint,))
        loads.attach()
    loads.peers.silent = False
    assert not loads.loader.arenas.attach_ahead((loads.endpoint,))
    loads.attach()
    assert loads.loader.arenas.attach_ahead((loads.endpoint,))
    assert loads.peers.attached == 3
    assert not loads.loader.arenas.attach_ahead(())


@pytest.mark.parametrize("keyed", [True, False])
def test_the_own_arena_is_read_in_place(arena: Arena, keyed: bool) -> None:
    loads = Loads(arena, own=True)
    assert loads.loader.arenas.attach_ahead((loads.endpoint,))
    loads.submit(1, [0, 1], keyed=keyed)
    loads.run()
    assert loads.failures() == {1: None}
    loads.copier.wrong = True
    loads.submit(2, [0, 1], keyed=keyed)
    loads.run()
    assert loads.failures()[2] == "checksum_mismatch"
    loads.copier.wrong = False
    loads.submit(3, [0, 1], keyed=keyed)
    loads.run()
    assert loads.failures()[3] is None
    assert not loads.peers.attached
    assert not arena.closed
