# SPDX-License-Identifier: Apache-2.0
"""What a transport has to do with peers: meet them, refuse wrong ones, see them go."""

import threading

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.errors import (
    IncompatiblePeerError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.testing.conformance.base import (
    ATTACH_S,
    N_SLOTS,
    SLOT_BYTES,
    ArenaFixtures,
    OpenTransport,
)
from omni_connector.testing.conformance.slots import publish, read
from omni_connector.transports.base import Endpoint


class PeerConformance(ArenaFixtures):
    """Attaching to a peer, and the ends of both."""

    def test_attach_to_a_closed_peer_fails(
        self, open_connector: OpenTransport, arena: Arena
    ) -> None:
        owner, reader = open_connector(), open_connector()
        endpoint = owner.export(arena, "gone")
        owner.close()
        with pytest.raises(PeerUnreachableError):
            reader.attach(endpoint, timeout=ATTACH_S)

    def test_withdrawn_arena_cannot_be_attached(
        self, open_connector: OpenTransport, arena: Arena
    ) -> None:
        owner, reader = open_connector(), open_connector()
        endpoint = owner.export(arena, "withdrawn")
        kept = reader.attach(endpoint, timeout=ATTACH_S)
        publish(arena, 0, 1, b"content")
        owner.withdraw(endpoint)
        owner.withdraw(endpoint)
        with pytest.raises((PeerUnreachableError, PeerRefusedError)):
            reader.attach(endpoint, timeout=ATTACH_S)
        if reader.supports_mapping:
            assert read(kept, 0, 1).tobytes() == b"content"
        else:
            with pytest.raises(TransportError):
                read(kept, 0, 1)
        kept.close()

    def test_withdrawn_name_can_be_used_again(
        self, open_connector: OpenTransport, arena: Arena
    ) -> None:
        owner, reader = open_connector(), open_connector()
        owner.withdraw(owner.export(arena, "name"))
        with Arena.create(1, 4096) as other:
            publish(other, 0, 1, b"other")
            with reader.attach(owner.export(other, "name"), timeout=ATTACH_S) as remote:
                assert read(remote, 0, 1).tobytes() == b"other"

    def test_name_in_use_is_refused(self, open_connector: OpenTransport, arena: Arena) -> None:
        owner = open_connector()
        owner.export(arena, "name")
        with Arena.create(1, 4096) as other:
            for connector in (owner, open_connector()) if owner.supports_mapping else (owner,):
                with pytest.raises(TransportError):
                    connector.export(other, "name")

    def test_other_epoch_is_refused(
        self, open_connector: OpenTransport, endpoint: Endpoint
    ) -> None:
        other = msgspec.structs.replace(endpoint, epoch=bytes(16))
        with pytest.raises((PeerRefusedError, IncompatiblePeerError)):
            open_connector().attach(other, timeout=ATTACH_S)

    def test_other_geometry_is_refused(
        self, open_connector: OpenTransport, endpoint: Endpoint
    ) -> None:
        reader = open_connector()
        for other in (
            msgspec.structs.replace(endpoint, n_slots=N_SLOTS + 1),
            msgspec.structs.replace(endpoint, slot_bytes=SLOT_BYTES * 2),
            msgspec.structs.replace(endpoint, n_slots=N_SLOTS * 2, slot_bytes=SLOT_BYTES // 2),
        ):
            with pytest.raises((PeerRefusedError, IncompatiblePeerError, ProtocolError)):
                reader.attach(other, timeout=ATTACH_S)

    def test_endpoint_of_another_transport_is_refused(
        self, open_connector: OpenTransport, endpoint: Endpoint
    ) -> None:
        with pytest.raises(PeerRefusedError):
            open_connector().attach(
                msgspec.structs.replace(endpoint, transport="pigeon"), timeout=ATTACH_S
            )

    @pytest.mark.parametrize("address", ["", "relative", "/nonexistent/a", "a b", "x" * 1000])
    def test_nonsense_address_is_refused(
        self, open_connector: OpenTransport, endpoint: Endpoint, address: str
    ) -> None:
        with pytest.raises((PeerRefusedError, PeerUnreachableError, ProtocolError)):
            open_connector().attach(
                msgspec.structs.replace(endpoint, address=address), timeout=ATTACH_S
            )

    def test_death_of_the_owner_is_seen(self, open_connector: OpenTransport, arena: Arena) -> None:
        owner = open_connector()
        with open_connector().attach(owner.export(arena, "mortal"), timeout=ATTACH_S) as remote:
            assert remote.alive
            owner.close()
            if not owner.supports_mapping:
                with pytest.raises(TransportError):
                    remote.verify(0, 1)
            assert not remote.alive

    def test_many_readers_attach_at_once(
        self, open_connector: OpenTransport, arena: Arena, endpoint: Endpoint
    ) -> None:
        publish(arena, 0, 1, b"content")
        reader = open_connector()
        found: list[bytes] = []

        def attach() -> None:
            with reader.attach(endpoint, timeout=ATTACH_S) as remote:
                found.append(read(remote, 0, 1).tobytes())

        threads = [threading.Thread(target=attach) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [b"content"] * 16

    def test_close_twice(self, open_connector: OpenTransport, arena: Arena) -> None:
        connector = open_connector()
        endpoint = connector.export(arena, "name")
        remote = connector.attach(endpoint, timeout=ATTACH_S)
        for _ in range(2):
            remote.close()
            connector.close()
        assert connector.health()["status"] == "closed"

    def test_closed_transport_exports_nothing(
        self, open_connector: OpenTransport, arena: Arena
    ) -> None:
        connector = open_connector()
        connector.close()
        with pytest.raises(TransportError):
            connector.export(arena, "name")

    def test_health(self, open_connector: OpenTransport) -> None:
        connector = open_connector()
        health = connector.health()
        assert health["status"] == "healthy"
        assert health["transport"] == connector.transport
