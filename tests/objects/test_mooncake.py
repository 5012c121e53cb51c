# SPDX-License-Identifier: Apache-2.0
"""Objects between hosts: who may ask and be asked, and what happens when a side goes."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.errors import (
    ConfigError,
    PeerRefusedError,
    ProtocolError,
    TransportError,
)
from omni_connector.net import resolver as resolver_module
from omni_connector.net.keys import write_new_key
from omni_connector.net.packets import require_protocol
from omni_connector.objects import mooncake as objects_mooncake
from omni_connector.objects import peer as objects_peer
from omni_connector.objects.exchange import PROTOCOL, Held
from omni_connector.objects.factory import ConnectorSpec, OmniConnectorFactory
from omni_connector.objects.mooncake import MooncakeTransferEngineConnector, read_hint
from omni_connector.objects.object_store import StoredObject
from omni_connector.objects.peer import QUESTIONS
from omni_connector.testing import FakeClock
from omni_connector.testing.conformance import ObjectConformance
from omni_connector.testing.ports import free_port
from tests import inspection
from tests.patience import wait_until

from ..stopping import stop

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("reused_engines")

NAME = "MooncakeTransferEngineConnector"
EDGE = ("0", "1")
WAIT_S = 60.0
HOUR_S = 3600.0  # whoever waits for it hangs


class Acquainted(MooncakeTransferEngineConnector):
    """Asks all others of its place for objects, where a pipeline would name one sender."""

    places: ClassVar[dict[Path, list["Acquainted"]]] = {}

    def __init__(self, place: Path, geometry: tuple[int, int]) -> None:
        super().__init__(zmq_port=0, role="receiver", transfer_timeout=HOUR_S)
        self._geometry = geometry
        self.others = self.places.setdefault(place, [])
        self.others.append(self)

    def _search(self, digest: bytes, metadata: Any, deadline: float) -> Held | None:
        known = [self._metadata(each._own.address) for each in self.others if each._own is not None]
        asked = known if read_hint(metadata) is None else [metadata]
        found = [super(Acquainted, self)._search(digest, each, deadline) for each in asked]
        there = [each for each in found if each is not None]
        return max(there, key=lambda each: each.stored.generation, default=None)


class TestMooncakeConformance(ObjectConformance):
    object_slot_bytes = 4096
    object_slots = 64
    scattered_bytes = 4096

    def connect(self, place: Path) -> Acquainted:
        return Acquainted(place, (self.object_slots, self.object_slot_bytes))


Make = Callable[..., MooncakeTransferEngineConnector]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes connectors as a pipeline does."""
    with ExitStack() as stack:

        def create(**settings: Any) -> MooncakeTransferEngineConnector:
            settings = {"zmq_port": 0, "buffer_ttl_seconds": 300, **settings}
            connector = OmniConnectorFactory.create_connector(ConnectorSpec(NAME, settings))
            assert isinstance(connector, MooncakeTransferEngineConnector)
            return stack.enter_context(connector)

        yield create


def test_a_sender_at_the_port_of_its_settings(make: Make) -> None:
    port = free_port()
    sender = make(zmq_port=port, memory_pool_size=64 << 20)
    receiver = make(role="receiver", sender_host="127.0.0.1", sender_zmq_port=port)
    value = {"kv": np.arange(3 << 20, dtype=np.uint8), "n": 7}
    ok, size, metadata = sender.put(*EDGE, "key", value)
    assert ok
    assert metadata is not None
    assert (metadata["source_host"], metadata["source_port"]) == ("127.0.0.1", port)
    found = receiver.get(*EDGE, "key")
    assert found is not None
    assert found[1] == size
    assert np.array_equal(found[0]["kv"], value["kv"])
    assert receiver.get(*EDGE, "another") is None
    assert sender.health()["listen"] == f"127.0.0.1:{port}"


def test_a_receiver_is_told_of_the_sender_later(make: Make) -> None:
    sender, receiver = make(), make(role="receiver")
    sender.put(*EDGE, "key", b"object")
    assert receiver.get(*EDGE, "key") is None
    receiver.update_sender_info("127.0.0.1", sender.listen().port)
    assert receiver.get(*EDGE, "key") == (b"object", 6)
    for host, port in (("0.0.0.0", 80), ("a;b", 80), ("127.0.0.1", 0), ("127.0.0.1", 1 << 16)):
        with pytest.raises(ValueError):
            receiver.update_sender_info(host, port)


def test_a_host_that_is_not_allowed_is_not_asked(make: Make, caplog: Any) -> None:
    receiver = make(role="receiver", peers=["10.1.0.0/16"], object_timeout=HOUR_S)
    for host in ("10.2.0.1", "db.internal"):
        hint = {"source_host": host, "source_port": 80}
        hour = time.monotonic() + HOUR_S
        assert receiver.get_with_deadline(*EDGE, "key", hint, deadline=hour) is None
        assert "`peers`" in caplog.text
        caplog.clear()
    assert not inspection.senders_asked(receiver)


@pytest.mark.parametrize(
    "hint",
    [
        {"source_host": "tcp://1.2.3.4", "source_port": 80},
        {"source_host": "127.0.0.1;tcp://*", "source_port": 80},
        {"source_host": "127.0.0.1", "source_port": 0},
        {"source_host": "127.0.0.1", "source_port": "80"},
        {"source_host": 5, "source_port": 80},
    ],
)
def test_malformed_metadata_is_refused(make: Make, hint: dict[str, Any], caplog: Any) -> None:
    assert make(role="receiver").get(*EDGE, "key", hint) is None
    assert "malformed" in caplog.text


@pytest.mark.parametrize("hint", ["127.0.0.1", b"x", 7, [1], np.ones(2), {}])
def test_metadata_that_names_nobody_is_no_hint(make: Make, hint: Any) -> None:
    sender = make()
    sender.put(*EDGE, "key", b"object")
    assert sender.get(*EDGE, "key", hint) == (b"object", 6)


def test_objects_of_receivers_that_never_come_make_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    defaults = MooncakeTransferEngineConnector.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", clock)
    sender = make(memory_pool_size=4096, buffer_ttl_seconds=5.0)
    assert sender.put(*EDGE, "a", b"a")[0]
    assert not sender.put(*EDGE, "b", b"b")[0]
    clock.advance(5.1)
    assert sender.put(*EDGE, "b", b"b")[0]
    assert sender.get(*EDGE, "a") is None


def test_a_host_that_is_looked_up_is_one_of_this_machine(make: Make, tmp_path: Path) -> None:
    key = str(tmp_path / "key")
    write_new_key(key)
    sender = make(host="auto", sender_host="127.0.0.1", key_file=key)
    assert sender.listen().host == "127.0.0.1"


def test_senders_by_rank_are_asked_where_metadata_says_so(make: Make) -> None:
    senders = [make() for _ in range(2)]
    receiver = make(role="receiver")
    for rank, sender in enumerate(senders):
        sender.put(*EDGE, f"key-{rank}", b"%d" % rank)
        receiver.update_sender_info(*sender.listen(), sender_rank=rank)
    for rank, sender in enumerate(senders):
        hint = {"source_host": "127.0.0.1", "source_port": sender.listen().port}
        assert receiver.get(*EDGE, f"key-{rank}", hint) == (b"%d" % rank, 1)
        assert receiver.get(*EDGE, f"key-{rank}") is None


def test_other_hosts_need_a_key(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="omni-connector keygen"):
        make(host="10.0.0.1")
    with pytest.raises(ConfigError, match="cannot open the key_file"):
        make(key_file=str(tmp_path / "none"))


def test_without_a_key_no_port_is_opened_beyond_loopback(caplog: Any) -> None:
    with MooncakeTransferEngineConnector(host="10.0.0.1", role="receiver") as sender:
        assert sender.put(*EDGE, "key", b"object") == (False, 0, None)
        assert "key_file" in caplog.text
        assert sender._transport._engine._engine is None


def test_without_a_key_no_other_host_is_asked(make: Make, caplog: Any) -> None:
    receiver = make(role="receiver", peers=["10.1.0.0/16"], object_timeout=WAIT_S)
    hint = {"source_host": "10.1.0.1", "source_port": 80}
    assert receiver.get(*EDGE, "key", hint) is None
    assert "key_file" in caplog.text
    assert not inspection.senders_asked(receiver)


def test_a_port_that_was_taken_is_tried_again(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        sender = make(role="receiver", zmq_port=other.getsockname()[1])
        for _ in range(2):
            assert sender.put(*EDGE, "key", b"object") == (False, 0, None)
        assert sender.health()["exports"] == 0
    assert sender.put(*EDGE, "key", b"object")[0]


def test_a_name_that_takes_long_to_look_up(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = str(tmp_path / "key")
    write_new_key(key)
    found = threading.Event()
    monkeypatch.setattr(resolver_module, "resolve", lambda address: found.wait() and address)
    receiver = make(role="receiver", key_file=key, object_timeout=0.5)
    receiver.update_sender_info("slow.internal", 80)
    assert receiver.get(*EDGE, "key") is None
    found.set()


def test_a_source_that_is_closed_connects_no_more(make: Make) -> None:
    sender, receiver = make(), make(role="receiver")
    _, _, metadata = sender.put(*EDGE, "key", b"object")
    assert receiver.get(*EDGE, "key", metadata) is not None
    [source] = inspection.senders_asked(receiver)
    receiver.close()
    with pytest.raises(TransportError, match="closed"):
        source.find(bytes(32), time.monotonic() + WAIT_S)
    assert source._line is None


@pytest.mark.parametrize(
    ("runs", "length"), [(((0, 1 << 40),), 1 << 52), (((0, 4096),), 4096 << 40)]
)
def test_an_announced_arena_of_any_size_is_not_believed(runs: Any, length: int) -> None:
    stored = StoredObject(0, 1, runs, length)
    with pytest.raises(ProtocolError):
        stored.pieces(1 << 60)


def test_only_who_has_the_key_is_answered(make: Make, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    for path in (ours, theirs):
        write_new_key(path)
    sender = make(key_file=ours)
    _, _, metadata = sender.put(*EDGE, "key", b"object")
    assert make(role="receiver", key_file=ours).get(*EDGE, "key", metadata) == (b"object", 6)
    hour = time.monotonic() + HOUR_S  # who goes on asking hangs
    for other in (theirs, None):
        receiver = make(role="receiver", key_file=other)
        assert receiver.get_with_deadline(*EDGE, "key", metadata, deadline=hour) is None
    # Nor does a receiver that has one believe a sender without.
    _, _, open_metadata = make().put(*EDGE, "key", b"object")
    receiver = make(role="receiver", key_file=ours)
    assert receiver.get_with_deadline(*EDGE, "key", open_metadata, deadline=hour) is None
    with pytest.raises(PeerRefusedError, match="key_file"):
        receiver.get_or_raise(*EDGE, "key", open_metadata)


def test_who_takes_connections_and_ends_them_has_no_other_key(make: Make) -> None:
    """As a sender does that ends, and a proxy whose sender has not begun."""
    receiver = make(role="receiver")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        hint = {"source_host": "127.0.0.1", "source_port": port}

        def end() -> None:
            with suppress(OSError):
                while True:
                    proxy.accept()[0].close()

        ending = threading.Thread(target=end)
        ending.start()
        for _ in range(5):
            assert receiver.get_or_raise(*EDGE, "key", hint) is None
        proxy.shutdown(socket.SHUT_RDWR)
        ending.join()
    make(zmq_port=port).put(*EDGE, "key", b"object")
    assert receiver.get_or_raise(*EDGE, "key", hint) == (b"object", 6)


@pytest.mark.parametrize(
    "settings",
    [
        {"hostt": "127.0.0.1"},
        {"host": "224.0.0.1"},
        {"protocol": "carrier pigeon"},
        {"memory_pool_device": "cuda"},
        {"zmq_port": -1},
        {"object_timeout": 0},
    ],
)
def test_wrong_settings_are_refused(make: Make, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=NAME):
        make(**settings)


def test_a_port_that_is_taken_is_refused(make: Make) -> None:
    sender = make()
    with pytest.raises(ConfigError, match="cannot listen"):
        make(zmq_port=sender.listen().port)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_question_or_malformed(packet: bytes) -> None:
    try:
        question = QUESTIONS.decode(packet)
    except (ValueError, RecursionError):  # of msgspec; UnicodeDecodeError is one
        return
    assert isinstance(question.digest, bytes)


def test_garbage_at_the_port_disturbs_nobody(make: Make) -> None:
    sender, receiver = make(), make(role="receiver")
    _, _, metadata = sender.put(*EDGE, "key", b"object")
    address = sender.listen()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{address}")
    for packet in ([b""], [b"\xff" * 100], [b"a", b"b"], [b"\x81\xa4type\xa4find"]):
        dealer.send_multipart(packet)
    with socket.create_connection((address.host, address.port)) as raw:
        raw.sendall(os.urandom(1000))
        assert receiver.get(*EDGE, "key", metadata) == (b"object", 6)
    context.destroy(0)
    assert sender.health()["status"] == "healthy"


class NewerFind(msgspec.Struct, frozen=True, tag="find"):
    """The question as the next version of this package understands it."""

    digest: bytes
    protocol: int

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL + 1)


def test_a_sender_of_another_version_is_named_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = msgspec.msgpack.Decoder(NewerFind)
    monkeypatch.setattr(objects_mooncake, "QUESTIONS", newer)
    sender, receiver = make(), make(role="receiver", object_timeout=HOUR_S)  # it is answered
    _, _, metadata = sender.put(*EDGE, "key", b"object")
    for _ in range(3):
        assert receiver.get(*EDGE, "key", metadata) is None
    # Nor is it asked again by who waits.
    hour = time.monotonic() + HOUR_S
    assert receiver.get_with_deadline(*EDGE, "key", metadata, deadline=hour) is None
    said = [each.getMessage() for each in caplog.records if "No object is found" in each.msg]
    assert len(said) == 1
    assert f"at {sender.listen()}: the peer refuses" in said[0]
    assert f"protocol {PROTOCOL}, wanted {PROTOCOL + 1}" in said[0]
    # The sender says it once, too.
    assert (
        len([each for each in caplog.records if f"wanted {PROTOCOL + 1}" in each.getMessage()]) == 2
    )


def test_what_a_sender_says_of_an_object_is_checked(make: Make) -> None:
    sender, receiver = make(), make(role="receiver")
    _, _, metadata = sender.put(*EDGE, "key", b"object")
    objects = inspection.own_objects(sender)
    [(digest, (key, stored))] = objects._objects.items()
    for wrong in (
        {"runs": ((0, 1 << 40),)},
        {"runs": ((-1, 1),)},
        {"length": 1 << 50},
        {"length": -1},
        {"runs": ()},
        {"generation": stored.generation + 1},
    ):
        objects._objects[digest] = key, msgspec.structs.replace(stored, **wrong)
        assert receiver.get(*EDGE, "key", metadata) is None
    objects._objects[digest] = key, stored
    assert receiver.get(*EDGE, "key", metadata) == (b"object", 6)


SENDER = """
import sys, json
from omni_connector.objects import ConnectorSpec, OmniConnectorFactory
connector = OmniConnectorFactory.create_connector(
    ConnectorSpec("MooncakeTransferEngineConnector", {"zmq_port": 0}))
print(json.dumps(connector.put("0", "1", "key", b"x" * (4 << 20))[2]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_sender_that_is_gone_or_stands_still(make: Make, how: str) -> None:
    receiver = make(role="receiver", object_timeout=HOUR_S)
    with subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as sender:
        try:
            assert sender.stdout is not None
            metadata = json.loads(sender.stdout.readline())
            assert receiver.get(*EDGE, "key", metadata) == (b"x" * (4 << 20), 4 << 20)
            if how == "stop":
                stop(sender.pid)
            else:
                sender.kill()
            assert receiver.get(*EDGE, "key", metadata, timeout=2.0) is None
        finally:
            sender.kill()


def test_links_to_senders_that_have_gone_are_let_go_of(make: Make) -> None:
    receiver = make(role="receiver")
    assert receiver.get(*EDGE, "key") is None
    metadata = []
    for _ in range(3):
        sender = make()
        metadata.append(sender.put(*EDGE, "key", b"object")[2])
        assert receiver.get(*EDGE, "key", metadata[-1]) == (b"object", 6)
        sender.close()
    wait_until(lambda: not inspection.senders_asked(receiver))  # nobody asks again


def test_a_link_that_nobody_uses_is_let_go_of_and_made_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make(), make(role="receiver")
    _, _, metadata = sender.put(*EDGE, "key", b"object")
    assert receiver.get(*EDGE, "key", metadata) == (b"object", 6)
    [source] = inspection.senders_asked(receiver)
    assert not source.useless(time.monotonic())
    assert source._line is not None
    monkeypatch.setattr(objects_peer, "IDLE_S", 0.0)
    assert source.useless(time.monotonic())
    receiver._let_go()
    assert source._line is None
    assert receiver.get(*EDGE, "key", metadata) == (b"object", 6)
    wait_until(lambda: not inspection.senders_asked(receiver))
