# SPDX-License-Identifier: Apache-2.0
"""KV from one process to another over shared memory, and what becomes of it when they die."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.stage.extract import KVLayout
from omni_connector.testing import FakeClock

from ..patience import PATIENCE_S
from .caches import cache_of, sequence
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


def test_ar_to_diffusion_transfer(spawn, shared, tmp_path: Path) -> None:
    layers = [
        sequence(37, heads=2, dim=32, block_size=16, num_blocks=9, dtype=torch.bfloat16, seed=seed)
        for seed in range(3)
    ]
    # One block table for all layers, as an engine has.
    layers = [type(each)(each.key, each.value, layers[0].block_ids, 16, 9) for each in layers]
    itself, other = tmp_path / "itself.npz", tmp_path / "other.npz"
    keys, values = (
        np.stack([part.float().numpy() for part in parts])
        for parts in zip(*((each.key, each.value) for each in layers), strict=True)
    )
    np.savez(itself, key_cache=keys, value_cache=values)
    np.savez(other, key_cache=keys, value_cache=values[::-1])

    # The next stage waits already when this one has finished.
    stages = [spawn("diffusion", "req/1", file) for file in (itself, other)]
    assert [_read(stage) for stage in stages] == ["ready"] * 2
    sender = shared(need_recv_cache=False)
    caches = [cache_of(each, KVLayout.PACKED) for each in layers]
    finished = {"req/1": {"block_ids": layers[0].block_ids, "seq_len": 37}}
    sender.handle_finished_requests_kv_transfer(finished, caches, 16, "bfloat16")
    assert not sender.last_failures

    same, different = (_read(stage) for stage in stages)
    assert (same["received"], same["seq_len"], same["dtype"]) == (True, 37, "torch.bfloat16")
    assert same["output"] == same["itself"]
    # The comparison can fail: values in other layers give other latents.
    assert different["output"] == same["output"]
    assert different["output"] != different["itself"]


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


def test_what_is_never_sent_is_none_by_the_deadline(shared) -> None:
    receiver = shared()
    for timeout in (0.0, 0.3):
        start = time.monotonic()
        assert _received(receiver, "never", timeout) is None
        assert time.monotonic() - start >= timeout


def test_sent_again_the_newest_is_received_wherever_it_was_sent(peer, shared) -> None:
    first, second, receiver = peer(), shared(), shared()
    assert _do(first, send="r", seed=1) is True
    assert _received(receiver, "r") == _key(1)
    assert send(second, sequence(seed=2))
    assert _received(receiver, "r") == _key(2)
    assert _do(first, send="r", seed=3) is True
    assert _received(receiver, "r") == _key(3)


def test_a_receiver_that_gave_up_may_ask_again(shared) -> None:
    sender, receiver = shared(), shared()
    assert _received(receiver, "r", timeout=0.05) is None
    assert send(sender, sequence(seed=1))
    assert _received(receiver, "r") == _key(1)


@pytest.mark.parametrize(
    "request_id",
    ["a/b/../../etc/passwd", "x" * 300, "ü\n\0%s{}", "k" * 10_000, ".", "-rf", "psm_1"],
    ids=["path", "300", "odd", "10k", "dot", "dash", "psm"],
)
def test_any_request_id_will_do(request_id: str, shared, place: Path) -> None:
    sender, receiver = shared(), shared()
    assert send(sender, sequence(seed=1), request_id)
    assert _received(receiver, request_id) == _key(1)
    names = [path.name for path in place.rglob("*")]
    assert not any("passwd" in name or "xxx" in name or "kkk" in name for name in names)


def test_kv_that_nobody_receives_makes_room_when_its_time_is_over(shared, monkeypatch) -> None:
    clock = FakeClock()
    monkeypatch.setitem(SharedMemoryConnector.__init__.__kwdefaults__, "clock", clock)
    sender = shared(extra={"object_gib": 8 / 1024, "buffer_ttl_seconds": 5.0})
    big = sequence(4096, heads=2, dim=32, block_size=16, num_blocks=256)
    number = 0
    while send(sender, big, f"r{number}"):
        number += 1
        assert number < 12
    clock.advance(5.1)
    assert send(sender, big, "next")
    assert _received(shared(), "next") == big.key.tolist()


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


def test_what_is_received_is_the_receivers_own(shared) -> None:
    sender, receiver = shared(), shared()
    assert send(sender, sequence(seed=1))
    data, _ = receiver.receive_kv_cache_for_request("r")
    sender.cleanup("r")
    assert send(sender, sequence(seed=2), "q")
    sender.close()
    receiver.close()
    assert data["layer_blocks"]["key_cache"][0].tolist() == _key(1)
