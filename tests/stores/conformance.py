# SPDX-License-Identifier: Apache-2.0
"""What every `BlockStore` has to do."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_connector.stores.block_store import BlockStore

TIMEOUT_S = 30.0

Name = Callable[[int], list[str]]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Name:
    """Names keys of the test's own."""
    return lambda count: [f"{request.node.nodeid}/{i}" for i in range(count)]


def fill(rows: Any, seed: int = 0) -> None:
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, np.uint8)


class BlockStoreConformance(ABC):
    """Subclass it with a fixture `store`, and a way to open another client of the same store."""

    @abstractmethod
    def another(self, request: pytest.FixtureRequest) -> BlockStore:
        """Another client, which the test closes."""

    @pytest.mark.parametrize(
        ("count", "width"), [(1, 1), (3, 4096), (700, 1000), (5, (3 << 20) + 7), (2, 20 << 20)]
    )
    def test_blocks_come_back_as_they_were_put(
        self, store: BlockStore, name: Name, count: int, width: int
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

    def test_what_is_there_stays_and_counts_as_put(self, store: BlockStore, name: Name) -> None:
        keys = name(1)
        rows = store.buffer(1, 100)
        for value in (1, 2):
            rows[:] = value
            assert store.put(keys, rows, [100], timeout=TIMEOUT_S) == [True]
        assert store.get(keys, rows, [100], timeout=TIMEOUT_S) == [True]
        assert (rows == 1).all()

    def test_each_key_has_an_answer_of_its_own(self, store: BlockStore, name: Name) -> None:
        keys = name(4)
        rows = store.buffer(4, 5000)
        fill(rows)
        stored = rows.copy()
        assert store.put(keys[:3], rows[:3], [5000, 4000, 5000], timeout=TIMEOUT_S) == [True] * 3
        assert store.exists(keys, timeout=TIMEOUT_S) == [True, True, True, False]
        before = store.failures
        rows[:] = 0
        # The second is shorter than asked for, the third longer; the fourth is not there.
        lengths = [5000, 5000, 4999, 5000]
        assert store.get(keys, rows, lengths, timeout=TIMEOUT_S) == [True, False, False, False]
        assert np.array_equal(rows[0], stored[0])
        assert sum(store.failures.values()) - sum(before.values()) == 3

    def test_what_is_discarded_can_be_put_again(self, store: BlockStore, name: Name) -> None:
        keys = name(2)
        rows = store.buffer(2, 100)
        rows[:] = 1
        assert store.put(keys, rows, [100, 100], timeout=TIMEOUT_S) == [True, True]
        store.discard([keys[0], "never there"], timeout=TIMEOUT_S)
        assert store.exists(keys, timeout=TIMEOUT_S) == [False, True]
        rows[:] = 2
        assert store.put(keys, rows, [100, 100], timeout=TIMEOUT_S) == [True, True]
        assert store.get(keys, rows, [100, 100], timeout=TIMEOUT_S) == [True, True]
        assert (rows[0] == 2).all()
        assert (rows[1] == 1).all()

    def test_clients_share_what_they_put(
        self, store: BlockStore, name: Name, request: pytest.FixtureRequest
    ) -> None:
        keys = name(2)
        other = self.another(request)
        rows = other.buffer(2, 300)
        fill(rows)
        assert other.put(keys, rows, [300, 300], timeout=TIMEOUT_S) == [True, True]
        other.close()
        other.close()
        back = store.buffer(2, 300)
        assert store.get(keys, back, [300, 300], timeout=TIMEOUT_S) == [True, True]
        assert np.array_equal(back, rows)

    def test_threads_put_and_get_beside_each_other(self, store: BlockStore, name: Name) -> None:
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

    def test_wrong_shapes_are_the_callers_error(self, store: BlockStore) -> None:
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

    def test_closed_store_has_nothing(self, request: pytest.FixtureRequest) -> None:
        store = self.another(request)
        rows = store.buffer(1, 10)
        store.close()
        assert store.exists(["a"], timeout=TIMEOUT_S) == [False]
        assert store.put(["a"], rows, [1], timeout=TIMEOUT_S) == [False]
        assert store.get(["a"], rows, [1], timeout=TIMEOUT_S) == [False]
        store.discard(["a"], timeout=TIMEOUT_S)
