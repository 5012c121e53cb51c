# SPDX-License-Identifier: Apache-2.0
"""Mooncake on IPv6 and on IPv4 addresses: it speaks one of them in a process, so each has its own.

The bytes go through Mooncake's Transfer Engine, or its store, on the loopback of that family.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ...masters import Master, lender

pytest.importorskip("mooncake.engine", exc_type=ImportError)

WAIT_S = 100.0


@pytest.fixture
def ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")


def run(script: str, *arguments: str, **variables: str) -> tuple[list[str], str]:
    """What a process of its own has printed, and its log."""
    own = {name: value for name, value in os.environ.items() if name != "MC_USE_IPV6"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=own | variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


ARENAS = """
import sys
from omni_connector.config import MooncakeSettings
from omni_connector.errors import OmniError
from omni_connector.arena.arena import Arena
from omni_connector.transports.base import Endpoint, Site
from omni_connector.transports.mooncake.transport import MooncakeTransport

own, other = sys.argv[1:]
settings = MooncakeSettings(timeout_s=30.0)
# As engines make them: a reader that listens nowhere learns its address from its first peer.
owner = MooncakeTransport.create(settings, Site(host=own))
reader = MooncakeTransport.create(settings, Site())
with owner, reader, Arena.create(8, 1 << 20) as arena:
    for slot in range(8):
        arena.begin_write(slot, 1)
        arena.slots[slot] = slot + 1
        arena.publish(slot, 1, b"key", 1 << 20, 0)
    endpoint = owner.export(arena, "arena")
    assert reader.obstacle(endpoint) is None
    with reader.attach(endpoint, timeout=30) as remote:
        fetched = remote.fetch(range(8), [1] * 8, 1 << 20, timeout=30)
        print(sum(int(row.sum()) for row in fetched.rows))
        fetched.release()
    peer = Endpoint.of(arena, "mooncake", f"tcp://{other}:5/1000")
    try:
        reader.attach(peer, timeout=30)
    except OmniError as error:
        print(type(error).__name__, error)
    print(reader.obstacle(peer))
try:
    MooncakeTransport.create(settings, Site(host=other.strip("[]")))
except OmniError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.usefixtures("ipv6")
@pytest.mark.timeout(WAIT_S + 20)
@pytest.mark.parametrize(
    ("own", "other", "family", "theirs"),
    [("::1", "127.0.0.1", "IPv6", "IPv4"), ("127.0.0.1", "[::1]", "IPv4", "IPv6")],
)
def test_bytes_move_on_addresses_of_one_family_and_the_other_is_refused(
    own: str, other: str, family: str, theirs: str
) -> None:
    said, _ = run(ARENAS, own, other)
    moved, refused, obstacle, not_started = said
    assert moved == str(sum(range(1, 9)) << 20)
    reason = f"the peer's address {other.strip('[]')} is {theirs}, and Mooncake on {own} "
    assert refused.startswith(f"PeerRefusedError {reason}connects to {family} alone: give both")
    assert obstacle.startswith(reason)
    assert not_started.startswith(f"TransportError Mooncake connects to {family} addresses alone")


@pytest.mark.timeout(WAIT_S + 20)
def test_a_variable_that_contradicts_the_address_is_removed_and_named() -> None:
    said, log = run(ARENAS, "127.0.0.1", "[::1]", MC_USE_IPV6="1")
    assert said[0] == str(sum(range(1, 9)) << 20)
    assert "MC_USE_IPV6 is set, but Mooncake starts on an IPv4 address" in log


OBJECTS = """
from omni_connector.objects.mooncake import MooncakeTransferEngineConnector
sender = MooncakeTransferEngineConnector(host="::1", zmq_port=0)
address = sender.listen()
receiver = MooncakeTransferEngineConnector(host="::1", role="receiver", sender_host=address.host,
                                           sender_zmq_port=address.port)
with sender, receiver:
    assert sender.put("0", "1", "key", b"x" * (4 << 20))[0]
    assert receiver.get("0", "1", "key") == (b"x" * (4 << 20), 4 << 20)
    print(address.host)
"""


@pytest.mark.usefixtures("ipv6")
@pytest.mark.timeout(WAIT_S + 20)
def test_objects_move_on_ipv6() -> None:
    assert run(OBJECTS)[0] == ["::1"]


STORE = """
import sys
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
with MooncakeStoreConnector(master=sys.argv[1], segment_gib=0) as connector:
    assert connector.put("0", "1", "key", b"x" * (4 << 20))[0]
    assert connector.get("0", "1", "key") == (b"x" * (4 << 20), 4 << 20)
    print("stored")
"""


@pytest.mark.usefixtures("ipv6")
@pytest.mark.timeout(WAIT_S + 60)
def test_a_store_on_ipv6_takes_objects(tmp_path: Path) -> None:
    master = Master(tmp_path, host="::1")
    try:
        master.start()
        with lender(master):
            assert run(STORE, master.address)[0] == ["stored"]
    finally:
        master.kill()


DOCTOR = """
import json, sys
from omni_connector.cli import doctor
from omni_connector.config import OmniConfig
from omni_connector.errors import OmniError
try:
    print("ok", doctor._mooncake(OmniConfig.load(json.loads(sys.argv[1]))))
except OmniError as error:
    print("WRONG", error)
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "[::1]:0"}, "ok .*it connects to IPv6 addresses alone, as ::1 is one"),
        ({"peers": ["fd00::/8"]}, "ok .*connects to IPv6 addresses alone, as all of `peers`"),
        ({"peers": ["fd00::/8", "10.0.0.1"]}, "ok .*the address of the first peer decides"),
        (
            {"listen": "[::1]:0", "peers": ["10.0.0.0/8"]},
            "WRONG peers: 10.0.0.0/8 are IPv4 addresses, but Mooncake starts on ::1",
        ),
        (
            {"listen": "127.0.0.1:0", "peers": ["fd00::1"]},
            "WRONG peers: fd00::1 are IPv6 addresses, but Mooncake starts on 127.0.0.1",
        ),
        (
            {"listen": "[::1]:0", "store": {"master": "10.0.0.1:50051"}},
            "WRONG Mooncake connects to IPv6 addresses alone",
        ),
        ({"store": {"master": "[fd00::1]:50051"}}, "ok .*the store's client connects to IPv6"),
    ],
)
def test_the_doctor_says_which_family_it_is(
    settings: dict[str, object], said: str, tmp_path: Path
) -> None:
    (line,), _ = run(DOCTOR, json.dumps(settings), OMNI_CONNECTOR_RUNTIME_DIR=str(tmp_path))
    assert re.match(said, line), line
