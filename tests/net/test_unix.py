# SPDX-License-Identifier: Apache-2.0
"""Hostile and broken peers, on both sides of the socket."""

import array
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.errors import (
    IncompatiblePeerError,
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.net import unix
from omni_connector.net.packets import MAX_MESSAGE_BYTES, PROTOCOL, Refusal, require_protocol
from omni_connector.net.runtime import listen, socket_path
from omni_connector.net.unix import Connection, Listener
from tests.patience import wait_until

from ..descriptors import spare

SOON_S = 20.0


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question, answered with `Yes`."""

    name: bytes
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """A question, answered with `Beside` and a descriptor."""

    name: bytes


class Note(msgspec.Struct, frozen=True, tag="note"):
    """What has no answer."""

    number: int


class Yes(msgspec.Struct, frozen=True, tag="yes"):
    """An answer."""


class Beside(msgspec.Struct, frozen=True, tag="beside"):
    """An answer with a descriptor beside it."""

    size: int


QUESTIONS: msgspec.msgpack.Decoder[Ask | Fetch | Note] = msgspec.msgpack.Decoder(Ask | Fetch | Note)
ANY: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(Beside | Yes | Refusal)
ANSWERS: msgspec.msgpack.Decoder[Yes | Refusal] = msgspec.msgpack.Decoder(Yes | Refusal)
BESIDE: msgspec.msgpack.Decoder[Beside | Refusal] = msgspec.msgpack.Decoder(Beside | Refusal)


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for_closed(before: int) -> None:
    """Wait until no more descriptors are open than before: threads close theirs."""
    wait_until(lambda: open_fds() <= before)


@pytest.fixture
def path(place: Path) -> Path:
    return socket_path(place, "peer", kind="a-")


def agree(question: object) -> tuple[msgspec.Struct | None, int | None]:
    """Answers questions, and nothing to notes."""
    return (None if isinstance(question, Note) else Yes()), None


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    listener = Listener(QUESTIONS, agree)
    listener.add(path)
    yield listener
    listener.close()


def answers_with(
    path: Path, packet: bytes, descriptors: list[int] | None = None
) -> threading.Thread:
    """A peer that answers its first question with this packet."""
    listening = listen(path)

    def serve() -> None:
        with listening:
            listening.settimeout(SOON_S)
            connection, _ = listening.accept()
            with connection:
                connection.recv(MAX_MESSAGE_BYTES)
                rights = array.array("i", descriptors or [])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
                connection.sendmsg([packet], ancillary)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def speak(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(SOON_S)
    client.connect(str(path))
    return client


# The asking side


@pytest.mark.parametrize(
    ("packet", "error"),
    [
        (b"", PeerUnreachableError),
        (b"\xc1", ProtocolError),
        (b"x" * 1000, ProtocolError),
        (b"\x81\xa4type\xa4nope", ProtocolError),
        (b"\x91" * 60_000, ProtocolError),
        (b"\x81\xa4type\xa3\xff\xff\xff", ProtocolError),
        (msgspec.msgpack.encode({"type": "beside"}), ProtocolError),
        (msgspec.msgpack.encode({"type": "beside", "size": "1"}), ProtocolError),
        (msgspec.msgpack.encode(Refusal("no")), PeerRefusedError),
        (msgspec.msgpack.encode(Refusal("no", protocol=9)), IncompatiblePeerError),
        (msgspec.msgpack.encode(Refusal("x" * 70_000)), ProtocolError),
        (msgspec.msgpack.encode(Beside(4096)), ProtocolError),  # without a memfd
    ],
)
def test_bad_answers_are_refused(path: Path, packet: bytes, error: type[OmniError]) -> None:
    before = open_fds()
    server = answers_with(path, packet)
    connection = Connection(path, deadline())
    with pytest.raises(error) as told:
        connection.ask(Fetch(b"e"), BESIDE, deadline(), with_fd=True)
    assert "more than 65536 bytes" in str(told.value) or len(packet) <= MAX_MESSAGE_BYTES
    # It must not be used again: the next answer could be the last question's.
    assert not connection.alive
    with pytest.raises(PeerUnreachableError):
        connection.ask(Ask(b"d"), ANSWERS, deadline())
    server.join()
    wait_for_closed(before)


@pytest.mark.values
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("packet", "with_fd"),
    [
        (msgspec.msgpack.encode(Yes()), True),
        (msgspec.msgpack.encode(Refusal("no")), True),
        (b"\xc1", True),
        (b"x" * 70_000, True),
        (msgspec.msgpack.encode(Beside(4096)), False),
    ],
)
def test_descriptors_that_come_unasked_do_not_stay(
    path: Path, packet: bytes, with_fd: bool, count: int
) -> None:
    before = open_fds()
    server = answers_with(path, packet, [0] * count)
    connection = Connection(path, deadline())
    with contextlib.suppress(ProtocolError, PeerRefusedError):
        connection.ask(Fetch(b"e"), BESIDE if with_fd else ANY, deadline(), with_fd=with_fd)
    connection.close()
    server.join()
    wait_for_closed(before)


def test_more_descriptors_than_one_are_refused(path: Path) -> None:
    before = open_fds()
    server = answers_with(path, msgspec.msgpack.encode(Beside(4096)), [0, 1])
    connection = Connection(path, deadline())
    with pytest.raises(ProtocolError, match="2 descriptors"):
        connection.ask(Fetch(b"e"), BESIDE, deadline(), with_fd=True)
    server.join()
    wait_for_closed(before)


def test_received_descriptor_is_not_inherited(path: Path) -> None:
    server = answers_with(path, msgspec.msgpack.encode(Beside(4096)), [0])
    connection = Connection(path, deadline())
    _, descriptor = connection.ask(Fetch(b"e"), BESIDE, deadline(), with_fd=True)
    assert descriptor is not None
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    connection.close()
    server.join()


def test_silent_peer_is_given_up(path: Path) -> None:
    with listen(path):
        with pytest.raises(PeerUnreachableError):
            Connection(path, deadline(-1))
        connection = Connection(path, deadline())
        with pytest.raises(PeerUnreachableError):
            connection.ask(Ask(b"d"), ANSWERS, deadline(0.05))
        assert not connection.alive
        with pytest.raises(PeerUnreachableError):
            connection.ask(Ask(b"d"), ANSWERS, deadline())


def test_peer_that_never_accepts_is_given_up(path: Path) -> None:
    with listen(path, backlog=0), speak(path), pytest.raises(PeerUnreachableError):
        Connection(path, deadline(0.05))


def test_busy_peer_is_waited_for(path: Path) -> None:
    with listen(path, backlog=0) as listening, speak(path):
        later = threading.Timer(0.05, lambda: listening.accept()[0].close())
        later.start()
        Connection(path, deadline()).close()
        later.join()


def test_nobody_there(path: Path) -> None:
    with pytest.raises(PeerUnreachableError):
        Connection(path, deadline())
    listen(path).close()
    with pytest.raises(PeerUnreachableError, match="refused"):
        Connection(path, deadline())


def test_socket_of_another_kind_is_refused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(path))
        stream.listen()
        with pytest.raises(PeerRefusedError):
            Connection(path, deadline())


def test_peer_of_another_user_is_refused_before_a_byte_is_sent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    monkeypatch.setattr(unix, "peer_uid", lambda connection: os.geteuid() + 1)
    with listen(path) as listening:
        with pytest.raises(PeerRefusedError, match="belongs to user"):
            Connection(path, deadline())
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(1) == b""
    wait_for_closed(before)


def test_addresses_that_are_no_engine_are_not_talked_to(place: Path) -> None:
    loose = place / "loose"
    loose.mkdir()
    loose.chmod(0o755)
    name = socket_path(place, "x", kind="a-").name
    (place / "link").symlink_to(place)
    for address in (
        place / "docker.sock",
        place / "a-00.sock",
        place / (name + "x"),
        Path(name),
        loose / name,
        place / "link" / name,
        Path("/run") / name,
    ):
        with pytest.raises(PeerRefusedError):
            Connection(address, deadline())
    with pytest.raises(PeerUnreachableError):
        Connection(place / "gone" / name, deadline())


# The answering side

OTHER_PROTOCOL = {"type": "ask", "name": b"d", "protocol": PROTOCOL + 1}


def test_questions_are_answered(path: Path, listener: Listener) -> None:
    connection = Connection(path, deadline())
    for _ in range(3):
        assert connection.ask(Ask(b"d"), ANSWERS, deadline()) == (Yes(), None)
    assert connection.alive
    connection.close()
    connection.close()
    assert not connection.alive


@pytest.mark.parametrize(
    ("packet", "said"),
    [
        (b"\xc1", ""),
        (b"x" * MAX_MESSAGE_BYTES, ""),
        (b"\x91" * 60_000, ""),
        ({"type": "yes"}, ""),
        ({"type": "ask"}, ""),
        ({"type": "ask", "name": 5}, ""),
        ({"type": "ask", "name": "text"}, ""),
        (OTHER_PROTOCOL, f"protocol {PROTOCOL + 1}, wanted {PROTOCOL}"),
        ({"type": "note"}, ""),
        ({"type": "note", "number": "1"}, ""),
        (b"x" * (MAX_MESSAGE_BYTES + 1), "more than 65536 bytes"),
    ],
)
def test_bad_questions_are_refused_and_others_served(
    path: Path, listener: Listener, packet: bytes | dict[str, object], said: str
) -> None:
    packet = packet if isinstance(packet, bytes) else msgspec.msgpack.encode(packet)
    with speak(path) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        client.send(packet)
        answer = msgspec.msgpack.decode(client.recv(MAX_MESSAGE_BYTES), type=Refusal)
        assert said in answer.reason
        assert client.recv(1) == b""
    connection = Connection(path, deadline())
    assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
    connection.close()


def test_clients_descriptors_are_dropped(path: Path, listener: Listener) -> None:
    with speak(path) as client:
        client.send(msgspec.msgpack.encode(Ask(b"d")))
        assert client.recv(MAX_MESSAGE_BYTES)
        before = open_fds()
        for _ in range(5):
            socket.send_fds(client, [msgspec.msgpack.encode(Ask(b"d"))], [0, 1, 2])
            assert client.recv(MAX_MESSAGE_BYTES)
        wait_for_closed(before)


def test_refused_clients_are_logged_once(
    path: Path,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unix, "peer_uid", lambda connection: os.geteuid() + 1)
    for _ in range(3):
        with speak(path) as client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.send(msgspec.msgpack.encode(Ask(b"d")))
            assert client.recv(MAX_MESSAGE_BYTES) == b""
    assert listener.alive
    assert len([each for each in caplog.messages if "Refused a peer" in each]) == 1


def test_clients_that_cannot_be_accepted_are_logged_once(
    path: Path, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(SOON_S)
        with spare(0):
            client.connect(str(path))
            waited = listener._stopped.wait
            waits = iter(range(3))
            tried = threading.Event()

            def wait(seconds: float) -> bool:
                if next(waits, None) is None:
                    tried.set()
                return waited(seconds)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(listener._stopped, "wait", wait)
                assert tried.wait(SOON_S)
        assert [each for each in caplog.messages if "Cannot accept" in each] == [
            "Cannot accept a peer: [Errno 24] Too many open files; raise `ulimit -n`"
        ]
        client.send(msgspec.msgpack.encode(Ask(b"d")))
        assert client.recv(MAX_MESSAGE_BYTES) == msgspec.msgpack.encode(Yes())


def test_clients_beyond_the_limit_are_hung_up_on(
    path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "MAX_CONNECTIONS", 2)
    kept = [Connection(path, deadline()) for _ in range(2)]
    for each in kept:
        each.ask(Ask(b"d"), ANSWERS, deadline())
    with pytest.raises(PeerUnreachableError):
        Connection(path, deadline()).ask(Ask(b"d"), ANSWERS, deadline())
    kept.pop().close()

    def served() -> bool:
        kept.append(Connection(path, deadline()))
        try:
            kept[-1].ask(Ask(b"d"), ANSWERS, deadline())
        except PeerUnreachableError:  # our end is closed, but the listener has yet to see it
            return False
        return True

    wait_until(served)
    for each in kept:
        each.close()


@pytest.mark.parametrize(
    "packet",
    [b"\x01", msgspec.msgpack.encode(OTHER_PROTOCOL), b"x" * 70_000],
    ids=["undecodable", "other version", "too long"],
)
def test_a_client_whose_message_is_refused_and_that_has_hung_up_ends_nothing(
    path: Path, listener: Listener, packet: bytes
) -> None:
    """The refusal finds nobody. What was forgotten with that is not forgotten again."""
    connection = Connection(path, deadline())
    assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
    for _ in range(20):
        with speak(path) as client:
            client.send(packet)
    listener.catch_up(SOON_S)
    assert listener.alive
    assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
    connection.close()


@pytest.mark.parametrize("fails", ["peer_uid", "receive", "_encoder"])
def test_whatever_fails_for_a_client_hangs_up_on_that_one_alone(
    path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """As if there were a mistake in the code."""
    connection = Connection(path, deadline())
    assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
    others = threading.get_ident()
    encodes = fails == "_encoder"
    real = unix._encoder.encode if encodes else getattr(unix, fails)

    def broken(*args: object, **named: object) -> object:
        if threading.get_ident() == others:
            return real(*args, **named)
        raise LookupError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(unix, fails, SimpleNamespace(encode=broken) if encodes else broken)
        with pytest.raises(PeerUnreachableError) as told:
            Connection(path, deadline()).ask(Ask(b"d"), ANSWERS, deadline())
        assert not isinstance(told.value.__cause__, TimeoutError)
    assert listener.alive
    assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
    connection.close()


def test_client_that_never_reads_blocks_nobody(path: Path, listener: Listener) -> None:
    with speak(path) as deaf:
        deaf.setblocking(False)
        question = msgspec.msgpack.encode(Ask(b"d"))
        asked = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while asked < 1_000_000:
                deaf.send(question)
                asked += 1
        assert asked < 1_000_000
        connection = Connection(path, deadline())
        assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
        connection.close()


def test_notes_are_taken_in_order_and_not_answered(path: Path) -> None:
    noted: list[int] = []

    def answer(question: object) -> tuple[msgspec.Struct | None, int | None]:
        if isinstance(question, Note):
            noted.append(question.number)
            return None, None
        return Yes(), None

    listener = Listener(QUESTIONS, answer)
    listener.add(path)
    connection = Connection(path, deadline())
    for i in range(200):
        while not connection.tell(Note(i)):
            time.sleep(0.001)
    assert connection.ask(Ask(b"d"), ANSWERS, deadline()) == (Yes(), None)
    assert noted == list(range(200))
    assert connection.tell(Note(200))
    listener.catch_up(SOON_S)
    assert noted[-1] == 200
    connection.close()
    assert not connection.tell(Note(201))
    listener.close()
    listener.catch_up(1e6)  # ends, as there is nothing to wait for


def test_an_answer_that_fails_is_refused_and_the_next_question_is_answered(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(unix.logger, "exception", lambda *text: told.append(text))
    left = iter([{}, {0: Yes()}])
    listener = Listener(QUESTIONS, lambda _: (next(left)[0], None))
    listener.add(path)
    connection = Connection(path, deadline())
    with pytest.raises(PeerRefusedError, match="failed"):
        connection.ask(Ask(b"d"), ANSWERS, deadline())
    connection = Connection(path, deadline())
    assert connection.ask(Ask(b"d"), ANSWERS, deadline()) == (Yes(), None)
    assert len(told) == 1
    connection.close()
    listener.close()


def test_note_to_a_peer_that_takes_none_does_not_wait(path: Path) -> None:
    with listen(path):
        connection = Connection(path, deadline())
        told = 0
        while connection.tell(Note(told)):
            told += 1
        assert 0 < told < 100_000
        connection.close()


def test_peer_that_sends_notes_without_end_blocks_nobody(path: Path, listener: Listener) -> None:
    stop = threading.Event()
    noisy = Connection(path, deadline())

    def flood() -> None:
        while not stop.is_set():
            noisy.tell(Note(1))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        connection = Connection(path, deadline())
        assert connection.ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
        connection.close()
    finally:
        stop.set()
        thread.join()
        noisy.close()


def test_clients_that_vanish_leave_no_descriptor(path: Path, listener: Listener) -> None:
    connection = Connection(path, deadline())
    connection.ask(Ask(b"d"), ANSWERS, deadline())
    before = open_fds()
    for i in range(30):
        client = speak(path)
        if i % 2:
            client.send(msgspec.msgpack.encode(Ask(b"d")))
        client.close()

    def closed() -> bool:
        connection.ask(Ask(b"d"), ANSWERS, deadline())
        return open_fds() <= before

    wait_until(closed)
    connection.close()


def test_sent_descriptor_is_closed_here(path: Path, place: Path) -> None:
    with Arena.create(1, 4096) as arena:
        listener = Listener(QUESTIONS, lambda question: (Beside(4096), os.dup(arena.fd)))
        listener.add(path)
        connection = Connection(path, deadline())
        before = open_fds()
        for _ in range(10):
            _, descriptor = connection.ask(Fetch(b"e"), BESIDE, deadline(), with_fd=True)
            assert descriptor is not None
            os.close(descriptor)
        connection.close()
        listener.close()
        wait_for_closed(before - 1)


def test_close_removes_sockets_and_hangs_up(path: Path, place: Path) -> None:
    before = open_fds()
    listener = Listener(QUESTIONS, agree)
    other = socket_path(place, "other", kind="a-")
    listener.add(path)
    listener.add(other)
    connection = Connection(path, deadline())
    connection.ask(Ask(b"d"), ANSWERS, deadline())
    waiting = speak(other)
    threads = [threading.Thread(target=listener.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert os.listdir(place) == []
    assert not listener.alive
    assert not connection.alive
    with pytest.raises(TransportError, match="closed"):
        listener.add(path)
    assert os.listdir(place) == []
    connection.close()
    waiting.close()
    wait_for_closed(before)


def test_removed_socket_answers_no_more_but_its_clients_stay(
    path: Path, place: Path, listener: Listener
) -> None:
    connection = Connection(path, deadline())
    listener.remove(path)
    listener.remove(path)
    assert os.listdir(place) == []
    listener.add(path)
    assert Connection(path, deadline()).ask(Ask(b"d"), ANSWERS, deadline())[0] == Yes()
    connection.close()


def test_socket_that_another_process_put_there_is_left_alone(
    path: Path, place: Path, listener: Listener
) -> None:
    path.unlink()
    with listen(path):
        listener.remove(path)
        assert os.listdir(place) == [path.name]


@pytest.mark.parametrize("folder", ["/a\0b", "/a\nb", "/tmp/\x1b[2J", "/\ud800"])
def test_address_that_no_folder_of_ours_can_have_is_refused(folder: str) -> None:
    address = Path(f"{folder}/a-0123456789abcdef01234567.sock")
    with pytest.raises(PeerRefusedError, match="is not the address") as refused:
        Connection(address, time.monotonic() + SOON_S)
    assert str(refused.value).isprintable()  # it goes to the log
