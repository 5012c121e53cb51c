# SPDX-License-Identifier: Apache-2.0
"""`ArenaTransport`, by which peers read the arenas of one another.

Three verbs: `export` and `withdraw` of an arena that this process owns, `attach` to that of a peer.
`close` ends them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import ChecksumError, TransportError
from omni_connector.memory.arena import Arena
from omni_connector.memory.arena_format import EPOCH_BYTES, PAGE_BYTES, SlotHeader

MAX_ADDRESS_BYTES: Final = 1024


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an exported arena is, as sent to peers.

    Attributes:
        transport: registered name of the transport that exported it.
        address: what that transport needs to reach it.
        epoch: the 16 bytes that name this arena; another arena at the address is refused.
        n_slots: its number of slots.
        slot_bytes: bytes of each, a multiple of the page size.

    Raises:
        ValueError: a field is out of range (msgspec.ValidationError while decoding).
    """

    transport: str
    address: str
    epoch: bytes
    n_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if len(self.epoch) != EPOCH_BYTES:
            raise ValueError(f"epoch must have {EPOCH_BYTES} bytes, not {len(self.epoch)}")
        if self.n_slots < 1:
            raise ValueError(f"n_slots must be positive, not {self.n_slots}")
        if self.slot_bytes < 1 or self.slot_bytes % PAGE_BYTES:
            raise ValueError(f"slot_bytes must be pages of {PAGE_BYTES}, not {self.slot_bytes}")
        if len(self.address) > MAX_ADDRESS_BYTES:
            raise ValueError(f"an address of {len(self.address)} characters is too long")
        if not self.address.isprintable():  # it stands in system calls, and in logs
            raise ValueError(f"{self.address!r} is no address")


class Fetched:
    """Slots of a peer that were copied here, and are what was published.

    Attributes:
        rows: (n, length) uint8, contiguous; until `release`.
        headers: of each slot, as found after the copy.
    """

    def __init__(
        self,
        rows: NDArray[np.uint8],
        headers: list[SlotHeader],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows = rows
        self.headers = headers
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let go of the memory of `rows`. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class RemoteArena(ABC):
    """A peer's arena, attached for reading. One thread may close it while others read."""

    endpoint: Endpoint

    @property
    def slots(self) -> NDArray[np.uint8]:
        """The peer's bytes, mapped read-only: (n_slots, slot_bytes).

        Raises:
            TransportError: it is closed, or the transport does not map (`supports_mapping`).
        """
        raise TransportError(f"transport {self.endpoint.transport!r} does not map a peer's arena")

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the owner is still there. Cheap; False never becomes True again.

        Where nothing but the network connects the two, its end shows with the next read.
        """

    @abstractmethod
    def verify(self, slot: int, generation: int) -> SlotHeader:
        """The header of a slot that is published with exactly this generation.

        Raises:
            StaleSlotError: it is not, or not any more.
            ProtocolError: the arena has no such slot.
            IntegrityError: the header makes no sense.
            TransportError: it cannot be read.
        """

    @abstractmethod
    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        """Copy the first bytes of slots, unverified: `dst` is (len(slot_ids), width) uint8.

        Raises:
            ValueError: `dst` has another shape or type, or is wider than a slot.
            ProtocolError: the arena has no such slot.
            TransportError: the bytes cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the peer's arena. Idempotent."""

    def fetch(
        self, slot_ids: Sequence[int], generations: Sequence[int], length: int, *, timeout: float
    ) -> Fetched:
        """Copies of several slots, each published with its generation before and after.

        Their checksums are in the headers and not compared: who copies the bytes on does that.

        Args:
            slot_ids: which slots.
            generations: the generation of each.
            length: bytes of each.
            timeout: seconds.

        Raises:
            SlotPendingError: one is not published yet.
            StaleSlotError, ProtocolError, IntegrityError, TransportError: as `verify`.
            ValueError: `length` is more than a slot has.
        """
        refs = list(zip(slot_ids, generations, strict=True))
        for slot, generation in refs:
            self.verify(slot, generation)
        rows: NDArray[np.uint8] = np.empty((len(refs), length), np.uint8)
        self.read_into(slot_ids, rows)
        return Fetched(rows, [self.verify(slot, generation) for slot, generation in refs])

    def read(self, slot: int, generation: int) -> NDArray[np.uint8]:
        """A verified copy of the content of one slot: (length,) uint8.

        Raises:
            ChecksumError: the bytes are not those that were published.
            StaleSlotError, ProtocolError, IntegrityError, TransportError: as `verify`.
        """
        length = self.verify(slot, generation).length
        content: NDArray[np.uint8] = np.empty(length, np.uint8)
        self.read_into([slot], content.reshape(1, length))
        # What the second header says counts: the first may have been read half way through.
        header = self.verify(slot, generation)
        found = xxhash.xxh3_64_intdigest(content.data)
        if header.length != length or header.checksum != found:
            raise ChecksumError(
                f"slot {slot} generation {generation} at {self.endpoint.address}: checksum "
                f"{found:#018x} over {length} bytes, published {header.checksum:#018x}"
            )
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ArenaTransport(ABC):
    """A way for peers to read an arena. All methods may be called from any thread.

    Attributes:
        transport: the registered name, as it stands in endpoints and in the configuration.
    """

    transport: str

    @property
    def supports_mapping(self) -> bool:
        """Whether an attached arena can be read in place, through `RemoteArena.slots`."""
        return False

    @abstractmethod
    def export(self, arena: Arena, name: str) -> Endpoint:
        """Let peers read an arena. It stays the caller's, who withdraws before closing it.

        Args:
            arena: an arena of this process.
            name: unique in this connector, and stable, for operators to see; where the transport
                finds arenas by name, unique among the exporters of a namespace.

        Raises:
            TransportError: the name is taken, or the connector is closed.
        """

    @abstractmethod
    def withdraw(self, endpoint: Endpoint) -> None:
        """Let nobody attach any more. Peers that map it keep what they have. Idempotent."""

    @abstractmethod
    def attach(self, endpoint: Endpoint, *, timeout: float) -> RemoteArena:
        """Get at a peer's arena, within `timeout` seconds.

        Raises:
            PeerUnreachableError: nobody is there, or no answer came in time.
            PeerRefusedError: it is not a peer to talk to, or it refuses us, or it has another
                arena by now (another epoch).
            ProtocolError: what it says makes no sense.
        """

    def obstacle(self, endpoint: Endpoint) -> str | None:
        """Why this transport cannot read an arena, as far as that shows without trying."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Withdraw everything and free it, in bounded time. Idempotent."""

    def health(self) -> dict[str, Any]:
        """`status` ("healthy", or what is wrong), `transport`, and the transport's details."""
        return {"status": "healthy", "transport": self.transport, **self.details()}

    def details(self) -> dict[str, Any]:
        """What `health` adds for this transport; a `status` in it wins."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
