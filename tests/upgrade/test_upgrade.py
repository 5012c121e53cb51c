# SPDX-License-Identifier: Apache-2.0
"""Other versions of the package: each is understood, or refused with a line that names both.

`tests/fixtures` has what each release sends, shares and stores, as `scripts/wire_fixtures.py` wrote
it then.
"""

import importlib.util
import json
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_connector import __version__
from omni_connector.arena.block_index import check_header
from omni_connector.arena.format import ArenaGeometry
from omni_connector.errors import IncompatiblePeerError, IntegrityError, OmniError
from omni_connector.handoff.client import PeerSession
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import (
    PROTOCOL_VERSION,
    Handshake,
    HandshakeReply,
    Refused,
    decode_reply,
    decode_request,
    encode,
)
from omni_connector.handoff.params import BadParamsError, parse_remote_prefill
from omni_connector.handoff.server import ControlServer, PeerConnection
from omni_connector.kv import compatibility
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.packets import PACKAGE, Refusal, read_answer
from omni_connector.net.status import FORMAT, StatusFile
from omni_connector.net.status import read as read_status
from omni_connector.net.unix import Connection, Listener
from omni_connector.objects import peer as objects
from omni_connector.objects.manifest import Version
from omni_connector.prefix import attaching, neighbours
from omni_connector.runtime.context import EngineContext
from omni_connector.stores.shared_blocks import verify
from omni_connector.testing import FakeClock
from omni_connector.transports import shm

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
OTHER = "omni-connector 0.9.9"
RELEASES = sorted(each.name for each in FIXTURES.iterdir())


def _script() -> ModuleType:
    path = ROOT / "scripts" / "wire_fixtures.py"
    spec = importlib.util.spec_from_file_location("wire_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wire = _script()


def _answers(decoder: "msgspec.msgpack.Decoder[Any]") -> Callable[[bytes], object]:
    return lambda raw: read_answer(raw, [], decoder)


def _status(raw: bytes) -> object:
    with tempfile.TemporaryDirectory() as name:
        file = StatusFile(Path(name))
        try:
            file.write(raw)
            (found,), remarks = read_status(Path(name))
            assert not remarks, remarks
            return found
        finally:
            file.close()


def _entry(raw: bytes) -> None:
    verify(np.frombuffer(raw, np.uint8), 64, 1234, wire.STORE_KEY)


READERS: dict[str, Callable[[bytes], object]] = {
    "handoff.request": decode_request,
    "handoff.reply": decode_reply,
    "params.handoff": lambda raw: parse_remote_prefill(json.loads(raw)),
    "params.none": json.loads,
    "shm.question": msgspec.msgpack.Decoder(shm.Attach).decode,
    "shm.answer": _answers(shm.ANSWERS),
    "index.question": neighbours.QUESTIONS.decode,
    "index.answer": _answers(neighbours.ANSWERS),
    "rank.question": msgspec.msgpack.Decoder(attaching.AskAttached).decode,
    "rank.answer": _answers(attaching.ANSWERS),
    "objects.question": objects.QUESTIONS.decode,
    "objects.answer": _answers(objects.ANSWERS),
    "arena.superblock": lambda raw: ArenaGeometry(wire.SLOTS, wire.SLOT_BYTES).check_superblock(
        raw, wire.EPOCH
    ),
    "index.header": lambda raw: check_header(raw, wire.SLOTS, wire.EPOCH),
    "store.entry": _entry,
    "object.manifest": lambda raw: Version.decode(np.frombuffer(raw, np.uint8), wire.DIGEST),
    "status": _status,
}

# They are no messages with fields.
BYTES = {"arena.superblock", "index.header", "object.manifest", "store.entry"}

# It is an answer that says no, in whatever version.
REFUSALS = {"shm.answer.refusal"}


def _reader(name: str) -> Callable[[bytes], object]:
    return next(reader for prefix, reader in READERS.items() if name.startswith(prefix))


def _refusal(name: str, raw: bytes) -> str:
    """Why a file is refused; "" if it is understood."""
    try:
        _reader(name)(raw)
    except (OmniError, BadParamsError, ValueError, AssertionError) as error:
        return str(error)
    return ""


# A release has no fixture of what came after it.
WRITTEN = [
    (release, name)
    for name in sorted(wire.FILES)
    for release in RELEASES
    if (FIXTURES / release / f"{name}.bin").exists()
]


@pytest.mark.parametrize(("release", "name"), WRITTEN)
def test_what_a_release_wrote_is_understood_or_refused_by_both_versions(
    release: str, name: str
) -> None:
    line = _refusal(name, (FIXTURES / release / f"{name}.bin").read_bytes())
    if name in REFUSALS:
        assert "the peer refuses: no" in line
    elif line:
        assert release != __version__, f"this version does not read what it writes: {line}"
        assert "\n" not in line
        assert PACKAGE in line
        assert release in line or "another version" in line


def test_this_version_writes_what_its_fixtures_say() -> None:
    """After a change of the wire: a new version, or new fixtures of one that is not released."""
    for name, make in wire.FILES.items():
        kept = (FIXTURES / __version__ / f"{name}.bin").read_bytes()
        assert kept == make(), f"{name}: see CONTRIBUTING.md, scripts/wire_fixtures.py"


# Maps of a status whose keys are names of counters.
_COUNTS = {"counts", "failures", "peers", "seconds"}


def _newer(message: object) -> object:
    """The same, with a field more in each map: those of a handshake's key and of endpoints, too."""
    if isinstance(message, list):
        return [_newer(each) for each in message]
    if not isinstance(message, dict):
        return message
    fields = {k: each if k in _COUNTS else _newer(each) for k, each in message.items()}
    return fields | {"a field of the next version": {"x": [1]}}


def _read(name: str, raw: bytes) -> object:
    found = _reader(name)(raw)
    if isinstance(found, Handshake):
        return found.decode_compatibility(), found.protocol, found.package
    return found


@pytest.mark.parametrize("name", sorted(set(wire.FILES) - REFUSALS - BYTES - {"params.none"}))
def test_fields_that_a_newer_version_has_added_are_left_out(name: str) -> None:
    raw = wire.FILES[name]()
    packs: Any = msgspec.json if raw.startswith(b"{") else msgspec.msgpack
    newer = packs.encode(_newer(packs.decode(raw)))
    assert len(newer) > len(raw)
    assert _read(name, newer) == _read(name, raw)


@pytest.mark.parametrize("name", sorted(set(wire.FILES) - REFUSALS - {"params.none"}))
def test_a_damaged_file_is_not_understood(name: str) -> None:
    """The control: the readers look."""
    raw = wire.FILES[name]()
    cut = {"store.entry": raw[:-1] + bytes([raw[-1] ^ 1])}.get(name, raw[: len(raw) // 2])
    with pytest.raises((OmniError, BadParamsError, ValueError, AssertionError, struct.error)):
        _reader(name)(cut)


# The control channel


def _server(key: CompatibilityKey) -> ControlServer:
    return ControlServer(
        compatibility=key,
        handshake_reply=HandshakeReply(
            wire.EPOCH, "sha256", key, ((wire.endpoint(),),) * key.num_arenas
        ),
        directory=SlotDirectory(8, EngineContext(FakeClock()), 100.0),
        clock=FakeClock(),
        pending_timeout=10.0,
        count=lambda name: None,
    )


@pytest.fixture
def server() -> ControlServer:
    return _server(wire.compatibility())


def _asked(server: ControlServer, **changes: Any) -> Refused:
    handshake = msgspec.structs.replace(Handshake.of(wire.compatibility()), **changes)
    answer = server.receive(PeerConnection(0, b"peer"), encode(handshake))
    assert isinstance(answer, Refused)
    return answer


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": PROTOCOL_VERSION + 1, "package": OTHER},
        {"compatibility": msgspec.Raw(msgspec.msgpack.encode({"models": 1})), "package": OTHER},
    ],
    ids=["protocol", "key"],
)
def test_both_sides_of_the_control_channel_name_both_versions(
    server: ControlServer, changes: dict[str, Any]
) -> None:
    """The line of the side that is refused, here of the same code, as it was told the values."""
    refused = _asked(server, **changes)
    session = PeerSession("ipc:///nowhere", wire.compatibility(), FakeClock())
    session.receive(encode(refused))
    assert PACKAGE in str(session.failure)
    assert OTHER in str(session.failure)


def test_a_peer_that_does_not_tell_its_version_is_refused_by_its_protocol(
    server: ControlServer,
) -> None:
    refused = _asked(server, protocol=1, package="")
    assert refused.theirs == "1 (an omni-connector that does not tell its version)"


def test_neighbouring_versions_of_one_protocol_shake_hands(server: ControlServer) -> None:
    handshake = msgspec.structs.replace(Handshake.of(wire.compatibility()), package=OTHER)
    raw = msgspec.msgpack.decode(encode(handshake))
    raw["a field of the next version"] = 7
    answer = server.receive(PeerConnection(0, b"peer"), msgspec.msgpack.encode(raw))
    assert isinstance(answer, HandshakeReply)


def asked(release: str) -> tuple[Handshake, CompatibilityKey]:
    """The handshake of a release, and what it says of its KV."""
    raw = (FIXTURES / release / "handoff.request.handshake.bin").read_bytes()
    handshake = decode_request(raw)
    assert isinstance(handshake, Handshake)
    return handshake, handshake.decode_compatibility()


def answered(handshake: Handshake, reader: CompatibilityKey, ours: CompatibilityKey) -> object:
    """What an engine answers to a handshake that says this of the reader's KV."""
    encoded = msgspec.Raw(msgspec.msgpack.encode(reader))
    ask = msgspec.structs.replace(handshake, compatibility=encoded)
    return _server(ours).receive(PeerConnection(0, b"peer"), encode(ask))


@pytest.mark.parametrize("release", RELEASES)
def test_a_version_without_stripes_of_slots_is_refused_by_an_engine_that_has_them(
    release: str,
) -> None:
    """It would take slots of the first rank for all slots."""
    handshake, said = asked(release)
    (group,) = said.groups
    groups = (msgspec.structs.replace(group, replicated=True),)
    reader = msgspec.structs.replace(said, ranks=2, groups=groups)
    ours = msgspec.structs.replace(reader, stripes=2)
    answer = answered(handshake, reader, ours)
    knows_stripes = said.stripes is not msgspec.UNSET
    assert knows_stripes == (release != "0.1.0")
    assert isinstance(answer, HandshakeReply if knows_stripes else Refused)


@pytest.mark.parametrize("release", RELEASES)
def test_a_version_without_shards_of_blocks_is_refused_by_an_engine_that_has_them_and_serves_it(
    release: str,
) -> None:
    handshake, said = asked(release)
    (group,) = said.groups
    latent = msgspec.structs.replace(group, replicated=True, layers="latent", names=msgspec.UNSET)
    reader = msgspec.structs.replace(said, ranks=2, groups=(latent, group))
    ours = msgspec.structs.replace(reader, stripes=1, shards=2)
    assert ours.num_stripes == 2
    answer = answered(handshake, reader, ours)
    knows_shards = said.shards is not msgspec.UNSET
    assert knows_shards == (release != "0.1.0")
    assert isinstance(answer, HandshakeReply if knows_shards else Refused)
    # What it does not know is left out where it decodes our handshake.
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(ours))
    del fields["shards"]
    known = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=CompatibilityKey)
    assert reader.difference(known) is None


def test_a_version_that_knows_stripes_over_all_ranks_alone_refuses_those_of_a_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both as the one that holds slots and as the one that reads."""
    plain = wire.compatibility()
    (group,) = plain.groups
    heads = (msgspec.structs.replace(group, pages=("H1.N16.C64",), copies=(2,)),)
    ours = msgspec.structs.replace(plain, ranks=4, groups=heads, stripes=2)
    ask = msgspec.structs.replace(Handshake.of(ours), package=OTHER)
    said = encode(HandshakeReply(wire.EPOCH, "sha256", ours, ((wire.endpoint(),),) * 4))
    session = PeerSession("ipc:///nowhere", ours, FakeClock())
    session.receive(said)
    assert session.failure is None

    def older(groups: Iterable[GroupShape], ranks: int) -> int:
        return ranks if all(each.replicated for each in groups) else 1

    monkeypatch.setattr(compatibility, "most_stripes", older)
    refused = _server(plain).receive(PeerConnection(0, b"peer"), encode(ask))
    assert isinstance(refused, Refused)
    assert OTHER in refused.theirs
    session = PeerSession("ipc:///nowhere", plain, FakeClock())
    session.receive(said)
    assert "2 stripes of 4 ranks" in str(session.failure)


# Sockets of the host


class NewerAttach(msgspec.Struct, tag="attach"):
    """What another version asks."""

    epoch: bytes
    protocol: int = 9


@pytest.fixture
def listener() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="oc-", dir="/tmp") as name:
        path = Path(name) / f"a-{'0' * 24}.sock"
        made = Listener(msgspec.msgpack.Decoder(shm.Attach), lambda question: (None, None))
        made.add(path)
        yield path
        made.close()


def test_a_newer_question_is_refused_with_a_line_that_names_this_version(listener: Path) -> None:
    deadline = time.monotonic() + 30.0
    connection = Connection(listener, deadline)
    answers = msgspec.msgpack.Decoder(Refusal)
    connection.tell(NewerAttach(wire.EPOCH))
    packet = connection._socket
    packet.settimeout(30.0)
    answer = answers.decode(packet.recv(65536))
    connection.close()
    assert answer.package == PACKAGE
    assert "protocol 9" in answer.reason


@pytest.mark.parametrize("protocol", [2, 3], ids=["same", "newer"])
def test_the_refusal_of_another_version_is_told_with_both(protocol: int) -> None:
    raw = msgspec.msgpack.encode(Refusal("no such thing", protocol=protocol, package=OTHER))
    with pytest.raises(OmniError) as refused:
        read_answer(raw, [], shm.ANSWERS)
    assert PACKAGE in str(refused.value)
    assert OTHER in str(refused.value)


# What lies in memory, in stores and in files


def test_params_of_another_version_are_refused_with_both() -> None:
    params = json.loads(wire.FILES["params.handoff"]())
    with pytest.raises(BadParamsError) as refused:
        parse_remote_prefill({**params, "omni_version": 2, "omni_package": OTHER})
    assert PACKAGE in str(refused.value)
    assert OTHER in str(refused.value)


@pytest.mark.parametrize("name", ["arena.superblock", "index.header"])
def test_memory_of_another_format_is_refused_with_both(name: str) -> None:
    raw = bytearray(wire.FILES[name]())
    raw[8:12] = (9).to_bytes(4, "little")
    with pytest.raises(OmniError, match="format version differs") as refused:
        _reader(name)(bytes(raw))
    assert f"1 ({PACKAGE})" in str(refused.value)
    assert "9 (another version of omni-connector)" in str(refused.value)


def test_a_manifest_of_another_format_is_refused_with_both() -> None:
    raw = wire.FILES["object.manifest"]()
    with pytest.raises(IncompatiblePeerError) as refused:
        _reader("object.manifest")(b"omniobj2" + raw[8:])
    assert f"1 ({PACKAGE})" in str(refused.value)
    assert "2 (another version" in str(refused.value)


def test_a_status_file_of_another_format_is_skipped_with_both() -> None:
    said = json.loads(wire.FILES["status"]())
    said |= {"format": FORMAT + 1, "omni_connector": OTHER.split()[1]}
    with tempfile.TemporaryDirectory() as name:
        file = StatusFile(Path(name))
        file.write(json.dumps(said).encode())
        found, (remark,) = read_status(Path(name))
        file.close()
    assert not found
    assert PACKAGE in remark
    assert OTHER in remark


def test_the_entries_of_another_version_are_a_miss() -> None:
    """A store outlives versions: the form of an entry is in its key, and in its trailer."""
    raw = wire.FILES["store.entry"]()
    with pytest.raises(IntegrityError):
        _entry(raw.replace(b"omnikv-1", b"omnikv-2"))
