# SPDX-License-Identifier: Apache-2.0
"""The reading side of shared memory: a peer's arena, mapped."""

import os
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import IncompatiblePeerError, ProtocolError
from omni_connector.memory.arena import ArenaView
from omni_connector.memory.arena_format import SlotHeader
from omni_connector.net.unix import PROTOCOL, Connection, Refusal, require_protocol
from omni_connector.transports.base import Endpoint, RemoteArena, check_destination


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Asks for the arena of this epoch; answered with `Grant` and its memfd."""

    epoch: bytes
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """The memfd beside this message is the arena of this epoch."""

    epoch: bytes
    n_slots: int
    slot_bytes: int


ANSWERS: Final[msgspec.msgpack.Decoder[Grant | Refusal]] = msgspec.msgpack.Decoder(Grant | Refusal)
"""What `Attach` may be answered with."""


def map_arena(connection: Connection, endpoint: Endpoint, deadline: float) -> ArenaView:
    """Ask for an arena's memfd, check it and map it.

    Args:
        connection: to its owner.
        endpoint: what the arena must agree with.
        deadline: `time.monotonic()` by which the answer must be there.

    Raises:
        PeerUnreachableError, PeerRefusedError, ProtocolError: as `Connection.ask`.
        PeerRefusedError, ProtocolError, IncompatiblePeerError: as `ArenaView.open`.
    """
    grant, descriptor = connection.ask(Attach(endpoint.epoch), ANSWERS, deadline, with_fd=True)
    assert descriptor is not None
    try:
        granted = grant.epoch, grant.n_slots, grant.slot_bytes
        wanted = endpoint.epoch, endpoint.n_slots, endpoint.slot_bytes
        if granted != wanted:
            raise IncompatiblePeerError("arena", wanted, granted)
        return ArenaView.open(
            descriptor, epoch=grant.epoch, n_slots=grant.n_slots, slot_bytes=grant.slot_bytes
        )
    finally:
        os.close(descriptor)


class MappedArena(RemoteArena):
    """A peer's arena in our address space. It outlives its owner until it is closed."""

    def __init__(self, endpoint: Endpoint, view: ArenaView, connection: Connection) -> None:
        self.endpoint = endpoint
        self._view = view
        self._connection = connection

    @property
    def slots(self) -> NDArray[np.uint8]:
        return self._view.slots

    @property
    def alive(self) -> bool:
        return self._connection.alive

    def verify(self, slot: int, generation: int) -> SlotHeader:
        try:
            return self._view.verify(slot, generation)
        except IndexError as error:
            raise ProtocolError(f"{self.endpoint.address}: {error}") from error

    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        slots = self.slots
        check_destination(dst, len(slot_ids), slots.shape[1])
        for slot in slot_ids:
            if not 0 <= slot < len(slots):
                raise ProtocolError(f"{self.endpoint.address} has no slot {slot}")
        for row, slot in zip(dst, slot_ids, strict=True):
            np.copyto(row, slots[slot, : dst.shape[1]])

    def close(self) -> None:
        self._connection.close()
        self._view.close()
