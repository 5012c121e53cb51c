# SPDX-License-Identifier: Apache-2.0
"""`MooncakeTransport`: peers read each other's arenas through Mooncake's Transfer Engine.

The owner registers its arena with the engine. Readers fetch superblock, headers and slots by
address, and check them like the bytes of a mapping. Of Mooncake they trust only its word that
bytes have arrived.
"""

import functools
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.format import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    ArenaGeometry,
    SlotHeader,
)
from omni_connector.config import MooncakeSettings
from omni_connector.errors import (
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.net.forks import forget_in_child
from omni_connector.net.peers import is_loopback, parse_host_port
from omni_connector.transports.base import (
    ArenaTransport,
    Endpoint,
    Fetched,
    RemoteArena,
    Site,
    check_destination,
)
from omni_connector.transports.mooncake.engine import MemoryRange, TransferEngine
from omni_connector.transports.mooncake.library import engine_module, family_of, require_package

_ADDRESS: Final = re.compile(
    r"(?P<protocol>tcp|rdma)://(?P<engine>[][A-Za-z0-9.:_-]+)/(?P<base>[0-9a-f]{1,16})\Z"
)
# Headers that are this close to each other are read together with the headers between them.
_HEADER_GAP: Final = 64

# Longest wait for a read whose caller has no deadline of its own, in seconds.
_READ_TIMEOUT_S: Final = 30.0


class MooncakeTransport(ArenaTransport):
    """Arenas read over the network, by Mooncake's Transfer Engine.

    Args:
        settings: how the engine is started, at the first use.
        host: address of this machine that peers reach; None takes the one towards the first peer.
        allows: whether a peer's host may be connected to.
    """

    transport = "mooncake"
    Settings = MooncakeSettings
    nearness = 100
    beyond_host = True

    def __init__(
        self,
        *,
        settings: MooncakeSettings | None = None,
        host: str | None = None,
        allows: Callable[[str], bool] = is_loopback,
    ) -> None:
        settings = settings or MooncakeSettings()
        self._engine = TransferEngine(settings, settings.host or host)
        self._allows = allows
        self._lock = threading.Lock()
        self._closed = False
        self._exports: dict[bytes, _Export] = {}
        forget_in_child(self, MooncakeTransport._abandon)

    def _abandon(self) -> None:
        # In a process that was forked: all exports are the parent's.
        self._lock = threading.Lock()
        self._closed = True
        self._exports = {}

    @classmethod
    def create(cls, settings: MooncakeSettings, site: Site) -> "MooncakeTransport":
        # An engine that lacks Mooncake should not start, rather than fail each hand-off. But the
        # import decides the address family. Where neither this machine's address nor `peers` tell
        # the family, the import waits for the first peer.
        host = settings.host or site.host
        family = site.peers_family if host is None else family_of(host)
        if family is None:
            require_package()
        else:
            engine_module(family)
        return cls(settings=settings, host=site.host, allows=site.allows)

    def export(self, arena: Arena, name: str) -> Endpoint:
        export = _Export(arena, name, writable=self._engine.protocol != "tcp")
        try:
            with self._lock:
                self._check_open()
                for other in self._exports.values():
                    if other.name == name or other.epoch == arena.epoch:
                        raise TransportError(f"{other.name!r} is exported already")
                self._exports[arena.epoch] = export
        except BaseException:
            export.close()
            raise
        try:
            address = f"{self._engine.protocol}://{self._engine.address}/{export.base:x}"
            self._engine.register(export.base, export.size)
        except BaseException:
            self._take_back(arena.epoch)
            raise
        return Endpoint.of(arena, self.transport, address)

    def withdraw(self, endpoint: Endpoint) -> None:
        self._take_back(endpoint.epoch)

    def obstacle(self, endpoint: Endpoint) -> str | None:
        try:
            host, _ = _parse_address(endpoint.address)
        except ProtocolError as error:
            return str(error)
        return self._engine.other_family(host)

    def attach(self, endpoint: Endpoint, *, timeout: float) -> "MooncakeArena":
        if endpoint.transport != self.transport:
            raise PeerRefusedError(f"{endpoint.transport!r} is not the transport {self.transport}")
        host, found = _parse_address(endpoint.address)
        if not self._allows(host):
            raise PeerRefusedError(f"{host} is none of the hosts in `peers`")
        unlike = self._engine.other_family(host)
        if unlike is not None:
            raise PeerRefusedError(unlike)
        if found["protocol"] != self._engine.protocol:
            raise PeerRefusedError(
                f"the peer speaks {found['protocol']}, this engine {self._engine.protocol}"
            )
        remote = MooncakeArena(self._engine, endpoint, found["engine"], int(found["base"], 16))
        if not remote.addressable:
            raise ProtocolError(f"no memory has the addresses that {endpoint.address!r} claims")
        remote.check(time.monotonic() + timeout)
        return remote

    def close(self) -> None:
        with self._lock:
            self._closed = True
            epochs = list(self._exports)
        for epoch in epochs:
            self._take_back(epoch)
        self._engine.close()

    def details(self) -> dict[str, Any]:
        self._engine.pool.tidy()
        with self._lock:
            found: dict[str, Any] = {
                "protocol": self._engine.protocol,
                "host": self._engine.host,
                "exports": len(self._exports),
            }
            if self._closed:
                found["status"] = "closed"
            elif backed_off := self._engine.pool.backed_off():
                found["status"] = f"degraded: not reading from {', '.join(backed_off[:8])}"
        found["quarantined_bytes"] = self._engine.pool.quarantined_bytes
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def _take_back(self, epoch: bytes) -> None:
        with self._lock:
            export = self._exports.pop(epoch, None)
        if export is not None:
            self._engine.unregister(export.base)
            export.close()


def _parse_address(address: str) -> tuple[str, re.Match[str]]:
    """The host of an endpoint's address, and the parts of the address.

    Raises:
        ProtocolError: it is malformed.
    """
    found = _ADDRESS.match(address)
    try:
        if found is None:
            raise ValueError("it is malformed")
        return parse_host_port(found["engine"]).host, found
    except ValueError as error:
        raise ProtocolError(f"{address!r} is no address of a Mooncake peer: {error}") from None


class _Export:
    """The mapping of an arena that is registered.

    Mooncake over TCP lets any peer write to what it may read. So it gets a mapping that cannot be
    written: such a write fails with EFAULT and ends the connection. RDMA can register only memory
    that may be written.
    """

    def __init__(self, arena: Arena, name: str, *, writable: bool) -> None:
        self.name = name
        self.epoch = arena.epoch
        geometry = ArenaGeometry(arena.n_slots, arena.slot_bytes)
        self.size = geometry.total_bytes
        self._view: ArenaView | None = None
        self._slots: NDArray[np.uint8] = arena.slots
        if not writable:
            self._view = ArenaView.open(
                arena.fd, epoch=arena.epoch, n_slots=arena.n_slots, slot_bytes=arena.slot_bytes
            )
            self._slots = self._view.slots
        self.base = int(self._slots.ctypes.data) - geometry.slots_at

    def close(self) -> None:
        """Let go of the mapping, after it was unregistered."""
        del self._slots
        if self._view is not None:
            self._view.close()


class MooncakeArena(RemoteArena):
    """A peer's arena, read by address."""

    def __init__(self, engine: TransferEngine, endpoint: Endpoint, peer: str, base: int) -> None:
        self.endpoint = endpoint
        self._engine = engine
        self._peer = peer
        self._base = base
        self._geometry = ArenaGeometry(endpoint.n_slots, endpoint.slot_bytes)
        self._alive = True

    @property
    def addressable(self) -> bool:
        """Whether all of its addresses are addresses of 64 bits."""
        return self._base + self._geometry.total_bytes <= 1 << 64

    @property
    def alive(self) -> bool:
        return self._alive

    def check(self, deadline: float) -> None:
        """Raise unless the announced arena is at the address.

        Raises:
            PeerUnreachableError: nobody answers.
            ProtocolError, PeerRefusedError: something else is there.
        """
        found = self._copy_of([MemoryRange(self._base, SUPERBLOCK_BYTES)], deadline)
        self._geometry.check_superblock(found.tobytes(), self.endpoint.epoch)

    def verify(self, slot: int, generation: int) -> SlotHeader:
        return self._verify_all([slot], [generation], time.monotonic() + _READ_TIMEOUT_S)[0]

    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        check_destination(dst, len(slot_ids), self._geometry.slot_bytes)
        ranges = self._ranges(slot_ids, dst.shape[1])
        content = self._copy_of(ranges, time.monotonic() + _READ_TIMEOUT_S)
        np.copyto(dst, content.reshape(dst.shape))

    def fetch(
        self, slot_ids: Sequence[int], generations: Sequence[int], length: int, *, timeout: float
    ) -> Fetched:
        deadline = time.monotonic() + timeout
        self._verify_all(slot_ids, generations, deadline)
        ranges = self._ranges(slot_ids, length)
        buffer = self._fetch(ranges, deadline)
        try:
            headers = self._verify_all(slot_ids, generations, deadline)
        except BaseException:
            self._engine.pool.give_back(buffer)
            raise
        rows = buffer[: len(slot_ids) * length].reshape(len(slot_ids), length)
        return Fetched(rows, headers, functools.partial(self._engine.pool.give_back, buffer))

    def take(self, ranges: Sequence[tuple[int, int]], *, timeout: float) -> NDArray[np.uint8]:
        geometry = self._geometry
        end = geometry.n_slots * geometry.slot_bytes
        if any(at < 0 or size < 0 or at + size > end for at, size in ranges):
            raise ProtocolError(f"{self.endpoint.address} has {end} bytes")
        start = self._base + geometry.slots_at
        wanted = [MemoryRange(start + at, size) for at, size in ranges]
        buffer = self._fetch(wanted, time.monotonic() + timeout)
        # It is given back when its last array or memoryview is gone.
        content = buffer[: sum(size for _, size in ranges)]
        weakref.finalize(content, self._engine.pool.give_back_later, buffer).atexit = False
        return content

    def close(self) -> None:
        self._alive = False

    def _verify_all(
        self, slot_ids: Sequence[int], generations: Sequence[int], deadline: float
    ) -> list[SlotHeader]:
        wanted = sorted(set(slot_ids))
        self._check_slots(wanted)
        # A few larger reads cost less than many small ones, each of which costs a round trip.
        breaks = [i for i in range(1, len(wanted)) if wanted[i] - wanted[i - 1] > _HEADER_GAP]
        runs = [range(wanted[a], wanted[b - 1] + 1) for a, b in pairwise([0, *breaks, len(wanted)])]
        at = self._base + self._geometry.headers_at
        raw = self._copy_of(
            [MemoryRange(at + run.start * HEADER_BYTES, len(run) * HEADER_BYTES) for run in runs],
            deadline,
        ).tobytes()
        starts = dict(zip(chain.from_iterable(runs), range(0, len(raw), HEADER_BYTES), strict=True))
        headers = []
        for slot, generation in zip(slot_ids, generations, strict=True):
            content = raw[starts[slot] : starts[slot] + HEADER_BYTES]
            header = SlotHeader.decode(content, slot, self._geometry.slot_bytes)
            header.require_published(slot, generation)
            headers.append(header)
        return headers

    def _ranges(self, slot_ids: Sequence[int], width: int) -> list[MemoryRange]:
        self._check_slots(slot_ids)
        slot_bytes = self._geometry.slot_bytes
        if width > slot_bytes:
            raise ValueError(f"{width} bytes of a slot that has {slot_bytes}")
        at = self._base + self._geometry.slots_at
        return [MemoryRange(at + slot * slot_bytes, width) for slot in slot_ids]

    def _copy_of(self, ranges: Sequence[MemoryRange], deadline: float) -> NDArray[np.uint8]:
        buffer = self._fetch(ranges, deadline)
        try:
            return buffer[: sum(each.size for each in ranges)].copy()
        finally:
            self._engine.pool.give_back(buffer)

    def _fetch(self, ranges: Sequence[MemoryRange], deadline: float) -> NDArray[np.uint8]:
        if not self._alive:
            raise PeerUnreachableError(f"{self._peer} is gone, or was let go of")
        try:
            return self._engine.fetch(self._peer, ranges, deadline)
        except PeerUnreachableError:
            self._alive = False
            raise

    def _check_slots(self, slot_ids: Sequence[int]) -> None:
        for slot in slot_ids:
            if not 0 <= slot < self._geometry.n_slots:
                raise ProtocolError(f"{self.endpoint.address} has no slot {slot}")
