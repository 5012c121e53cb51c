# SPDX-License-Identifier: Apache-2.0
"""`ArenaTransport`: a way for peers to read each other's arenas.

`export` and `withdraw` are for an arena that this process owns, `attach` is for that of a peer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.format import EPOCH_BYTES, ArenaGeometry, PublishedSlots, SlotHeader
from omni_connector.arena.pinning import Pins
from omni_connector.errors import ProtocolError, TransportError
from omni_connector.net.peers import is_loopback

MAX_ADDRESS_BYTES: Final = 1024
"""Longest address of an endpoint, in bytes; it bounds messages."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an exported arena is, as sent to peers.

    Attributes:
        transport: registered name of the transport that exported it.
        address: what that transport needs to reach it.
        epoch: the 16 bytes that name this arena; another arena at the address is refused.
        n_slots: the arena's number of slots.
        slot_bytes: bytes of each slot, a multiple of the page size.

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
        size = ArenaGeometry(self.n_slots, self.slot_bytes).total_bytes
        if size >= 1 << 63:
            raise ValueError(f"no file has {size} bytes")
        if len(self.address) > MAX_ADDRESS_BYTES:
            raise ValueError(f"an address of {len(self.address)} characters is too long")
        if not self.address.isprintable():  # it is passed to system calls, and logged
            raise ValueError(f"{self.address!r} is no address")

    @classmethod
    def of(cls, arena: Arena, transport: str, address: str) -> Self:
        """The endpoint of an arena that this transport exports at this address."""
        return cls(
            transport=transport,
            address=address,
            epoch=arena.epoch,
            n_slots=arena.n_slots,
            slot_bytes=arena.slot_bytes,
        )


def check_destination(dst: NDArray[np.uint8], n_slots: int, slot_bytes: int) -> None:
    """Raise ValueError unless `n_slots` slots fit into `dst`; see `RemoteArena.read_into`."""
    if dst.dtype != np.uint8 or dst.ndim != 2 or len(dst) != n_slots:
        raise ValueError(f"dst is {dst.dtype}{dst.shape}, wanted uint8 ({n_slots}, width)")
    if dst.shape[1] > slot_bytes:
        raise ValueError(f"dst is {dst.shape[1]} bytes wide, a slot {slot_bytes}")


class Fetched:
    """Copies of a peer's slots, which are as they were published.

    Attributes:
        rows: (n, length) uint8, contiguous; valid until `release`.
        headers: the header of each slot, read after the copy.
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
            TransportError: the arena is closed, or not mapped (`supports_mapping`).
        """
        raise TransportError(f"transport {self.endpoint.transport!r} does not map a peer's arena")

    def descriptor(self) -> int:
        """A descriptor of the memory that is mapped, which the caller closes.

        Raises:
            TransportError: the arena is closed, or not mapped (`supports_mapping`).
        """
        raise TransportError(f"transport {self.endpoint.transport!r} does not map a peer's arena")

    def pin_with(self, pins: Pins) -> None:
        """Have a device read the slots itself, where they are mapped, until `close`. Called before
        they are read."""
        return

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the owner is still there. Cheap; False never becomes True again.

        Over the network, the owner's end may show only with the next read.
        """

    @abstractmethod
    def verify(self, slot: int, generation: int) -> SlotHeader:
        """The header of a slot that is published with exactly this generation.

        Raises:
            StaleSlotError: it is not published so, or not any more.
            ProtocolError: the arena has no such slot.
            IntegrityError: the header makes no sense.
            TransportError: it cannot be read.
        """

    def verify_all(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64]
    ) -> PublishedSlots:
        """What `verify` says of several slots `(n,)`, with their generations `(n,)`.

        Raises:
            As `verify`, of one of them.
        """
        pairs = zip(slots.tolist(), generations.tolist(), strict=True)
        return PublishedSlots.of([self.verify(slot, generation) for slot, generation in pairs])

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

    def abandon(self) -> None:
        """As `close`, in a process that was forked; takes no lock, which may be held for ever."""
        self.close()

    def fetch(
        self, slot_ids: Sequence[int], generations: Sequence[int], length: int, *, timeout: float
    ) -> Fetched:
        """Copies of several slots, each published with its generation before and after.

        The checksums in the headers are not compared here: the caller does so as it copies on.

        Args:
            slot_ids: which slots.
            generations: the generation of each.
            length: bytes of each.
            timeout: seconds.

        Raises:
            SlotPendingError: a slot is not published yet.
            StaleSlotError, ProtocolError, IntegrityError, TransportError: as `verify`.
            ValueError: `length` is more than a slot has.
        """
        refs = list(zip(slot_ids, generations, strict=True))
        for slot, generation in refs:
            self.verify(slot, generation)
        rows: NDArray[np.uint8] = np.empty((len(refs), length), np.uint8)
        self.read_into(slot_ids, rows)
        return Fetched(rows, [self.verify(slot, generation) for slot, generation in refs])

    def take(self, ranges: Sequence[tuple[int, int]], *, timeout: float) -> NDArray[np.uint8]:
        """Bytes of the slots in one array of its own, unverified and joined.

        Args:
            ranges: (offset from the start of the first slot, number) of bytes.
            timeout: seconds.

        Raises:
            ProtocolError: the arena has no such bytes.
            TransportError: the bytes cannot be read.
        """
        content = self.slots.reshape(-1)
        if any(at < 0 or size < 0 or at + size > content.size for at, size in ranges):
            raise ProtocolError(f"{self.endpoint.address} has {content.size} bytes")
        return np.concatenate([content[at : at + size] for at, size in ranges])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Site(NamedTuple):
    """What a transport is told about its engine.

    Attributes:
        namespace: engines that share it find each other.
        host: address of this machine that peers reach; None where none is configured.
        allows: whether a host may be connected to.
        peers_family: `IPv4` or `IPv6` where all hosts of `peers` are addresses of that family.
    """

    namespace: str = "default"
    host: str | None = None
    allows: Callable[[str], bool] = is_loopback
    peers_family: str | None = None


class NoSettings(msgspec.Struct, frozen=True):
    """The settings of a transport that has none."""


class Service(ABC):
    """A transport or connector: it reports its health, and is closed.

    Attributes:
        transport: the registered name of the transport, or the name of the carrier.
    """

    transport: str

    @abstractmethod
    def close(self) -> None:
        """Withdraw everything and free it, in bounded time. Idempotent."""

    def health(self) -> dict[str, Any]:
        """`status` ("healthy", or what is wrong), `transport`, and `details`."""
        return {"status": "healthy", "transport": self.transport, **self.details()}

    def details(self) -> dict[str, Any]:
        """What `health` reports beyond that; a `status` in it takes precedence."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ArenaInPlace(RemoteArena):
    """An arena that is mapped by this process, and read in place.

    Args:
        view: of the arena.
    """

    _view: Arena | ArenaView

    def __init__(self, endpoint: Endpoint, view: Arena | ArenaView) -> None:
        self.endpoint = endpoint
        self._view = view

    @property
    def slots(self) -> NDArray[np.uint8]:
        return self._view.slots

    def verify(self, slot: int, generation: int) -> SlotHeader:
        try:
            return self._view.verify(slot, generation)
        except IndexError as error:
            raise ProtocolError(f"{self.endpoint.address}: {error}") from error

    def verify_all(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64]
    ) -> PublishedSlots:
        try:
            return self._view.verify_all(slots, generations)
        except IndexError as error:
            raise ProtocolError(f"{self.endpoint.address}: {error}") from error


class ArenaTransport(Service):
    """A way for peers to read an arena. All methods may be called from any thread.

    Attributes:
        transport: its name in endpoints and in the configuration.
        Settings: a struct of the settings that `transport_config` may have, typed, with defaults.
        nearness: its place among the candidates of `auto`, the nearest first: shared memory has 0,
            the Transfer Engine 100. One with None is used only where its name is configured.
        beyond_host: whether it reaches peers on other hosts. `auto` uses such a transport only
            where the engine listens to other hosts or may connect to them.
        why_near: why it is the nearest to a peer, for operators.
    """

    Settings: ClassVar[type[msgspec.Struct]] = NoSettings
    nearness: ClassVar[int | None] = None
    beyond_host: ClassVar[bool] = False
    why_near: ClassVar[str] = "it is the nearest"

    @classmethod
    def create(cls, settings: Any, site: Site) -> "ArenaTransport":
        """Make a transport for an engine; passes the namespace and the settings by their names.

        Args:
            settings: an instance of `Settings`.
            site: the engine.

        Raises:
            ConfigError, MissingDependencyError: a setting is out of range, or a package is missing.
        """
        return cls(namespace=site.namespace, **msgspec.structs.asdict(settings))  # type: ignore[call-arg]

    @property
    def supports_mapping(self) -> bool:
        """Whether an attached arena can be read in place, through `RemoteArena.slots`."""
        return False

    @abstractmethod
    def export(self, arena: Arena, name: str) -> Endpoint:
        """Let peers read an arena. The caller withdraws it before closing it.

        Args:
            arena: an arena of this process.
            name: a stable name that operators see. It is unique in this transport; where the
                transport finds arenas by name, among all exporters of the namespace.

        Raises:
            TransportError: the name is taken, or the transport is closed.
        """

    @abstractmethod
    def withdraw(self, endpoint: Endpoint) -> None:
        """Let nobody attach any more. Peers that map it keep what they have. Idempotent."""

    def hand_on(self, arena: RemoteArena) -> Endpoint | None:
        """Let peers attach, at this process, an arena that it has attached, as its owner has gone.
        `withdraw` ends that.

        Returns:
            Where peers attach it; None where this transport cannot hand it on.
        """
        return None

    @abstractmethod
    def attach(self, endpoint: Endpoint, *, timeout: float) -> RemoteArena:
        """Attach a peer's arena, within `timeout` seconds.

        Raises:
            PeerUnreachableError: nobody is there, or no answer came in time.
            PeerRefusedError: we may not talk to this peer, or it refuses us, or it has another
                arena by now (another epoch).
            ProtocolError: the peer's answer is malformed.
        """

    def obstacle(self, endpoint: Endpoint) -> str | None:
        """Why this transport cannot read an arena, as far as can be said without trying."""
        return None
