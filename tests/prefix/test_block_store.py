# SPDX-License-Identifier: Apache-2.0
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from omni_connector.config import StoreSettings
from omni_connector.errors import PeerUnreachableError
from omni_connector.prefix.block_store import MooncakeBlockStore
from omni_connector.testing.ports import free_port

from ..masters import Master

TIMEOUT_S = 10.0
SHORT_S = 0.5
SLACK_S = 5.0  # what a busy machine takes beyond; less than `TIMEOUT_S`, which is not waited for


def connect(master: Master, lends: int = 0) -> MooncakeBlockStore:
    store = MooncakeBlockStore(StoreSettings(master=master.address), lends)
    store.wait(TIMEOUT_S)
    return store


@pytest.fixture(scope="module")
def store(master: Master) -> Iterator[MooncakeBlockStore]:
    opened = connect(master, 256 << 20)
    yield opened
    opened.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Callable[[int], list[str]]:
    """Names keys of the test's own."""
    return lambda count: [f"{request.node.nodeid}/{i}" for i in range(count)]


def fill(rows: Any, seed: int = 0) -> None:
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, np.uint8)


@pytest.mark.parametrize(
    ("count", "width"), [(1, 1), (3, 4096), (700, 1000), (5, (3 << 20) + 7), (2, 20 << 20)]
)
def test_blocks_come_back_as_they_were_put(
    store: MooncakeBlockStore, name: Callable[[int], list[str]], count: int, width: int
) -> None:
    keys = name(count)
    rows, back = store.buffer(count, width), store.buffer(count, width)
    assert rows.ctypes.data % 4096 == 0
    fill(rows)
    back[:] = 0
    lengths = [max(1, width - i) for i in range(count)]
    assert store.exists(keys, timeout=TIMEOUT_S) == [False] * count
    assert store.put(keys, rows, lengths, timeout=TIMEOUT_S) == [True] * count
    assert store.exists(keys, timeout=TIMEOUT_S) == [True] * count
    assert store.get(keys, back, lengths, timeout=TIMEOUT_S) == [True] * count
    for i, length in enumerate(lengths):
        assert np.array_equal(back[i, :length], rows[i, :length])
        assert not back[i, length:].any()


def test_what_is_there_stays_and_counts_as_put(
    store: MooncakeBlockStore, name: Callable[[int], list[str]]
) -> None:
    keys = name(1)
    rows = store.buffer(1, 100)
    for value in (1, 2):
        rows[:] = value
        assert store.put(keys, rows, [100], timeout=TIMEOUT_S) == [True]
    assert store.get(keys, rows, [100], timeout=TIMEOUT_S) == [True]
    assert (rows == 1).all()


def test_each_key_has_an_answer_of_its_own(
    store: MooncakeBlockStore, name: Callable[[int], list[str]]
) -> None:
    keys = name(4)
    rows = store.buffer(4, 5000)
    fill(rows)
    stored = rows.copy()
    assert store.put(keys[:3], rows[:3], [5000, 4000, 5000], timeout=TIMEOUT_S) == [True] * 3
    before = store.failures
    rows[:] = 0
    # The second is shorter than asked for, the third longer; the fourth is not there.
    lengths = [5000, 5000, 4999, 5000]
    assert store.get(keys, rows, lengths, timeout=TIMEOUT_S) == [True, False, False, False]
    assert np.array_equal(rows[0], stored[0])
    failures = {kind: n - before.get(kind, 0) for kind, n in store.failures.items()}
    assert failures["OBJECT_NOT_FOUND (-704)"] == 1
    assert sum(failures.values()) == 3
    assert store.exists(keys, timeout=TIMEOUT_S) == [True, True, True, False]


def test_clients_share_what_they_put(
    master: Master, store: MooncakeBlockStore, name: Callable[[int], list[str]]
) -> None:
    keys = name(2)
    other = connect(master)
    rows = other.buffer(2, 300)
    fill(rows)
    assert other.put(keys, rows, [300, 300], timeout=TIMEOUT_S) == [True, True]
    other.close()
    other.close()
    back = store.buffer(2, 300)
    assert store.get(keys, back, [300, 300], timeout=TIMEOUT_S) == [True, True]
    assert np.array_equal(back, rows)


def test_threads_put_and_get_beside_each_other(
    store: MooncakeBlockStore, name: Callable[[int], list[str]]
) -> None:
    keys = name(80)
    wrong: list[int] = []

    def work(which: int) -> None:
        own = keys[20 * which : 20 * which + 20]
        rows, back = store.buffer(20, 70_000), store.buffer(20, 70_000)
        fill(rows, which)
        lengths = [70_000] * 20
        done = store.put(own, rows, lengths, timeout=TIMEOUT_S)
        done += store.get(own, back, lengths, timeout=TIMEOUT_S)
        if not all(done) or not np.array_equal(rows, back):
            wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_wrong_shapes_are_the_callers_error(store: MooncakeBlockStore) -> None:
    rows = store.buffer(2, 10)
    for keys, lengths in (
        (["a"], [1]),
        (["a", "b"], [1]),
        (["a", "b"], [1, 11]),
        (["a", "b"], [0, 1]),
    ):
        with pytest.raises(ValueError):
            store.put(keys, rows, lengths, timeout=TIMEOUT_S)
        with pytest.raises(ValueError):
            store.get(keys, rows, lengths, timeout=TIMEOUT_S)
    assert store.exists([], timeout=TIMEOUT_S) == []
    assert store.put([], rows[:0], [], timeout=TIMEOUT_S) == []
    assert store.get([], rows[:0], [], timeout=TIMEOUT_S) == []


def test_nobody_at_the_address_of_the_master(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    store = MooncakeBlockStore(StoreSettings(master=f"127.0.0.1:{free_port()}"))
    with pytest.raises(PeerUnreachableError, match="refused"):
        store.wait(TIMEOUT_S)
    rows = store.buffer(2, 100)
    began = time.monotonic()
    for _ in range(100):
        assert store.exists(["a", "b"], timeout=TIMEOUT_S) == [False, False]
        assert store.put(["a", "b"], rows, [1, 1], timeout=TIMEOUT_S) == [False, False]
        assert store.get(["a", "b"], rows, [1, 1], timeout=TIMEOUT_S) == [False, False]
    assert time.monotonic() - began < SLACK_S
    assert store.failures == {"unreachable": 600}
    assert len(caplog.records) == 1
    store.close()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_master_that_goes_away_and_comes_back(
    mortal: Master, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = connect(mortal, 64 << 20)
    rows, back = store.buffer(8, 1 << 20), store.buffer(8, 1 << 20)
    fill(rows)
    lengths = [1 << 20] * 8
    keys = [f"before{i}" for i in range(8)]
    assert all(store.put(keys, rows, lengths, timeout=TIMEOUT_S))
    assert all(store.get(keys, back, lengths, timeout=TIMEOUT_S))
    getattr(mortal, how)()
    back[:] = 7
    for call in (
        lambda: store.get(keys, back, lengths, timeout=SHORT_S),
        lambda: store.put([f"during{i}" for i in range(8)], rows, lengths, timeout=SHORT_S),
        lambda: store.exists(keys, timeout=SHORT_S),
    ):
        began = time.monotonic()
        assert call() == [False] * 8
        assert time.monotonic() - began < SHORT_S + SLACK_S
    time.sleep(0.2)
    began = time.monotonic()
    assert store.get(keys, back, lengths, timeout=TIMEOUT_S) == [False] * 8
    assert time.monotonic() - began < SLACK_S
    # What was given up may go on, but not into rows that were handed back.
    if how == "kill":
        mortal.start()
    else:
        mortal.go_on()
    deadline = time.monotonic() + 30.0
    # Not `SHORT_S`: a put that a busy machine makes late would be another absence.
    while not all(store.put([f"after{i}" for i in range(8)], rows, lengths, timeout=TIMEOUT_S)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (back == 7).all()
    assert all(store.get([f"after{i}" for i in range(8)], back, lengths, timeout=TIMEOUT_S))
    assert np.array_equal(back, rows)
    store.close()
    assert caplog.text.count("asked again in the background") == 1
    assert caplog.text.count("answers again") == 1


def test_closed_store_has_nothing(master: Master) -> None:
    store = connect(master)
    rows = store.buffer(1, 10)
    store.close()
    assert store.exists(["a"], timeout=TIMEOUT_S) == [False]
    assert store.put(["a"], rows, [1], timeout=TIMEOUT_S) == [False]
    assert store.get(["a"], rows, [1], timeout=TIMEOUT_S) == [False]
