# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector.errors import (
    ArenaFullError,
    ChecksumError,
    IntegrityError,
    PeerUnreachableError,
)
from omni_connector.objects import manifest, mooncake_store
from omni_connector.objects.base import ObjectKey, OmniConnector
from omni_connector.objects.manifest import (
    CONTENT_AT,
    FRAGMENT_BYTES,
    INLINE_BYTES,
    manifest_name,
)
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
from omni_connector.testing.conformance import StoreConformance
from omni_connector.testing.ports import free_port
from omni_connector.transports.mooncake.library import store_module

from ..masters import Master, lender
from ..patience import PATIENCE_S, wait_until

EDGE = ("0", "1")
TIMEOUT_S = 1.5
HOUR_S = 3600.0  # whoever waits for it hangs


@pytest.fixture(scope="module")
def keeper(master: Master) -> Iterator[MooncakeStoreConnector]:
    """Lends memory, and keeps the client that connectors of this process share."""
    # Another lends room for all that the tests put: what is removed keeps its place for seconds.
    with lender(master, 0.5), MooncakeStoreConnector(master=master.address) as connector:
        yield connector


class TestMooncakeStoreConformance(StoreConformance):
    object_slot_bytes = INLINE_BYTES
    object_slots = None

    @pytest.fixture(autouse=True)
    def _master(self, master: Master, keeper: MooncakeStoreConnector) -> None:
        self.address = master.address

    def connect(self, place: Path) -> OmniConnector:
        return MooncakeStoreConnector(master=self.address, namespace=place.name)


@pytest.fixture
def connector(master: Master, keeper: MooncakeStoreConnector) -> Iterator[MooncakeStoreConnector]:
    with MooncakeStoreConnector(master=master.address, namespace=secrets.token_hex(8)) as made:
        yield made


@pytest.fixture(scope="module")
def raw(master: Master) -> Iterator[Any]:
    """A client that is not ours."""
    store = store_module().MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master.address) == 0
    yield store
    store.close()


def name_of(connector: MooncakeStoreConnector, key: str) -> str:
    """Under what name the manifest of a key is stored."""
    return manifest_name(connector._prefix, ObjectKey(*EDGE, key).digest)


def replace(raw: Any, name: str, content: bytes) -> None:
    raw.remove(name, True)
    assert raw.put(name, content) == 0


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        INLINE_BYTES,
        INLINE_BYTES + 1,
        FRAGMENT_BYTES - 1,
        FRAGMENT_BYTES,
        5 * FRAGMENT_BYTES + 17,
    ],
)
def test_object_of_every_size_arrives_whole(connector: MooncakeStoreConnector, size: int) -> None:
    key, content = ObjectKey(*EDGE, "key"), os.urandom(size)
    cuts = [0, size // 3, size // 3, size // 2, size]
    parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)]
    connector.store_object(key, parts)
    found = connector.load_object(key, None, timeout=PATIENCE_S)
    assert found is not None
    assert bytes(found) == content


def test_object_of_a_process_that_was_killed_is_there(
    master: Master, connector: MooncakeStoreConnector
) -> None:
    code = """
import os, signal, sys
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
sender = MooncakeStoreConnector(master=sys.argv[1], namespace=sys.argv[2], segment_gib=0)
assert sender.put("0", "1", "key", bytes(range(256)) * 40_000)[0]
os.kill(os.getpid(), signal.SIGKILL)
"""
    namespace = connector._prefix.partition("/")[0]
    command = [sys.executable, "-c", code, master.address, namespace]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    found = connector.get(*EDGE, "key")
    assert found is not None
    assert found[0] == bytes(range(256)) * 40_000


def test_readers_get_one_version_whole_while_it_is_replaced(
    connector: MooncakeStoreConnector,
) -> None:
    wrong: list[object] = []
    stop = threading.Event()
    connector.put(*EDGE, "key", b"\0" * 100)

    def read() -> None:
        while not stop.is_set():
            found = connector.get(*EDGE, "key")
            if found is not None and len(set(found[0])) != 1:
                wrong.append(found[1])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(60):
        size = (100, INLINE_BYTES + 1000, FRAGMENT_BYTES + 1000)[i % 3]
        assert connector.put(*EDGE, "key", bytes([i]) * size)[0]
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    found = connector.get(*EDGE, "key")
    assert found is not None
    assert found[0] == bytes([59]) * (FRAGMENT_BYTES + 1000)


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: b"foreign",
        lambda manifest: manifest[:-1],
        lambda manifest: manifest + b"x",
        lambda manifest: os.urandom(len(manifest)),
        lambda manifest: b"\0" * len(manifest),
        lambda manifest: flip(manifest, 9),
        lambda manifest: flip(manifest, 30),
        lambda manifest: flip(manifest, CONTENT_AT),
    ],
    ids=["foreign", "cut", "longer", "random", "zeros", "length", "version", "content"],
)
def test_wrong_bytes_under_a_key_are_an_integrity_error(
    connector: MooncakeStoreConnector, raw: Any, spoil: Callable[[bytes], bytes]
) -> None:
    assert connector.put(*EDGE, "key", b"short object")[0]
    name = name_of(connector, "key")
    replace(raw, name, spoil(raw.get(name)))
    with pytest.raises(IntegrityError):
        connector.load_object(ObjectKey(*EDGE, "key"), None, timeout=PATIENCE_S)
    assert connector.get(*EDGE, "key") is None
    assert connector.put(*EDGE, "key", b"again")[0]
    assert connector.get(*EDGE, "key") == (b"again", 5)


def test_head_of_another_object_is_an_integrity_error(
    connector: MooncakeStoreConnector, raw: Any
) -> None:
    for key in ("key", "other"):
        assert connector.put(*EDGE, key, key.encode())[0]
    replace(raw, name_of(connector, "key"), raw.get(name_of(connector, "other")))
    with pytest.raises(IntegrityError, match="another object"):
        connector.load_object(ObjectKey(*EDGE, "key"), None, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda fragment: flip(fragment, 77), ChecksumError),
        (lambda fragment: fragment[:-1], IntegrityError),
    ],
    ids=["changed", "cut"],
)
def test_wrong_bytes_in_a_fragment_are_an_integrity_error(
    connector: MooncakeStoreConnector,
    raw: Any,
    spoil: Callable[[bytes], bytes],
    error: type[IntegrityError],
) -> None:
    assert connector.put(*EDGE, "key", bytes(INLINE_BYTES + 1))[0]
    (_, version) = connector._stored[ObjectKey(*EDGE, "key").digest]
    (name,) = version.fragment_names(connector._prefix)
    replace(raw, name, spoil(raw.get(name)))
    with pytest.raises(error):
        connector.load_object(ObjectKey(*EDGE, "key"), None, timeout=PATIENCE_S)
    raw.remove(name, True)
    assert connector.load_object(ObjectKey(*EDGE, "key"), None, timeout=PATIENCE_S) is None


def test_replaced_and_dropped_objects_leave_nothing_behind(
    connector: MooncakeStoreConnector, raw: Any
) -> None:
    names = []
    for size in (INLINE_BYTES + 1, 2 * INLINE_BYTES, FRAGMENT_BYTES + 1):
        assert connector.put(*EDGE, "req", bytes(size))[0]
        (_, version) = connector._stored[ObjectKey(*EDGE, "req").digest]
        names += version.fragment_names(connector._prefix)
    connector.cleanup("req")
    names.append(name_of(connector, "req"))
    wait_until(lambda: raw.batch_is_exist(names) == [0] * len(names))


def test_object_that_finds_no_room_is_refused(
    mortal: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One fragment that is larger than all there is: of several, the master may throw
    # out the first in time for the last.
    for module in (manifest, mooncake_store):
        monkeypatch.setattr(module, "FRAGMENT_BYTES", 64 << 20)
    with MooncakeStoreConnector(master=mortal.address, segment_gib=1 / 32) as connector:
        with pytest.raises(ArenaFullError, match="segment_gib"):
            connector.store_object(ObjectKey(*EDGE, "key"), [memoryview(bytes(64 << 20))])
        assert connector.get(*EDGE, "key") is None
        assert connector.put(*EDGE, "other", bytes(8 << 20))[0]


def test_nobody_at_the_address_of_the_master_is_a_transport_error() -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with pytest.raises(PeerUnreachableError, match="refused"):
        MooncakeStoreConnector(master=f"127.0.0.1:{free_port()}", object_timeout=2.0)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_master_that_goes_away_and_comes_back(
    mortal: Master, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = os.urandom(3 * FRAGMENT_BYTES)
    with (
        lender(mortal),
        MooncakeStoreConnector(
            master=mortal.address, segment_gib=0, object_timeout=TIMEOUT_S
        ) as connector,
    ):
        # It goes in the middle of whatever is under way.
        wrong: list[object] = []
        stop = threading.Event()

        def work(key: str) -> None:
            while not stop.is_set():
                ok = connector.put(*EDGE, key, content)[0]
                found = connector.get(*EDGE, key)
                if found is not None and found != (content, len(content)):
                    wrong.append(key)
                if not ok:
                    stop.wait(0.01)

        threads = [threading.Thread(target=work, args=(f"key{i}",)) for i in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        getattr(mortal, how)()
        wait_until(lambda: "status" in connector.details())
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        # It is known to be away, and not waited for.
        connector.object_timeout = HOUR_S
        assert connector.put(*EDGE, "key", b"object") == (False, 0, None)
        assert connector.get(*EDGE, "key") is None
        assert "does not answer" in connector.health()["status"]
        if how == "kill":
            mortal.start()
        else:
            mortal.go_on()
        wait_until(lambda: connector.put(*EDGE, "key", content)[0])
        assert connector.get(*EDGE, "key") == (content, len(content))
        assert connector.health()["status"] == "healthy"
    assert caplog.text.count("asked again in the background") == 1
