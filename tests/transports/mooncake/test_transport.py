# SPDX-License-Identifier: Apache-2.0
"""Arenas over Mooncake's Transfer Engine, on loopback TCP: the contract, and Mooncake's traps."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import pool as memory_pool
from omni_connector.arena.arena import Arena
from omni_connector.arena.format import ArenaGeometry
from omni_connector.config import MooncakeSettings
from omni_connector.errors import (
    ChecksumError,
    IncompatiblePeerError,
    IntegrityError,
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    SlotPendingError,
    StaleSlotError,
    TransportError,
)
from omni_connector.testing import FakeClock
from omni_connector.testing.conformance import TransportConformance, publish, read
from omni_connector.transports.base import Endpoint, RemoteArena
from omni_connector.transports.mooncake import engine as mooncake_engine
from omni_connector.transports.mooncake.engine import MemoryRange, TransferEngine, cut, join
from omni_connector.transports.mooncake.transport import MooncakeArena, MooncakeTransport

from ...stopping import stop

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("reused_engines")

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 1e4  # a deadline that only a hang reaches
WAIT_S = 60.0
SETTINGS = MooncakeSettings(timeout_s=TIMEOUT_S)


class TestMooncakeConformance(TransportConformance):
    def connect(self, place: Path) -> MooncakeTransport:
        return MooncakeTransport(settings=SETTINGS, host=LOOPBACK)


@pytest.fixture(scope="module", autouse=True)
def rested(reused_engines: None) -> Iterator[tuple[RemoteArena, float]]:
    """A remote arena, and when it was last read: it rests while the other tests run."""
    with (
        MooncakeTransport(settings=SETTINGS, host=LOOPBACK) as owner,
        MooncakeTransport(settings=SETTINGS, host=LOOPBACK) as reader,
        Arena.create(1, 4096) as arena,
    ):
        publish(arena, 0, 1, b"content")
        with reader.attach(owner.export(arena, "a"), timeout=WAIT_S) as remote:
            assert read(remote, 0, 1).tobytes() == b"content"
            yield remote, time.monotonic()


@pytest.fixture
def open_connector() -> Iterator[Callable[..., MooncakeTransport]]:
    with ExitStack() as stack:

        def connect(**settings: Any) -> MooncakeTransport:
            settings = {"settings": SETTINGS, "host": LOOPBACK, **settings}
            return stack.enter_context(MooncakeTransport(**settings))

        yield connect


Connect = Callable[..., MooncakeTransport]
Link = Callable[[int, int], AbstractContextManager[tuple[Arena, RemoteArena, MooncakeTransport]]]


@pytest.fixture
def linked(open_connector: Connect) -> Link:
    """Makes an arena of so many slots of so many bytes, and attaches it by another transport."""

    @contextmanager
    def link(*geometry: int) -> Iterator[tuple[Arena, RemoteArena, MooncakeTransport]]:
        owner, reader = open_connector(), open_connector()
        with (
            Arena.create(*geometry) as arena,
            reader.attach(owner.export(arena, "a"), timeout=WAIT_S) as remote,
        ):
            yield arena, remote, reader

    return link


class Fake:
    """An engine that makes polled reads at once, like blocking ones."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def batch_transfer_sync_read(
        self, peer: str, places: list[int], addresses: list[int], sizes: list[int]
    ) -> int:
        raise NotImplementedError

    def batch_transfer_async_read(self, *arguments: Any) -> int:
        self.codes.append(self.batch_transfer_sync_read(*arguments))
        return len(self.codes)

    def transfer_check_status(self, transfer: int) -> int:
        return self.codes[transfer - 1] or 1


class Flaky(Fake):
    """Mooncake's engine, whose next reads fail, move nothing and say -1."""

    def __init__(self, inner: Any, failures: int) -> None:
        super().__init__()
        self.inner = inner
        self.failures = failures
        self.batches: list[int] = []
        self.places: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def batch_transfer_sync_read(
        self, peer: str, places: list[int], addresses: list[int], sizes: list[int]
    ) -> int:
        self.batches.append(len(sizes))
        self.places.append(places[0])
        if self.failures:
            self.failures -= 1
            return -1
        code: int = self.inner.batch_transfer_sync_read(peer, places, addresses, sizes)
        return code


def make_flaky(connector: MooncakeTransport, failures: int) -> Flaky:
    engine = connector._engine
    assert engine.address
    engine._engine = flaky = Flaky(engine._engine, failures)
    return flaky


# Large, refused, late


def test_many_slots_come_in_bounded_batches(open_connector: Connect) -> None:
    n_slots, owner, reader = 4096, open_connector(), open_connector()
    with Arena.create(n_slots, 16384) as arena:
        arena.slots[:] = np.arange(n_slots, dtype=np.uint32).view(np.uint8).reshape(-1, 4)[:, :1]
        for slot in range(n_slots):
            arena.begin_write(slot, 1)
            arena.publish(slot, 1, b"", 16384, 0)
        flaky = make_flaky(reader, 0)
        with reader.attach(owner.export(arena, "many"), timeout=WAIT_S) as remote:
            scattered = np.random.default_rng(7).permutation(n_slots).tolist()
            fetched = remote.fetch(scattered, [1] * n_slots, 16384, timeout=WAIT_S)
            assert np.array_equal(fetched.rows, arena.slots[scattered])
            fetched.release()
            assert max(flaky.batches) <= 64
            flaky.batches.clear()
            fetched = remote.fetch(range(n_slots), [1] * n_slots, 16384, timeout=WAIT_S)
            assert np.array_equal(fetched.rows, arena.slots)
            # Consecutive slots are one range, cut into ranges of 1 MiB.
            assert sum(flaky.batches) == 64 + 2
            fetched.release()


@pytest.mark.parametrize("failures", [1, 3])
def test_a_refused_batch_is_tried_again_elsewhere(linked: Link, failures: int) -> None:
    with linked(4, 1 << 20) as (arena, remote, reader):
        for slot in range(4):
            publish(arena, slot, 1, bytes([slot + 1]) * (1 << 20))
        flaky = make_flaky(reader, failures)
        assert read(remote, 2, 1).tobytes() == bytes([3]) * (1 << 20)
        # What a failed transfer may still write is not what the next one is written to.
        assert len(set(flaky.places[: failures + 1])) == failures + 1


def test_no_more_than_four_tries(open_connector: Connect) -> None:
    owner, reader = open_connector(), open_connector()
    with Arena.create(1, 4096) as arena:
        publish(arena, 0, 1, b"content")
        endpoint = owner.export(arena, "a")
        with reader.attach(endpoint, timeout=WAIT_S) as remote:
            flaky = make_flaky(reader, 100)
            with pytest.raises(PeerUnreachableError):
                read(remote, 0, 1)
            assert len(flaky.batches) == 4
            flaky.failures = 0
            assert not remote.alive
            with pytest.raises(PeerUnreachableError):
                read(remote, 0, 1)
        with reader.attach(endpoint, timeout=WAIT_S) as remote:
            assert read(remote, 0, 1).tobytes() == b"content"


def test_memory_of_failed_reads_is_bounded(
    open_connector: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pool, "MAX_PEER_BYTES", 8 * 4096)
    owner, other, reader = open_connector(), open_connector(), open_connector()
    clock = FakeClock()
    monkeypatch.setattr(reader._engine.pool, "_clock", clock)
    with Arena.create(1, 4096) as arena, Arena.create(1, 4096) as second:
        publish(arena, 0, 1, b"content")
        publish(second, 0, 1, b"other")
        endpoint = owner.export(arena, "a")
        flaky = make_flaky(reader, 8)
        for _ in range(2):
            with pytest.raises(PeerUnreachableError, match="4 tries"):
                reader.attach(endpoint, timeout=WAIT_S)
        with pytest.raises(PeerUnreachableError, match="may still write"):
            reader.attach(endpoint, timeout=WAIT_S)
        assert not flaky.failures
        found = reader.health()
        assert found["status"] == f"degraded: not reading from {owner._engine.address}"
        assert found["quarantined_bytes"] == 8 * 4096
        with reader.attach(other.export(second, "b"), timeout=WAIT_S) as remote:
            assert read(remote, 0, 1).tobytes() == b"other"
        clock.advance(memory_pool.QUARANTINE_S)
        with reader.attach(endpoint, timeout=WAIT_S) as remote:
            assert read(remote, 0, 1).tobytes() == b"content"
        found = reader.health()
        assert (found["status"], found["quarantined_bytes"]) == ("healthy", 0)


class Memory(Fake):
    """An engine whose reads fill the memory; the reads with these numbers then fail."""

    def __init__(self, *fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.reads = 0

    def batch_transfer_sync_read(
        self, peer: str, places: list[int], addresses: list[int], sizes: list[int]
    ) -> int:
        for place, address, size in zip(places, addresses, sizes, strict=True):
            ctypes.memset(place, address >> 20, size)
        self.reads += 1
        return -1 if self.reads in self.fails else 0


def test_of_a_large_read_that_fails_only_the_failed_part_counts() -> None:
    engine = TransferEngine(SETTINGS, LOOPBACK)
    engine._engine = Memory(192)  # in the third of four batches, and all is read once more
    before = resident()
    ranges = [MemoryRange(n << 20, 1 << 20) for n in range(256)]
    buffer = engine.fetch("127.0.0.1:1", ranges, time.monotonic() + WAIT_S)
    assert np.array_equal(buffer[: 256 << 20 : 1 << 20], np.arange(256))
    assert engine.pool.quarantined_bytes == 64 << 20
    assert engine.pool.backed_off() == []
    # The buffer that came, and of the one that did not, the batch that failed.
    assert resident() - before < (256 + 64 + 32) << 20
    engine.pool.give_back(buffer)


class Silent(Memory):
    """An engine whose polled reads do not end; the named ones do not even begin."""

    def batch_transfer_async_read(self, *arguments: Any) -> int:
        self.codes.append(0)
        return 0 if len(self.codes) in self.fails else len(self.codes)

    def transfer_check_status(self, transfer: int) -> int:
        return 0


def test_a_polled_read_that_does_not_end_is_given_up() -> None:
    engine = TransferEngine(MooncakeSettings(timeout_s=0.05), LOOPBACK)
    engine._engine = Silent()
    with pytest.raises(PeerUnreachableError, match="1 try"):
        engine.fetch("127.0.0.1:1", [MemoryRange(1 << 20, 1 << 20)], time.monotonic() + WAIT_S)
    assert engine.pool.quarantined_bytes == 1 << 20


def test_a_polled_read_that_is_refused_is_made_again_in_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(
        mooncake_engine, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep)
    )

    class Slow(Silent):
        def batch_transfer_async_read(self, *arguments: Any) -> int:
            clock.advance(3.0)  # a busy machine holds it up, for less than a transfer may take
            return super().batch_transfer_async_read(*arguments)

    engine = TransferEngine(MooncakeSettings(timeout_s=10.0), LOOPBACK)
    engine._engine = Slow(2)
    ranges = [MemoryRange(n << 20, 1 << 20) for n in range(1, 3)]
    buffer = engine.fetch("127.0.0.1:1", ranges, clock() + WAIT_S)
    assert buffer[: 2 << 20 : 1 << 20].tolist() == [1, 2]
    assert engine.pool.quarantined_bytes == 2 << 20


def test_mooncake_runs_on_the_cores_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[set[int]] = []

    class Module:
        class TransferEngine:
            def initialize(self, *arguments: Any) -> int:
                set_to.append(set(set_to[-1]))
                return 0

            def get_rpc_port(self) -> int:
                return 1

    monkeypatch.setattr(mooncake_engine, "engine_module", lambda family: Module)
    monkeypatch.setattr(mooncake_engine, "copy_cores", lambda: frozenset({0, 1, 2}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: set_to.append(set(cores)))
    assert TransferEngine(SETTINGS, "127.0.0.2").address == "127.0.0.2:1"
    assert set_to == [{0, 1, 2}, {0, 1, 2}, {1}]


def resident() -> int:
    """Bytes of anonymous memory that this process has."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


class Registering(Fake):
    """An engine whose reads fail, and which knows what is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: set[int] = set()

    def register_memory(self, address: int, size: int) -> int:
        self.registered.add(address)
        return 0

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_transfer_sync_read(self, *arguments: Any) -> int:
        return -1


def test_memory_of_failed_reads_is_unregistered_when_it_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With RDMA, which reads into registered memory only."""
    monkeypatch.setattr(memory_pool, "QUARANTINE_S", 0.0)
    engine = TransferEngine(MooncakeSettings(protocol="rdma"), LOOPBACK)
    engine._engine = inner = Registering()
    for _ in range(3):
        with pytest.raises(PeerUnreachableError):
            engine.fetch("127.0.0.1:1", [MemoryRange(0, 8)], time.monotonic() + WAIT_S)
    assert len(inner.registered) == 4
    engine.pool.tidy()
    assert not inner.registered
    assert not engine._registered


def test_the_deadline_ends_a_fetch(linked: Link) -> None:
    with linked(1, 4096) as (arena, remote, _):
        publish(arena, 0, 1, b"content")
        with pytest.raises(PeerUnreachableError, match="in time"):
            remote.fetch([0], [1], 7, timeout=-1.0)


# What is read is what was published


def test_pending_stale_and_reused_slots(linked: Link) -> None:
    with linked(4, 4096) as (arena, remote, _):
        for slot in (0, 1, 3):
            publish(arena, slot, 5, b"content")
        arena.begin_write(2, 5)
        with pytest.raises(SlotPendingError):
            remote.fetch([0, 1, 2], [5, 5, 5], 7, timeout=WAIT_S)
        with pytest.raises(StaleSlotError):
            remote.fetch([0, 1], [5, 4], 7, timeout=WAIT_S)
        with pytest.raises(ProtocolError):
            remote.fetch([0, 4], [5, 5], 7, timeout=WAIT_S)
        fetched = remote.fetch([3, 0], [5, 5], 7, timeout=WAIT_S)
        assert [row.tobytes() for row in fetched.rows] == [b"content"] * 2
        fetched.release()


def test_a_slot_reused_while_it_is_read(linked: Link) -> None:
    with linked(2, 4096) as (arena, remote, _):
        publish(arena, 0, 5, b"content")
        assert isinstance(remote, MooncakeArena)
        fetch, calls = remote._fetch, []

        def reuse_between(ranges: Any, deadline: float) -> Any:
            calls.append(ranges)
            found = fetch(ranges, deadline)
            if len(calls) == 2:  # the headers, then the bytes
                publish(arena, 0, 6, b"others!")
            return found

        remote._fetch = reuse_between  # type: ignore[method-assign]
        with pytest.raises(StaleSlotError):
            remote.fetch([0], [5], 7, timeout=WAIT_S)


def test_bytes_that_came_too_early_are_found_out(linked: Link) -> None:
    """Completion said before all bytes were there, as in Mooncake 0.3.11: the checksum tells."""
    with linked(1, 1 << 16) as (arena, remote, _):
        publish(arena, 0, 5, bytes(range(256)) * 256)
        assert isinstance(remote, MooncakeArena)
        fetch = remote._fetch

        def early(ranges: Any, deadline: float) -> Any:
            found = fetch(ranges, deadline)
            if ranges[0].size == 1 << 16:
                found[60000:] = 0
            return found

        remote._fetch = early  # type: ignore[method-assign]
        with pytest.raises(ChecksumError):
            read(remote, 0, 5)
        fetched = remote.fetch([0], [5], 1 << 16, timeout=WAIT_S)
        assert xxhash.xxh3_64_intdigest(fetched.rows[0].data) != fetched.headers[0].checksum
        fetched.release()


def test_a_torn_header_is_found_out(linked: Link) -> None:
    with linked(1, 4096) as (arena, remote, _):
        publish(arena, 0, 5, b"content")
        words, first = arena._locate(0)
        words[first + 6] = 5000  # more bytes than a slot has
        with pytest.raises(IntegrityError):
            remote.verify(0, 5)


def test_a_peer_cannot_write_an_exported_arena(open_connector: Connect) -> None:
    owner, attacker = open_connector(), open_connector()
    with Arena.create(1, 1 << 16) as arena:
        publish(arena, 0, 1, b"content")
        endpoint = owner.export(arena, "a")
        peer, base = endpoint.address.removeprefix("tcp://").split("/")
        forged = np.full(4096, 0x66, np.uint8)
        assert attacker._engine.address
        engine = attacker._engine._engine
        code = engine.transfer_sync_write(peer, int(forged.ctypes.data), int(base, 16), 4096)
        assert code != 0
        with open_connector().attach(endpoint, timeout=WAIT_S) as remote:
            assert read(remote, 0, 1).tobytes() == b"content"


def test_nothing_beyond_the_arena_can_be_read(open_connector: Connect) -> None:
    owner, attacker = open_connector(), open_connector()
    with Arena.create(1, 4096) as arena:
        peer, base = owner.export(arena, "a").address.removeprefix("tcp://").split("/")
        size = ArenaGeometry(1, 4096).total_bytes
        start = int(base, 16)
        outside = ((start - 4096, 4096), (start + size, 64), (start, size + 1))
        for each in (MemoryRange(*place) for place in outside):
            with pytest.raises(PeerUnreachableError):
                attacker._engine.fetch(peer, [each], time.monotonic() + WAIT_S)


# Peers and addresses


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:1",
        "tcp://127.0.0.1/7f00",
        "tcp://127.0.0.1:99999999/7f00",
        "tcp://127.0.0.1:80/",
        "tcp://127.0.0.1:80/7f00/",
        "http://127.0.0.1:80/7f00",
        "tcp://127.0.0.1;tcp:80/7f00",
        "tcp://a b:80/7f00",
        "tcp://127.0.0.1:80/7f00 ",
        "tcp://0.0.0.0:80/7f00",
        "tcp://127.1:80/7f00",
    ],
)
def test_malformed_addresses_are_refused(open_connector: Connect, address: str) -> None:
    reader = open_connector(allows=lambda host: True)
    endpoint = Endpoint(
        transport="mooncake", address=address, epoch=bytes(16), n_slots=1, slot_bytes=4096
    )
    with pytest.raises(ProtocolError):
        reader.attach(endpoint, timeout=WAIT_S)


@pytest.mark.parametrize("host", ["10.0.0.9", "db.internal", "[fe80::1]"])
def test_a_host_that_is_not_allowed_is_not_connected_to(open_connector: Connect, host: str) -> None:
    asked = []
    reader = open_connector(host=None, allows=lambda host: asked.append(host) is not None)
    endpoint = Endpoint(
        transport="mooncake",
        address=f"tcp://{host}:80/7f00",
        epoch=bytes(16),
        n_slots=1,
        slot_bytes=4096,
    )
    with pytest.raises(PeerRefusedError, match="peers"):
        reader.attach(endpoint, timeout=WAIT_S)
    assert asked == [host.strip("[]")]
    assert reader._engine._engine is None


def test_another_protocol_is_refused(open_connector: Connect) -> None:
    owner, reader = open_connector(), open_connector()
    with Arena.create(1, 4096) as arena:
        endpoint = owner.export(arena, "a")
        other = msgspec.structs.replace(
            endpoint, address=endpoint.address.replace("tcp://", "rdma://")
        )
        with pytest.raises(PeerRefusedError, match="rdma"):
            reader.attach(other, timeout=WAIT_S)


def test_no_arena_at_the_address(open_connector: Connect) -> None:
    owner, reader = open_connector(), open_connector()
    with Arena.create(2, 4096) as arena:
        endpoint = owner.export(arena, "a")
        prefix, base = endpoint.address.rsplit("/", 1)
        other = msgspec.structs.replace(endpoint, address=f"{prefix}/{int(base, 16) + 4096:x}")
        with pytest.raises(ProtocolError):
            reader.attach(other, timeout=WAIT_S)


# A peer in a process of its own

PEER = """
import os, sys
import msgspec, numpy as np
from omni_connector.config import MooncakeSettings
from omni_connector.testing.conformance import publish
from omni_connector.arena.arena import Arena
from omni_connector.transports.mooncake.transport import MooncakeTransport

connector = MooncakeTransport(settings=MooncakeSettings(timeout_s=10.0), host="127.0.0.1")
arena = Arena.create(16, 1 << 20)
for slot in range(16):
    publish(arena, slot, 7, bytes([slot + 1]) * (1 << 20))
print(msgspec.json.encode(connector.export(arena, "peer")).decode(), flush=True)
sys.stdin.read()
"""


class Peer:
    """An arena in a process that can be stopped, killed and started again on the same port."""

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        names = "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"
        range_ = {} if ports is None else dict(zip(names, map(str, ports), strict=True))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **range_},
        )
        assert self.process.stdout is not None
        self.endpoint = msgspec.json.decode(self.process.stdout.readline(), type=Endpoint)
        self.port = int(self.endpoint.address.split("/")[2].rsplit(":", 1)[1])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


def test_a_peer_that_vanishes_midway(open_connector: Connect) -> None:
    reader = open_connector()
    with Peer() as peer, reader.attach(peer.endpoint, timeout=WAIT_S) as remote:
        killer = threading.Timer(0.1, peer.kill)
        rounds = 0

        def read_on() -> None:
            nonlocal rounds
            while True:
                fetched = remote.fetch(range(16), [7] * 16, 1 << 20, timeout=WAIT_S)
                for slot, row in enumerate(fetched.rows):
                    assert (row == slot + 1).all()
                fetched.release()
                rounds += 1
                if rounds == 1:
                    killer.start()

        with pytest.raises(PeerUnreachableError):
            read_on()
        killer.join()
        assert rounds
        assert not remote.alive
        with pytest.raises(PeerUnreachableError):
            reader.attach(peer.endpoint, timeout=WAIT_S)


# Reads from a peer that stops midway. In a process of its own, whose engine has a timeout of its
# own: the first engine of a process decides it for all.
READER = """
import sys
import msgspec
from omni_connector.config import MooncakeSettings
from omni_connector.errors import PeerUnreachableError
from omni_connector.testing.conformance.slots import read
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mooncake.transport import MooncakeTransport

endpoint = msgspec.json.decode(sys.argv[1], type=Endpoint)
with MooncakeTransport(settings=MooncakeSettings(timeout_s=1.0), host="127.0.0.1") as reader:
    with reader.attach(endpoint, timeout=60.0) as remote:
        print("attached", flush=True)
        sys.stdin.readline()
        try:
            remote.fetch(range(16), [7] * 16, 1 << 20, timeout=1.0)
        except PeerUnreachableError:
            print("given up", flush=True)
        sys.stdin.readline()
    with reader.attach(endpoint, timeout=60.0) as remote:
        print(read(remote, 3, 7).tobytes() == bytes([4]) * (1 << 20), flush=True)
"""


def test_a_peer_that_stands_still_is_given_up() -> None:
    # A transfer that is under way ends by its own timeout, not by Mooncake's.
    environ = os.environ | {"MC_TRANSFER_TIMEOUT": "3600"}
    with (
        Peer() as peer,
        subprocess.Popen(
            [sys.executable, "-c", READER, msgspec.json.encode(peer.endpoint).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            text=True,
        ) as reader,
    ):
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            assert reader.stdout.readline() == "attached\n"
            stop(peer.process.pid)
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "given up\n"
            peer.signal(signal.SIGCONT)
            assert reader.communicate("\n", timeout=WAIT_S)[0] == "True\n"
        finally:
            reader.kill()


def free_range(count: int) -> tuple[int, int]:
    """The first and the last of `count` free ports in a row.

    Mooncake keeps to a range below the ports that the system gives out.
    """
    for first in range(15990, 30000, count):
        try:
            for port in range(first, first + count):
                socket.create_server((LOOPBACK, port)).close()
        except OSError:
            continue
        return first, first + count - 1
    raise AssertionError(f"no {count} free ports in a row")


def test_a_peer_that_restarted_on_the_same_port(open_connector: Connect) -> None:
    reader = open_connector()
    # An engine takes two of a range. Nobody has connected, so that none of them is held back.
    ports = free_range(3)
    with Peer(ports) as first, ExitStack() as stack:
        first.kill()
        for _ in range(30):
            second = stack.enter_context(Peer(ports))
            if second.port == first.port:
                break
            second.kill()
        assert second.port == first.port
        assert second.endpoint.epoch != first.endpoint.epoch
        # The old one is not there any more, wherever the new one has its arena.
        with pytest.raises(OmniError):
            reader.attach(first.endpoint, timeout=WAIT_S)
        moved = msgspec.structs.replace(second.endpoint, epoch=first.endpoint.epoch)
        with pytest.raises(IncompatiblePeerError, match="epoch"):
            reader.attach(moved, timeout=WAIT_S)
        with reader.attach(second.endpoint, timeout=WAIT_S) as fresh:
            assert read(fresh, 3, 7).tobytes() == bytes([4]) * (1 << 20)


def test_the_first_read_after_a_pause(rested: tuple[RemoteArena, float]) -> None:
    remote, last = rested
    time.sleep(max(0.0, last + 6.0 - time.monotonic()))
    assert read(remote, 0, 1).tobytes() == b"content"


# Spans

SPANS = st.lists(
    st.builds(MemoryRange, st.integers(0, 50).map(lambda n: n * 8), st.integers(1, 40)), max_size=30
)


@given(SPANS, st.integers(1, 64))
def test_joined_and_cut_ranges_are_the_same_bytes(ranges: list[MemoryRange], size: int) -> None:
    def bytes_of(ranges: Any) -> list[int]:
        return [each.address + i for each in ranges for i in range(each.size)]

    joined = list(join(ranges))
    assert bytes_of(joined) == bytes_of(ranges)
    assert all(a.address + a.size != b.address for a, b in pairwise(joined))
    parts = list(cut(joined, size))
    assert bytes_of(parts) == bytes_of(ranges)
    assert all(0 < part.size <= size for part in parts)


def test_an_engine_that_is_closed_does_nothing() -> None:
    engine = TransferEngine(SETTINGS, LOOPBACK)
    assert engine.address
    engine.close()
    engine.close()
    with pytest.raises(TransportError):
        engine.fetch("127.0.0.1:1", [MemoryRange(0, 1)], time.monotonic() + 1.0)


def test_what_was_taken_may_go_in_the_middle_of_anything(linked: Link) -> None:
    """Its finalizer runs wherever the last array of it goes, on a thread with the lock too."""
    with linked(1, 1 << 20) as (_, remote, reader):
        found = [remote.take([(0, 1 << 20)], timeout=WAIT_S)]
    pool = reader._engine.pool
    spare = pool._spare_bytes

    def let_go() -> None:
        with pool._lock:
            found.clear()

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    pool.tidy()
    assert pool._spare_bytes > spare


@pytest.mark.parametrize(("n_slots", "slot_bytes"), [(1 << 40, 1 << 40), (1 << 63, 4096)])
def test_no_peer_names_an_arena_that_no_file_can_hold(n_slots: int, slot_bytes: int) -> None:
    told = {"transport": "mooncake", "address": "a", "epoch": b"e" * 16}
    wire = msgspec.msgpack.encode({**told, "n_slots": n_slots, "slot_bytes": slot_bytes})
    with pytest.raises(msgspec.ValidationError, match="no file has"):
        msgspec.msgpack.decode(wire, type=Endpoint)
    with pytest.raises(TransportError):
        Arena.create(n_slots, slot_bytes)


def test_no_peer_names_addresses_that_no_memory_has() -> None:
    address = "tcp://127.0.0.1:1/ffffffffffff0000"
    endpoint = Endpoint(
        transport="mooncake", address=address, epoch=b"e" * 16, n_slots=64, slot_bytes=4096
    )
    with MooncakeTransport() as transport, pytest.raises(ProtocolError, match="no memory has"):
        transport.attach(endpoint, timeout=1.0)
