# SPDX-License-Identifier: Apache-2.0
"""`OmniConnector`, the interface of every transport.

A transport does two things, by three verbs each. It lets peers read an arena that this process
owns (`export`, `withdraw`, `attach`), and it passes whole objects under keys (`store_object`,
`load_object`, `drop_objects`). `close` ends both. What users call, `put`, `get`, `cleanup` and
`health`, is written here once, on those verbs.
"""

import hashlib
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import ChecksumError, OmniError, TransportError
from omni_connector.transports import codec
from omni_connector.transports.arena import Arena
from omni_connector.transports.arena_format import EPOCH_BYTES, PAGE_BYTES, SlotHeader

logger = logging.getLogger(__name__)

MAX_ADDRESS_BYTES: Final = 1024


def check_times(ttl_s: float, *timeouts: float) -> None:
    """Raise ValueError unless these can be a time to live, and seconds to wait."""
    if math.isnan(ttl_s):
        raise ValueError("buffer_ttl_seconds must be a number, not nan")
    if not all(0 < each < math.inf for each in timeouts):
        raise ValueError("timeouts must be positive, and not infinite")


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


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The name of an object: the stages it travels between, and the caller's key."""

    from_stage: str
    to_stage: str
    key: str

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for the key, whatever its length and characters."""
        parts = (part.encode("utf-8", "surrogatepass") for part in self._parts())
        return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()

    def mentions(self, request_id: str) -> bool:
        """Whether the key is of this request: it is the id, or the id stands in it, whole.

        Ids are told apart where a character ends them that is no letter, digit, `-` or `.`:
        `req-1` is not in `req-10`, nor in `req-1-0`. Stage and rank numbers that the key
        formats `omni_{from}_to_{to}_kv_cache_{id}` and `{id}_{from}_0_{rank}_{rank}` put
        around an id are no ids.
        """
        if not request_id or request_id not in self.key:
            return False
        if request_id == self.key:
            return True
        start, end = re.escape(self.from_stage), re.escape(self.to_stage)
        own = re.sub(rf"\Aomni_{start}_to_{end}_kv_cache_", "", self.key)
        own = re.sub(rf"(?<=.)_{start}_0_\d+_\d+\Z", "", own, flags=re.DOTALL)
        inner = r"[^\W_]|[-.]"
        before = rf"(?<!{inner})" if re.match(inner, request_id[0]) else ""
        after = rf"(?!{inner})" if re.match(inner, request_id[-1]) else ""
        return re.search(before + re.escape(request_id) + after, own) is not None

    def _parts(self) -> tuple[str, str, str]:
        return self.from_stage, self.to_stage, self.key

    def __str__(self) -> str:
        key = self.key if len(self.key) <= 80 else f"{self.key[:77]}..."
        return f"{key!r} from stage {self.from_stage} to {self.to_stage}"


class OmniConnector(ABC):
    """A transport. Subclasses give the verbs; all methods may be called from any thread.

    Attributes:
        transport: the registered name, as it stands in endpoints and in the configuration.
    """

    transport: str

    @property
    def supports_mapping(self) -> bool:
        """Whether an attached arena can be read in place, through `RemoteArena.slots`."""
        return False

    @property
    def supports_raw_data(self) -> bool:
        """Whether `put` sends one tensor from its device's memory, without a copy on the host.

        Any transport takes tensors; where this is False they pass through the host's memory.
        """
        return False

    @property
    def is_store(self) -> bool:
        """Whether objects outlive the process that put them."""
        return False

    @property
    def object_timeout(self) -> float:
        """Seconds that one `get` waits for peers to answer."""
        return 5.0

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
    def store_object(self, key: ObjectKey, parts: Sequence[memoryview]) -> dict[str, Any]:
        """Keep the concatenated parts under a key, in place of what was there.

        Returns:
            Metadata that lets `load_object` find it faster: msgpack builtins, a few hundred
            bytes.

        Raises:
            ArenaFullError: there is no room.
            TransportError: the connector is closed, or the store fails.
        """

    @abstractmethod
    def load_object(
        self, key: ObjectKey, metadata: Mapping[str, Any] | None, *, timeout: float
    ) -> memoryview | None:
        """The bytes under a key, verified, in memory of their own, aligned to 64 bytes or more.

        None where nobody has them (yet, or any more); the newest where several do.

        Args:
            key: what to look for.
            metadata: what `store_object` returned, if it came along; from a peer, so untrusted.
            timeout: seconds for peers to answer.

        Raises:
            TransportError, IntegrityError, ProtocolError: somebody has them, but they cannot
                be had.
        """

    @abstractmethod
    def drop_objects(self, request_id: str) -> int:
        """Free the objects that this connector stored for a request (`ObjectKey.mentions`).

        Returns:
            How many there were.
        """

    @abstractmethod
    def close(self) -> None:
        """Withdraw everything and free it, in bounded time. Idempotent."""

    def details(self) -> dict[str, Any]:
        """What `health` adds for this transport; a `status` in it wins."""
        return {}

    def put(
        self, from_stage: str | int, to_stage: str | int, put_key: str, data: object
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Make an object available to another stage, in place of one put under the key before.

        It stays until `cleanup`, `close` or the end of this process. Where room is
        limited, a later `put` that finds none may evict what was got, never what was not.

        Args:
            from_stage: the stage that sends.
            to_stage: the stage that will get it.
            put_key: any string.
            data: bytes, bytearray or memoryview, which arrive as bytes; `codec.Pieces`; or
                torch tensors, numpy arrays, None, bool, int, float, str, bytes, and lists,
                tuples and dicts of these (`codec` says how they arrive). It must not change
                until `put` returns.

        Returns:
            Whether it worked, the size in bytes, and metadata for `get` (None on failure).
            On failure (no room, closed) the log says why.

        Raises:
            TypeError: there is something else in `data`; the message says where.
        """
        key = ObjectKey(str(from_stage), str(to_stage), put_key)
        parts = codec.encode(data)
        size = codec.size_of(parts)
        try:
            metadata = self.store_object(key, parts)
        except OmniError as error:
            logger.warning("put of %s (%d bytes) failed: %s", key, size, error)
            return False, 0, None
        return True, size, metadata

    def get(
        self,
        from_stage: str | int,
        to_stage: str | int,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> tuple[Any, int] | None:
        """An object that another stage, or this one, has put; does not wait for it to be put.

        Args:
            from_stage: the stage that sent it.
            to_stage: the stage it was sent to.
            get_key: the key it was put under.
            metadata: what `put` returned, if it came along.

        Returns:
            The object and its size in bytes; None when it is not there, or not yet, or its
            sender is gone, or it could not be had (the log then says why). Its tensors lie in
            one buffer, which is freed with the last of them.
        """
        key = ObjectKey(str(from_stage), str(to_stage), get_key)
        try:
            content = self.load_object(key, metadata, timeout=self.object_timeout)
            return None if content is None else codec.decode(content)
        except OmniError as error:
            logger.warning("get of %s failed: %s", key, error)
            return None

    def cleanup(self, request_id: str) -> None:
        """Free what this connector put for a request: all keys in which its id stands whole."""
        self.drop_objects(request_id)

    def health(self) -> dict[str, Any]:
        """`status` ("healthy", or what is wrong), `transport`, and the transport's details."""
        return {"status": "healthy", "transport": self.transport, **self.details()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
