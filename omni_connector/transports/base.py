# SPDX-License-Identifier: Apache-2.0
"""`ArenaTransport`, by which peers read the arenas of one another.

Three verbs: `export` and `withdraw` of an arena that this process owns, `attach` to that of a peer.
`close` ends them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import ProtocolError, TransportError
from omni_connector.memory.arena import Arena
from omni_connector.memory.arena_format import EPOCH_BYTES, PAGE_BYTES, SlotHeader
from omni_connector.net.peers import is_loopback

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

    @classmethod
    def of(cls, arena: Arena, transport: str, address: str) -> Self:
        """That of an arena, which this transport exports at this address."""
        return cls(
            transport=transport,
            address=address,
            epoch=arena.epoch,
            n_slots=arena.n_slots,
            slot_bytes=arena.slot_bytes,
        )


def check_destination(dst: NDArray[np.uint8], n_slots: int, slot_bytes: int) -> None:
    """Raise ValueError unless so many slots can be read into `dst`; see `RemoteArena.read_into`."""
    if dst.dtype != np.uint8 or dst.ndim != 2 or len(dst) != n_slots:
        raise ValueError(f"dst is {dst.dtype}{dst.shape}, wanted uint8 ({n_slots}, width)")
    if dst.shape[1] > slot_bytes:
        raise ValueError(f"dst is {dst.shape[1]} bytes wide, a slot {slot_bytes}")


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

    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        """Copy the first bytes of slots, unverified: `dst` is (len(slot_ids), width) uint8.

        A transport that does not map overrides this.

        Raises:
            ValueError: `dst` has another shape or type, or is wider than a slot.
            ProtocolError: the arena has no such slot.
            TransportError: the bytes cannot be read.
        """
        slots = self.slots
        check_destination(dst, len(slot_ids), slots.shape[1])
        for slot in slot_ids:
            if not 0 <= slot < len(slots):
                raise ProtocolError(f"{self.endpoint.address} has no slot {slot}")
        for row, slot in zip(dst, slot_ids, strict=True):
            np.copyto(row, slots[slot, : dst.shape[1]])

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

    def take(self, slot_ids: Sequence[int], length: int, *, timeout: float) -> NDArray[np.uint8]:
        """Bytes of several slots as one, unverified: (length,) uint8, in memory of their own.

        Args:
            slot_ids: all but the last are taken whole.
            length: bytes in all.
            timeout: seconds.

        Raises:
            ProtocolError, TransportError: as `read_into`.
        """
        rows: NDArray[np.uint8] = np.empty((len(slot_ids), self.endpoint.slot_bytes), np.uint8)
        self.read_into(slot_ids, rows)
        return rows.reshape(-1)[:length]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Site(NamedTuple):
    """What a transport is told of the engine that it is for.

    Attributes:
        namespace: engines that share it find each other.
        host: address of this machine that peers reach; None where none is configured.
        allows: whether a host may be connected to.
    """

    namespace: str = "default"
    host: str | None = None
    allows: Callable[[str], bool] = is_loopback


class NoSettings(msgspec.Struct, frozen=True):
    """Of a transport that has nothing to configure."""


class Service(ABC):
    """What is opened to reach peers, says how it is, and is closed.

    Attributes:
        transport: by which peers are reached: its registered name.
    """

    transport: str

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


class ArenaTransport(Service):
    """A way for peers to read an arena. All methods may be called from any thread.

    Attributes:
        transport: as it stands in endpoints and in the configuration.
        Settings: a struct of what `transport_config` may say to it; typed, with defaults.
        nearness: its place among the candidates of `auto`, the nearest first: shared memory has 0,
            the Transfer Engine 100. None: it is taken only where its name is configured.
        beyond_host: whether it reaches peers on other hosts. `auto` takes such a one only where
            the engine listens to other hosts or may connect to them.
        why_near: what it tells operators of a peer that it reads as the nearest.
    """

    Settings: ClassVar[type[msgspec.Struct]] = NoSettings
    nearness: ClassVar[int | None] = None
    beyond_host: ClassVar[bool] = False
    why_near: ClassVar[str] = "it is the nearest"

    @classmethod
    def create(cls, settings: Any, site: Site) -> "ArenaTransport":
        """One for an engine: called with its namespace and its settings, each by its name.

        Args:
            settings: an instance of `Settings`.
            site: of the engine.

        Raises:
            ConfigError, MissingDependencyError: a setting is out of range, or something is missing.
        """
        return cls(namespace=site.namespace, **msgspec.structs.asdict(settings))  # type: ignore[call-arg]

    @property
    def supports_mapping(self) -> bool:
        """Whether an attached arena can be read in place, through `RemoteArena.slots`."""
        return False

    @abstractmethod
    def export(self, arena: Arena, name: str) -> Endpoint:
        """Let peers read an arena. It stays the caller's, who withdraws before closing it.

        Args:
            arena: an arena of this process.
            name: unique in this transport, and stable, for operators to see; where the transport
                finds arenas by name, unique among the exporters of a namespace.

        Raises:
            TransportError: the name is taken, or the transport is closed.
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
