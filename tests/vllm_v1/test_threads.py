# SPDX-License-Identifier: Apache-2.0
"""What docs/internals/threads.md says of each thread after an unexpected error is what happens."""

import ast
import asyncio
import contextlib
import mmap
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

import zmq

import omni_connector
from omni_connector.arena.block_index import BlockIndex
from omni_connector.arena.prefault import Prefaulter, ReaderPrefaulter
from omni_connector.config import FileStoreSettings
from omni_connector.copy.pinning import Pinning
from omni_connector.copy.threads import CopyThread, Outcome
from omni_connector.handoff.channel import ControlChannel
from omni_connector.identity import adapters
from omni_connector.identity.full_digest import WeightFilesDigest
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.keys import ClusterKey
from omni_connector.net.links import ZmqSockets
from omni_connector.net.peers import HostPort
from omni_connector.net.resolver import Resolver
from omni_connector.net.unix import Listener
from omni_connector.objects.mooncake import ObjectServer
from omni_connector.objects.waits import on_a_thread
from omni_connector.prefix.lookups import Lookup, StoreLookups
from omni_connector.prefix.neighbours import HostNeighbours, LocalEngine
from omni_connector.prefix.store_jobs import StoreJobs
from omni_connector.runtime.blocking_calls import CallThreads
from omni_connector.runtime.context import PROCESS_CONTEXT, EngineContext
from omni_connector.runtime.shared_work import Helpers
from omni_connector.runtime.trace import FileTrace
from omni_connector.runtime.turns import Watch, take_ended_threads
from omni_connector.stores.file_store import FileBlockStore
from omni_connector.transports import Endpoint
from omni_connector.transports.reading import PeerThreads
from omni_connector.transports.shm import Attach
from omni_connector.vllm_v1.live_gauges import LiveGauges
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.rank_weights import AnsweredWeights

pytestmark = pytest.mark.vllm

LONG = 60.0
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "threads.md"
FULL = GroupShape(
    kind="full_attention", block_size=16, attention_type="all", layers="x", pages=("p",)
)
# What starts threads, by the name of the function that is called.
STARTS = {"start", "_start", "TurnThread", "Thread", "CopyThread", "CallThreads"}
STARTS |= {"ThreadPoolExecutor"}

Case = Callable[[Path, pytest.MonkeyPatch], None]
CASES: dict[str, Case] = {}


class MistakeError(LookupError):
    """What nobody expects."""


def failing(*_: object, **__: object) -> Any:
    raise MistakeError("a mistake in the code")


class FailsOnce:
    """Raises when it is called first; then it returns what it was given."""

    def __init__(self, then: object = None) -> None:
        self.calls = 0
        self._then = then

    def __call__(self, *_: object, **__: object) -> Any:
        self.calls += 1
        return failing() if self.calls == 1 else self._then


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def case(*names: str) -> Callable[[Case], Case]:
    """A test of these threads: it has the innermost call of one raise. It checks what goes on, or
    what the end of the thread ends."""

    def add(made: Case) -> Case:
        CASES.update(dict.fromkeys(names, made))
        return made

    return add


def promised() -> dict[str, str]:
    """By the name of each thread in the table, what it does after an error."""
    table = PAGE.read_text().split("## Processes and threads")[1].split("\n\n")[2]
    found: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        _, thread, _, _, after = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"`(omni-[a-z-]+)`", thread):
            assert found.setdefault(name, after) == after
    return found


def started() -> set[str]:
    """The names of all threads that the package starts."""
    found: set[str] = set()
    for path in Path(omni_connector.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            node.target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for given in (*node.args, *(each.value for each in node.keywords)):
                name = constants.get(getattr(given, "id", ""), getattr(given, "value", ""))
                if called in STARTS and isinstance(name, str) and name.startswith("omni-"):
                    found.add(name)
    return found


def test_the_table_has_each_thread_and_each_has_a_case() -> None:
    assert set(promised()) == started() == set(CASES)


@pytest.mark.parametrize("name", sorted(promised()))
def test_an_error_does_what_the_table_says(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_ended_threads()
    CASES[name](place, monkeypatch)
    stats = OmniStats()
    stats.fail_ended_threads()
    ends = promised()[name] == "ends"
    assert set(stats.data["counts"]) == ({f"failure:thread_ended:{name}"} if ends else set())


# Threads that go on


@case("omni-weights", "omni-store-files", "omni-mooncake")
def _calls(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = CallThreads("omni-test", 1)
    with pytest.raises(MistakeError):
        threads.start(failing).result(LONG)
    with pytest.raises(SystemExit):
        threads.start(sys.exit).result(LONG)
    assert threads.start(lambda: 7).result(LONG) == 7
    threads.close()


@case("omni-resolve")
def _resolve(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", failing)
        with pytest.raises(MistakeError):
            resolver.look_up(HostPort("localhost", 1)).result(LONG)
    assert resolver.look_up(HostPort("localhost", 1)).result(LONG).port == 1
    resolver.close()


@case("omni-connector-async")
def _async(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def both() -> int:
        with pytest.raises(MistakeError):
            await on_a_thread(failing)
        return await on_a_thread(lambda: 7)

    assert asyncio.run(both()) == 7


@case("omni-weights-digest")
def _weights(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Iterator[None]:
        yield
        failing()

    weights = AnsweredWeights(0, read, PROCESS_CONTEXT)
    for question in (1, 2):
        weights.ask(question)
        until(lambda: weights.answers)
        [answer] = weights.take()
        assert (answer.question, answer.digest) == (question, None)
    weights.close()


@case("omni-adapters")
def _adapters(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = FailsOnce(("content", "version"))
    contents = adapters.AdapterContents(PROCESS_CONTEXT)
    monkeypatch.setattr(contents, "_read", read)
    for path in ("/a", "/b"):
        lora = SimpleNamespace(
            lora_name=path,
            lora_path=path,
            lora_int_id=1,
            load_inplace=False,
            is_3d_lora_weight=False,
        )
        assert not contents._fresh(lora)
        until(lambda lora=lora: contents._fresh(lora))
    assert read.calls == 2
    contents.close()


@contextlib.contextmanager
def local_engine(place: Path, **ranks: Any) -> Iterator[LocalEngine]:
    arena = Endpoint(transport="shm", address="a", epoch=bytes(16), n_slots=8, slot_bytes=4096)
    asked = SimpleNamespace(
        attached=lambda engines: [True] * len(engines),
        kept=lambda orphans: [None] * len(orphans),
        close=lambda: None,
    )
    vars(asked).update(ranks)
    with contextlib.closing(BlockIndex.create(8, os.urandom(16))) as index:
        yield LocalEngine(place, "engine", bytes(16), index, ((arena,),), asked, lambda *_: None)


@case("omni-neighbours")
def _neighbours(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = FailsOnce([])
    monkeypatch.setattr("omni_connector.prefix.neighbours.LOOK_S", 0.01)
    with local_engine(place, attached=attached) as engine:
        neighbours = HostNeighbours(engine, PROCESS_CONTEXT)
        until(lambda: attached.calls > 2)
        neighbours.close()


@case("omni-lookup")
def _lookup(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(exists=FailsOnce([True]), failures={}, close=lambda: None)
    lookups = StoreLookups(store, [[FULL]], 1, PROCESS_CONTEXT)
    first, second = (Lookup("p", [[b"h"]], time.monotonic() + LONG) for _ in range(2))
    lookups.ask(first)
    lookups.ask(second)
    until(lambda: second.held)
    assert first.held is None
    lookups.close()


@case("omni-save", "omni-load", "omni-store-load")
def _copies(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def good(cancelled: object) -> Iterator[bool]:
        yield True
        return Outcome(2)

    def bad(cancelled: object) -> Iterator[bool]:
        yield True
        failing()

    thread = CopyThread("omni-test")
    thread.submit(1, bad)
    thread.submit(2, good)
    until(lambda: not thread.works)
    assert {each.job_id: each.failure for each in thread.take_ended()} == {1: "job_failed", 2: None}
    thread.close()


@case("omni-connector-copy")
def _helpers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = Helpers()
    helpers.threads = 4
    for _ in range(20):
        with pytest.raises(MistakeError):
            helpers.share(failing, range(8))
        done: list[int] = []
        helpers.share(done.append, range(8))
        assert sorted(done) == list(range(8))
    helpers.close(LONG)


@case("omni-store-put")
def _store_put(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(
        put=FailsOnce([True]),
        failures={},
        close=lambda: None,
        buffer=lambda rows, size: np.zeros((rows, size), np.uint8),
    )
    stats = OmniStats()
    jobs = StoreJobs(
        store=store,
        copier=SimpleNamespace(),
        layout=SimpleNamespace(group_bytes=(64,)),
        groups=(FULL,),
        rank=0,
        ranks=1,
        affinity=frozenset(os.sched_getaffinity(0)),
        context=EngineContext(stats=stats),
        on_end=lambda: None,
    )
    nothing = SimpleNamespace(batches=lambda limits: [])
    for number in (1, 2):
        job = SimpleNamespace(blocks=nothing, mark=(0, b"name"), prefix="p")
        with contextlib.suppress(StopIteration):
            work = jobs.save_work(number, job, None)(lambda: False)
            while True:
                next(work)
        until(lambda number=number: store.put.calls == number)
    jobs.close()
    jobs.count_events()
    assert stats.data["counts"] == {"failure:store_put_failed": 1}


@case("omni-store-sweep")
def _sweep(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_connector.stores.file_store._FIRST_PAUSE_S", 0.01)
    sweep = FailsOnce(())
    store = FileBlockStore(FileStoreSettings(path=str(place / "store"), gib=1.0))
    monkeypatch.setattr(store._sweeper, "sweep", lambda: (sweep() for _ in range(1)))
    monkeypatch.setattr(store._sweeper, "due", lambda: 0.0)
    row = store.buffer(1, 4096)
    store.put(["key"], row, [4096], timeout=LONG)
    until(lambda: sweep.calls > 1)
    store.close()
    assert store.failures["MistakeError"] == 1


@case("omni-fetch")
def _fetch(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done = PeerThreads(), []
    for _ in range(10):  # more than there are threads for a peer
        threads.submit("peer", failing)
    threads.submit("peer", lambda: done.append(True))
    until(lambda: done)
    threads.close()


@case("omni-watch")
def _watch(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = FailsOnce(False)
    watch = Watch(look, 0.001)
    watch.start()
    until(lambda: look.calls == 2)
    watch.close()


@case("omni-live-gauges")
def _gauges(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_connector.vllm_v1.live_gauges._SLOW_POLL_S", 0.001)
    gauges = LiveGauges("default", {})
    look = FailsOnce(None)
    monkeypatch.setattr(gauges, "refresh", look)
    thread = gauges.start()
    until(lambda: look.calls > 2)
    monkeypatch.undo()
    del gauges
    thread.join(LONG)
    assert not thread.is_alive()


# Threads that end


@case("omni-control")
def _control(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = ZmqSockets()
    monkeypatch.setattr(sockets.poller, "ready", failing)
    key: Any = SimpleNamespace()
    channel = ControlChannel(compatibility=key, sockets=sockets)
    until(lambda: not channel._thread.is_alive())
    assert not channel.alive
    channel.close()


@case("omni-weight-files")
def _weight_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    digest = WeightFilesDigest(failing, lambda: 0.0, told.append, PROCESS_CONTEXT)
    until(lambda: not digest._thread.is_alive())
    digest.close()
    assert not told


@case("omni-connector-shm")
def _listener(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(msgspec.msgpack.Decoder(Attach), failing)
    listener.add(place / f"a-{'0' * 24}.sock")
    with monkeypatch.context() as patch:
        patch.setattr(listener._selector, "select", failing)
        listener.wake()
        until(lambda: not listener._thread.is_alive())
    assert not listener.alive
    assert not list(place.iterdir())
    listener.close()


@case("omni-connector-prefault")
def _prefault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("omni-connector-test")
    os.ftruncate(fd, 1 << 20)
    mapped = mmap.mmap(fd, 1 << 20)
    own = Prefaulter(fd, mapped, populated=failing)  # it populates all of it
    until(lambda: not own._thread.is_alive())
    peers = ReaderPrefaulter(fd, mapped, failing)
    until(lambda: not peers._thread.is_alive())
    own.stop()
    peers.stop()
    os.close(fd)


@case("omni-pin")
def _pinning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copier: Any = SimpleNamespace(pinned_at_once=1, pin=failing)
    pinning = Pinning(copier, time.monotonic, PROCESS_CONTEXT.start, threading.Lock)
    pinning.begin()
    pinning.follow(np.zeros((2, 8), np.uint8)).populated(2)
    thread = pinning._thread
    assert thread is not None
    until(lambda: not thread.is_alive())
    pinning.close()


@case("omni-trace")
def _trace(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = FileTrace(str(place), "engine", "worker")
    monkeypatch.setattr(trace, "_line", failing)
    trace.span("name", 0)
    assert trace._thread is not None
    until(lambda: not trace._thread.is_alive())
    trace.close()


@case("omni-objects")
def _objects(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ClusterKey(*zmq.curve_keypair())
    server = ObjectServer(HostPort("127.0.0.1", 0), key, failing, failing)
    monkeypatch.setattr(server._poller, "ready", failing)
    until(lambda: not server.alive)
    server.close()
