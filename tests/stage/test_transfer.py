# SPDX-License-Identifier: Apache-2.0
"""KV from one process to another over shared memory, and what becomes of it when they die."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ..patience import PATIENCE_S
from .caches import sequence
from .connectors import send
from .forks import Forked


def _read(process: Forked) -> Any:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def _order(process: Forked, **order: Any) -> None:
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()


def _do(process: Forked, **order: Any) -> Any:
    _order(process, **order)
    return _read(process)


@pytest.fixture
def peer(spawn):
    """Starts a `peer`, ready."""

    def start() -> Forked:
        process = spawn("peer")
        assert _read(process) == "ready"
        return process

    return start


def _key(seed: int) -> list:
    return sequence(seed=seed).key.tolist()


def _received(kv, request_id: str, timeout: float = 60.0) -> list | None:
    kv.config.recv_timeout = timeout
    data, _ = kv.receive_kv_cache_for_request(request_id)
    return data and data["layer_blocks"]["key_cache"][0].tolist()


def test_a_sender_that_dies_takes_its_objects_along_and_leaves_nothing(peer, shared, place) -> None:
    sender, receiver = peer(), shared()
    assert _do(sender, send="a", seed=1) is True
    assert _do(sender, send="b", seed=2) is True
    assert _received(receiver, "a") == _key(1)
    assert "/dev/shm/" not in Path(f"/proc/{sender.pid}/maps").read_text()
    sender.kill()
    sender.wait()
    assert _received(receiver, "b", timeout=0.5) is None
    # The same stage starts again and sends the same again.
    again = peer()
    assert _do(again, send="b", seed=3) is True
    assert _received(receiver, "b") == _key(3)
    # Of the dead one not even its socket is left.
    assert len([path for path in place.rglob("o[0-9]*-*") if path.is_socket()]) == 1


def test_a_receiver_that_dies_waiting_is_nobodys_loss(peer, shared) -> None:
    receiver, sender = peer(), shared()
    _order(receiver, receive="r", timeout=60)
    time.sleep(0.2)
    receiver.kill()
    receiver.wait()
    assert send(sender, sequence(seed=1))
    after = peer()
    assert _do(after, receive="r", timeout=60)["key"] == _key(1)
    after.kill()
    after.wait()
    assert _received(shared(), "r") == _key(1)


def test_several_receivers_get_it_and_each_of_them_once(peer, shared) -> None:
    sender, here, last = shared(), shared(), shared()
    there = peer()
    _order(there, receive="r", timeout=60)
    assert send(sender, sequence(seed=1))
    assert _read(there)["key"] == _key(1)
    assert _received(here, "r") == _key(1)
    # A receiver that ends takes nothing along.
    there.stdin.close()
    assert there.wait(timeout=60) == 0
    assert _received(last, "r") == _key(1)
    # As another request of the same id, whose own KV is not there yet, and then is.
    assert _received(here, "r", timeout=0.1) is None
    assert send(sender, sequence(seed=2))
    assert _received(here, "r") == _key(2)
    sender.cleanup("r")
    assert _received(last, "r", timeout=0.1) is None


def test_a_full_arena_refuses_what_comes_and_drops_nothing(shared) -> None:
    sender = shared(extra={"object_gib": 8 / 1024})
    receiver = shared()
    big = sequence(4096, heads=2, dim=32, block_size=16, num_blocks=256)
    sent = []
    for number in range(12):
        if not send(sender, big, f"r{number}"):
            break
        sent.append(f"r{number}")
    assert 1 <= len(sent) < 12
    assert list(sender.last_failures) == [f"r{len(sent)}"]
    for request_id in sent:
        assert _received(receiver, request_id) == big.key.tolist()
    assert _received(receiver, f"r{len(sent)}", timeout=0.1) is None
    sender.cleanup("r0")
    assert send(sender, big, "next")
    assert _received(receiver, "next") == big.key.tolist()


def test_closing_ends_what_waits_and_what_begins_later(shared) -> None:
    receiver = shared(recv_timeout=3600.0)  # who polls hangs
    got = []
    thread = threading.Thread(
        target=lambda: got.append(receiver.receive_kv_cache_for_request("never")), daemon=True
    )
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    receiver.close()
    thread.join(PATIENCE_S)
    assert got == [(None, 0)]
    assert receiver.receive_kv_cache_for_request("never") == (None, 0)
    assert receiver.connector is None
    assert not send(receiver, sequence(seed=1))
    assert receiver.last_failures == {"r": "TransportError: the transfer manager is closed"}
