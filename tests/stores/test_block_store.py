# SPDX-License-Identifier: Apache-2.0
import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest

from omni_connector.config import StoreSettings
from omni_connector.errors import PeerUnreachableError
from omni_connector.stores.block_store import MooncakeBlockStore
from omni_connector.testing.ports import free_port

from ..masters import Master
from ..patience import wait_until
from .conformance import TIMEOUT_S, BlockStoreConformance, fill, name

__all__ = ["name"]  # a fixture

SHORT_S = 0.5
HOUR_S = 3600.0  # whoever waits for it hangs


def connect(master: Master, lends: int = 0) -> MooncakeBlockStore:
    store = MooncakeBlockStore(StoreSettings(master=master.address), lends)
    store.wait(TIMEOUT_S)
    return store


@pytest.fixture(scope="module")
def store(master: Master) -> Iterator[MooncakeBlockStore]:
    opened = connect(master, 256 << 20)
    yield opened
    opened.close()


class TestMooncakeBlockStore(BlockStoreConformance):
    def another(self, request: pytest.FixtureRequest) -> MooncakeBlockStore:
        return connect(request.getfixturevalue("master"))


def test_nobody_at_the_address_of_the_master(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    store = MooncakeBlockStore(StoreSettings(master=f"127.0.0.1:{free_port()}"))
    with pytest.raises(PeerUnreachableError, match="refused"):
        store.wait(TIMEOUT_S)
    rows = store.buffer(2, 100)
    for _ in range(100):  # nobody is waited for: none of the failures is a timeout
        assert store.exists(["a", "b"], timeout=TIMEOUT_S) == [False, False]
        assert store.put(["a", "b"], rows, [1, 1], timeout=TIMEOUT_S) == [False, False]
        assert store.get(["a", "b"], rows, [1, 1], timeout=TIMEOUT_S) == [False, False]
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
        assert call() == [False] * 8
    time.sleep(0.2)
    # It is known to be away, and not waited for.
    assert store.get(keys, back, lengths, timeout=HOUR_S) == [False] * 8
    # What was given up may go on, but not into rows that were handed back.
    if how == "kill":
        mortal.start()
    else:
        mortal.go_on()
    # Not `SHORT_S`: a put that a busy machine makes late would be another absence.
    after = [f"after{i}" for i in range(8)]
    wait_until(lambda: all(store.put(after, rows, lengths, timeout=HOUR_S)))
    assert (back == 7).all()
    assert all(store.get(after, back, lengths, timeout=HOUR_S))
    assert np.array_equal(back, rows)
    store.close()
    assert caplog.text.count("asked again in the background") == 1
    assert caplog.text.count("answers again") == 1
