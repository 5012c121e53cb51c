# SPDX-License-Identifier: Apache-2.0
"""The control channel over real sockets, between threads and between processes."""

import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from omni_connector.errors import (
    IncompatiblePeerError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.handoff.channel import REST_S, TICK_S, ControlChannel
from omni_connector.handoff.client import Lease, LeaseDeniedError, PeerSession
from omni_connector.handoff.messages import (
    MAX_MESSAGE_BYTES,
)
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net import links as control_sockets
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock
from tests import inspection
from tests.patience import wait_until

from .engine import LONG, Asker, ByHand, StartEngine, ask, failure, start_peer


def test_a_lease_is_granted_and_released_or_denied(start_engine: StartEngine, asker: Asker) -> None:
    engine = start_engine()
    handoff = engine.handoff()
    lease = asker.request_lease(engine, handoff).result(LONG)
    assert lease.address == engine.address
    assert lease.token == handoff.token
    assert lease.handshake_reply == engine.handshake_reply
    assert lease.granted.groups == (((handoff.slots[0][0], handoff.generations[0][0]),),)
    assert lease.expires > time.monotonic() + 500
    assert engine.directory.usage() == (1, 0, 1)
    asker.channel.release(lease)
    assert engine.directory.closed.get(timeout=LONG) == handoff.token
    assert engine.directory.usage() == (0, 0, 0)
    error = failure(asker.request_lease(engine, handoff))
    assert isinstance(error, LeaseDeniedError)
    assert error.reason == "unknown_token"


def test_a_peer_that_differs_is_incompatible_at_once_and_again(
    start_engine: StartEngine, compatibility: CompatibilityKey
) -> None:
    engine = start_engine()
    asker = Asker(msgspec.structs.replace(compatibility, dtype="float16"))
    try:
        for _ in range(2):
            error = failure(asker.request_lease(engine, engine.handoff()))
            assert isinstance(error, IncompatiblePeerError)
            assert (error.field, error.ours) == ("dtype", "float16")
        assert engine.counts["refused_peer"] == 1  # it is not asked twice in a row
    finally:
        asker.channel.close()


@pytest.mark.values
@pytest.mark.parametrize("order", [("serving", "asking"), ("asking", "serving")])
@pytest.mark.parametrize("waits", [False, True], ids=["next", "waiting"])
def test_digests_that_come_after_the_handshake_break_nothing_where_they_are_equal(
    start_engine: StartEngine, asker: Asker, order: tuple[str, str], waits: bool
) -> None:
    """Whoever learns first, and whether a lease request waits meanwhile or comes later."""
    pending = threading.Event()
    engine = start_engine(on_tick=lambda: engine.server.has_pending and pending.set())
    if not waits:
        asker.request_lease(engine, engine.handoff()).result(LONG)
    handoff = engine.handoff(filled=False)
    channels = {"serving": engine.channel, "asking": asker.channel}
    future = asker.request_lease(engine, handoff) if waits else None
    assert not waits or pending.wait(LONG)
    for side in order:
        channels[side].learn(weight_files="f")
    engine.fill(handoff)
    engine.channel.recheck()
    lease = (future or asker.request_lease(engine, handoff)).result(LONG)
    assert lease.token == handoff.token
    assert "refused_peer" not in engine.counts


@pytest.mark.parametrize("order", [("serving", "asking"), ("asking", "serving")])
def test_digests_that_come_after_the_handshake_end_it_where_they_differ(
    start_engine: StartEngine, asker: Asker, order: tuple[str, str]
) -> None:
    engine = start_engine()
    lease = asker.request_lease(engine, engine.handoff()).result(LONG)
    digests = {"serving": (engine.channel, "f"), "asking": (asker.channel, "g")}
    for side in order:
        channel, digest = digests[side]
        channel.learn(weight_files=digest)
    # Each learns on its channel's thread, at once but not now.
    wait_until(lambda: asker.request_lease(engine, engine.handoff()).exception(LONG) is not None)
    error = failure(asker.request_lease(engine, engine.handoff()))
    assert isinstance(error, IncompatiblePeerError)
    assert (error.field, error.ours, error.theirs) == ("weight_files", "g", "f")
    assert engine.directory.usage()[2] >= 1, "the leases from before are still there"
    assert lease.token


def test_many_requests_at_once_are_all_answered(start_engine: StartEngine, asker: Asker) -> None:
    """More than ZeroMQ queues for a peer by default (1000), pending and answered in one go."""
    total = 3000
    pending = threading.Event()

    def tick() -> None:
        if len(engine.server._pending) == total:
            pending.set()

    engine = start_engine(on_tick=tick)
    # They are introduced before, as to send so many requests may take longer than that may.
    failure(ask(asker.channel, engine.address, b"?" * 16, engine.handshake_reply.epoch))
    handoff = engine.handoff(filled=False)
    futures = [asker.request_lease(engine, handoff) for _ in range(total)]
    assert pending.wait(LONG)
    engine.fill(handoff)
    engine.channel.recheck()
    done, missing = wait_all(futures, LONG)
    assert not missing
    assert all(future.result().token == handoff.token for future in done)


@pytest.mark.parametrize(
    ("rests", "port", "seconds"),
    [(False, False, TICK_S), (True, False, REST_S), (True, True, TICK_S)],
)
def test_a_channel_rests_while_its_engine_does_unless_a_port_is_open(
    start_engine: StartEngine, rests: bool, port: bool, seconds: float
) -> None:
    """A port has to be attended: its listener counts connections and bytes twice a second."""
    threads: list[ByHand] = []

    def start(*args: Any, **options: Any) -> ByHand:
        threads.append(ByHand(*args, **options))
        return threads[-1]

    key = ClusterKey(*zmq.curve_keypair())
    listens = {"listen_tcp": HostPort("127.0.0.1", 0), "key": key} if port else {}
    context = EngineContext(FakeClock(), start)
    engine = start_engine(rests=lambda: rests, context=context, **listens)
    [thread] = threads
    assert thread.turn() == seconds
    engine.channel.stir()
    assert thread.turn() == TICK_S


def test_a_peer_that_does_not_exist_is_unreachable_at_once(folder: Path, asker: Asker) -> None:
    address = f"ipc://{folder}/nobody.sock"
    error = failure(ask(asker.channel, address, b"t" * 16, b"e" * 16))
    assert isinstance(error, PeerUnreachableError)
    assert address in str(error)


def test_addresses_that_zeromq_refuses_are_unreachable(folder: Path, asker: Asker) -> None:
    too_long = folder / ("x" * 120)
    too_long.touch()
    for address in ("tcp://no-port", "nonsense", "", f"ipc://{too_long}"):
        error = failure(ask(asker.channel, address, b"t" * 16, b"e" * 16))
        assert isinstance(error, PeerUnreachableError)
        assert "cannot connect" in str(error)


def test_a_peer_that_is_killed_fails_its_lease_requests_and_nothing_else(
    folder: Path, compatibility: CompatibilityKey, start_engine: StartEngine, asker: Asker
) -> None:
    path = folder / "killed.sock"
    with start_peer(path, compatibility) as peer:
        try:
            assert peer.stdout is not None
            token = bytes.fromhex(peer.stdout.readline())
            pending = ask(asker.channel, f"ipc://{path}", token, b"k" * 16, timeout=600.0)
            assert peer.stdout.readline() == "pending\n"
            assert not pending.done()
        finally:
            os.kill(peer.pid, signal.SIGKILL)
    error = failure(pending)  # its own deadline is ten minutes away
    assert isinstance(error, PeerUnreachableError)
    assert "is gone" in str(error)
    assert asker.gone.wait(LONG)
    assert path.exists()  # a killed process leaves it

    asker.gone.clear()
    later = failure(ask(asker.channel, f"ipc://{path}", token, b"k" * 16, timeout=600.0))
    assert isinstance(later, PeerUnreachableError)
    assert asker.gone.wait(LONG)

    engine = start_engine()  # and the channel lives on
    assert asker.request_lease(engine, engine.handoff()).result(LONG)


def test_a_peer_that_restarts_at_its_address_is_found_again(
    start_engine: StartEngine, asker: Asker
) -> None:
    first = start_engine()
    assert asker.request_lease(first, first.handoff()).result(LONG)
    first.channel.close()
    assert asker.gone.wait(LONG)
    second = start_engine(epoch=b"2" * 16)
    lease = asker.request_lease(second, second.handoff()).result(LONG)
    assert lease.handshake_reply.epoch == b"2" * 16
    stale = failure(ask(asker.channel, second.address, b"t" * 16, first.handshake_reply.epoch))
    assert isinstance(stale, LeaseDeniedError)
    assert stale.reason == "other_epoch"


def test_the_socket_of_a_killed_engine_is_taken_over(
    folder: Path, compatibility: CompatibilityKey, start_engine: StartEngine, asker: Asker
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "p.sock"))
        dead.listen()
    engine = start_engine("p.sock")
    assert asker.request_lease(engine, engine.handoff()).result(LONG)


def test_a_second_engine_of_the_same_name_is_refused(
    start_engine: StartEngine, asker: Asker
) -> None:
    engine = start_engine()
    with pytest.raises(TransportError, match=r"another engine listens at .*engine_id"):
        start_engine()
    assert asker.request_lease(engine, engine.handoff()).result(LONG)


def test_a_socket_accepts_before_it_can_be_seen(
    folder: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    seen = []

    def renamed(source: Path, target: Path) -> None:
        assert not target.exists()
        with socket.socket(socket.AF_UNIX) as probe:
            seen.append(probe.connect_ex(str(source)))
        rename(source, target)

    monkeypatch.setattr(control_sockets.os, "rename", renamed)
    engine = start_engine()
    assert seen == [0]
    assert [entry.name for entry in folder.iterdir()] == [engine.path.name]


def test_a_strangers_frames_do_not_stop_the_server(start_engine: StartEngine, asker: Asker) -> None:
    engine = start_engine()
    malformed = [b"", b"garbage", b"\x81\xa4type\xa5\xff\xff\xff\xff\xff", b"\xff" * 100_000]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(engine.address)
        stranger.send_multipart([b"in", b"several", b"parts"])
        for frame in malformed:
            stranger.send(frame)
        for _ in malformed:
            assert engine.counted.get(timeout=LONG) == "malformed_message"
        assert asker.request_lease(engine, engine.handoff()).result(LONG)
        with stranger.get_monitor_socket(zmq.Event.DISCONNECTED) as monitor:
            stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
            assert monitor.poll(LONG * 1000), "an oversized message ends the connection"
            stranger.disable_monitor()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(engine.path))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        raw.settimeout(LONG)
        while raw.recv(4096):  # until the server hangs up
            pass
    assert asker.request_lease(engine, engine.handoff()).result(LONG)
    assert inspection.channel_runs(engine.channel)


def test_with_its_channel_lease_requests_fail_and_the_rest_is_ignored(
    start_engine: StartEngine, compatibility: CompatibilityKey
) -> None:
    engine = start_engine()
    channel = ControlChannel(compatibility=compatibility)
    token = engine.handoff().token
    lease = ask(channel, engine.address, token, engine.handshake_reply.epoch).result(LONG)
    pending = ask(
        channel, engine.address, engine.handoff(filled=False).token, engine.handshake_reply.epoch
    )
    channel.close()
    future = ask(channel, engine.address, token, engine.handshake_reply.epoch)
    assert future.done()
    for each in (pending, future):
        assert isinstance(failure(each), PeerUnreachableError)
        assert "closed" in str(failure(each))
    channel.release(lease)
    channel.drop(engine.address, token)
    engine.channel.close()
    engine.channel.recheck()
    cancelled = ask(channel, engine.address, token, engine.handshake_reply.epoch)
    assert not cancelled.cancel()


def test_every_lease_request_made_while_the_channel_closes_is_answered(
    folder: Path, compatibility: CompatibilityKey
) -> None:
    address = f"ipc://{folder}/nobody.sock"

    def ask_on(channel: ControlChannel, closed: threading.Event) -> list[Future[Lease]]:
        futures = []
        while not closed.is_set():
            futures.append(ask(channel, address, b"t" * 16, b"e" * 16))
            asked.release()
        return [*futures, ask(channel, address, b"t" * 16, b"e" * 16)]

    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            asked, closed = threading.Semaphore(0), threading.Event()
            channel = ControlChannel(compatibility=compatibility)
            asking = [threads.submit(ask_on, channel, closed) for _ in range(2)]
            assert asked.acquire(timeout=LONG)
            channel.close()
            closed.set()
            for each in asking:
                for future in each.result(LONG):
                    assert isinstance(failure(future), PeerUnreachableError)


def test_a_callback_that_fails_does_not_end_the_channel(
    start_engine: StartEngine, compatibility: CompatibilityKey, folder: Path
) -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fail(name: str) -> None:
        calls.put(name)
        raise RuntimeError(name)

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "dead.sock"))
    channel = ControlChannel(
        compatibility=compatibility,
        on_tick=lambda: fail("tick"),
        on_peer_gone=lambda: fail("gone"),
    )
    try:
        assert calls.get(timeout=LONG) == "tick"
        failure(ask(channel, f"ipc://{folder}/dead.sock", b"t" * 16, b"e" * 16))
        while calls.get(timeout=LONG) != "gone":
            pass
        engine = start_engine()
        token = engine.handoff().token
        assert ask(channel, engine.address, token, engine.handshake_reply.epoch).result(LONG)
    finally:
        channel.close()


def test_a_channel_that_breaks_fails_its_lease_requests_instead_of_losing_them(
    start_engine: StartEngine,
    asker: Asker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start_engine()

    def forget(*_: object) -> Any:
        raise RuntimeError("a bug")

    future = asker.request_lease(engine, engine.handoff(filled=False))
    assert engine.channel.alive
    monkeypatch.setattr(engine.channel, "_forget_failed", forget)
    assert isinstance(failure(future), PeerUnreachableError)
    engine.channel._thread.join(LONG)
    assert not engine.channel.alive
    assert not engine.path.exists()
    assert "a bug" in caplog.text
    own = ask(engine.channel, engine.address, b"t" * 16, b"e" * 16)
    assert "closed" in str(failure(own))
    engine.channel.close()


def test_an_answer_that_cannot_be_handled_fails_that_peer_only(
    start_engine: StartEngine, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = start_engine("one.sock"), start_engine("two.sock", epoch=b"2" * 16)
    receive = PeerSession.receive

    def fail(session: PeerSession, frame: bytes) -> Any:
        assert session.address != one.address
        return receive(session, frame)

    monkeypatch.setattr(PeerSession, "receive", fail)
    assert isinstance(failure(asker.request_lease(one, one.handoff())), ProtocolError)
    assert isinstance(
        failure(asker.request_lease(one, one.handoff())), ProtocolError
    )  # is not asked
    assert asker.request_lease(two, two.handoff()).result(LONG)
    assert asker.channel.alive


def test_a_folder_that_is_gone_is_an_error_at_start(
    folder: Path, start_engine: StartEngine
) -> None:
    with pytest.raises(TransportError, match="runtime folder"):
        start_engine("missing/p.sock")


def test_the_peer_that_was_idle_longest_makes_room(
    start_engine: StartEngine, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_connector.handoff.channel.MAX_PEERS", 2)
    engines = [start_engine(f"{n}.sock", epoch=bytes([n]) * 16) for n in range(3)]
    for engine in engines:
        lease = asker.request_lease(engine, engine.handoff()).result(LONG)
        asker.channel.release(lease)
        assert engine.directory.closed.get(timeout=LONG) == lease.token
    assert inspection.engines_asked(asker.channel) == [engine.address for engine in engines[1:]]
    # One that is in use stays, and with it the way for its release.
    kept = asker.request_lease(engines[1], engines[1].handoff()).result(LONG)
    pending = asker.request_lease(engines[2], engines[2].handoff(filled=False))
    error = failure(asker.request_lease(engines[0], engines[0].handoff()))
    assert "2 engines are being talked to already" in str(error)
    asker.channel.release(kept)
    assert engines[1].directory.closed.get(timeout=LONG) == kept.token
    assert asker.request_lease(engines[0], engines[0].handoff()).result(LONG)
    assert not pending.done()
