# SPDX-License-Identifier: Apache-2.0
"""`ZmqPoller`: which sockets can be read, and that no wait misses a message."""

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.errors import TransportError
from omni_connector.net.links import ZmqPoller
from omni_connector.net.zeromq import Context, Socket
from omni_connector.runtime.turns import WOKEN
from tests.descriptors import spare
from tests.patience import wait_until

LONG = 60.0  # a deadline that only a hang reaches
PAIRS = 4

operations = st.lists(
    st.tuples(st.sampled_from(["receive", "send", "read", "wait"]), st.integers(0, PAIRS - 1)),
    max_size=60,
)


class Pairs:
    """Sockets of a poller, and their other ends. What is sent in a process arrives at once."""

    def __init__(self, context: Context) -> None:
        self.poller = ZmqPoller()
        self.ours: list[Socket] = []
        self.theirs: list[Socket] = []
        for number in range(PAIRS):
            for ends in (self.ours, self.theirs):
                socket = context.socket(zmq.PAIR)
                socket.setsockopt(zmq.LINGER, 0)
                ends.append(socket)
            self.ours[-1].bind(f"inproc://{number}")
            self.theirs[-1].connect(f"inproc://{number}")
            self.poller.register(self.ours[-1])

    def close(self) -> None:
        for socket in self.ours:
            self.poller.unregister(socket)
        for socket in self.ours + self.theirs:
            socket.close(0)
        self.poller.close()


@contextmanager
def opened() -> Iterator[Pairs]:
    context: Context = zmq.Context()
    pairs = Pairs(context)
    try:
        yield pairs
    finally:
        pairs.close()
        context.destroy(0)


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    with opened() as found:
        yield found


@given(operations)
def test_what_has_a_message_can_be_read_and_nothing_else(steps: list[tuple[str, int]]) -> None:
    with opened() as pairs:
        unread = [0] * PAIRS
        for operation, number in steps:
            socket = pairs.ours[number]
            if operation == "receive":
                pairs.theirs[number].send(b"news")
                unread[number] += 1
            elif operation == "send":
                pairs.poller.used(socket)
                socket.send(b"other news")
            elif operation == "read":
                if unread[number]:
                    socket.recv(zmq.NOBLOCK)
                    unread[number] -= 1
                pairs.poller.used(socket)
            else:
                pairs.poller.wait(0)
            if operation != "receive":  # sometimes several arrive between two looks
                there = {each for each, n in zip(pairs.ours, unread, strict=True) if n}
                assert set(pairs.poller.ready()) == there


def swallow_news(socket: Socket) -> None:
    """Send until libzmq has taken the news of the socket, of which its descriptor told."""
    poll = select.poll()
    poll.register(socket.getsockopt(zmq.FD), select.POLLIN)

    def taken() -> bool:
        if not poll.poll(0):
            return True
        socket.send(b"x")  # libzmq looks for news once in some milliseconds at most
        return False

    wait_until(taken)


def test_a_message_that_came_before_a_send_is_noticed_after_it(pairs: Pairs) -> None:
    assert not pairs.poller.ready()
    socket = pairs.ours[0]
    pairs.theirs[0].send(b"news")
    swallow_news(socket)
    assert not pairs.poller.ready(), "or the descriptor would tell of news that were taken"
    pairs.poller.used(socket)
    pairs.poller.wait(WOKEN)
    assert list(pairs.poller.ready()) == [socket]


def test_a_message_ends_a_wait(pairs: Pairs) -> None:
    assert not pairs.poller.ready()
    ended = threading.Event()

    def wait() -> None:
        pairs.poller.wait(WOKEN)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    pairs.theirs[2].send(b"news")
    assert ended.wait(LONG)
    thread.join(LONG)
    assert list(pairs.poller.ready()) == [pairs.ours[2]]


def test_a_wake_ends_one_wait(pairs: Pairs) -> None:
    pairs.poller.wake()
    pairs.poller.wait(WOKEN)
    assert not pairs.poller.ready()


def test_a_socket_is_waited_for_no_more(pairs: Pairs) -> None:
    socket = pairs.ours.pop(1)
    pairs.theirs[1].send(b"news")
    pairs.poller.unregister(socket)
    pairs.poller.unregister(socket)
    assert not pairs.poller.ready()
    socket.close(0)


def test_without_descriptors_there_is_no_poller_and_nothing_is_left() -> None:
    for count in (0, 1):
        with spare(count):
            for _ in range(3):
                with pytest.raises(TransportError, match="cannot wait for sockets"):
                    ZmqPoller()
    ZmqPoller().close()
