# SPDX-License-Identifier: Apache-2.0
"""Mooncake's Transfer Engine, as far as we need it: reads from a peer's registered memory.

This adds what Mooncake's engine lacks. Batches are bounded and coalesced, a batch that was refused
or failed is tried again, every read has a deadline, and memory that a failed read may still write
to is quarantined.
"""

import itertools
import logging
import math
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.nodes import copy_cores, threads_on
from omni_connector.arena.pool import Pool
from omni_connector.config import MooncakeSettings
from omni_connector.errors import PeerUnreachableError, TransportError
from omni_connector.net.forks import forget_in_child
from omni_connector.net.peers import HostPort, parse_host, parse_host_port
from omni_connector.net.resolver import resolve
from omni_connector.runtime.backoff import Backoff
from omni_connector.transports.mooncake.library import (
    engine_module,
    family_of,
    never_destroy,
)

logger = logging.getLogger("vllm.omni_connector.transports")

RANGE_BYTES: Final = 1 << 20
"""Larger reads are cut into ranges of this size, as several ranges use several connections."""

_LOOPBACK: Final = "127.0.0.1"

# Most ranges in one call of Mooncake, whose queue of transfers is bounded. Each further try has a
# quarter of them.
_MAX_RANGES: Final = 64

# Most tries to read the ranges of a call.
_ATTEMPTS: Final = 4

# Seconds that are waited before a further try, times 4 for each try before it.
_BACKOFF_S: Final = 0.005

# Mooncake's blocking call keeps a core busy until the bytes are there, and the threads that send
# and receive them need that core. With few ranges, or large ones, it costs less to start a transfer
# for each, and to look now and then.
_FEW_RANGES: Final = 4
_LARGE_BYTES: Final = 256 << 10

# Seconds between two looks at a transfer: at first, and at most.
_FIRST_POLL_S: Final = 0.00005
_POLL_S: Final = 0.0002

# What Mooncake returns in place of a transfer that it does not start.
_NO_TRANSFER: Final = frozenset({0, -1, (1 << 64) - 1})

# Smallest buffer, in bytes. Small reads of many sizes then use the same buffers.
_MIN_BUFFER_BYTES: Final = 64 << 10

# Most bytes of buffers that are kept for later reads, as a fresh page costs as much as reading it
# over loopback.
_MAX_SPARE_BYTES: Final = 256 << 20


class MemoryRange(NamedTuple):
    """Bytes in a peer's memory: their address, and how many."""

    address: int
    size: int


class TransferEngine:
    """The Transfer Engine of one connector, started by its first use.

    Args:
        settings: see `MooncakeSettings`.
        host: address of this machine that peers reach; None takes the one towards the first peer.

    All methods may be called from any thread.
    """

    def __init__(self, settings: MooncakeSettings, host: str | None) -> None:
        self._settings = settings
        self._host = host
        self._family: str | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._engine: Any = None
        self._closed = False
        self._registered: set[int] = set()
        forget_in_child(self, TransferEngine._abandon)
        self.pool: Final = Pool(
            self._register_buffer,
            lambda buffer: self.unregister(int(buffer.ctypes.data)),
            _MAX_SPARE_BYTES,
        )

    @property
    def protocol(self) -> str:
        """What carries the bytes."""
        return self._settings.protocol

    @property
    def host(self) -> str | None:
        """Address of this machine that peers reach; None while it is not known."""
        return self._host

    def other_family(self, peer: str) -> str | None:
        """Why this engine cannot read from a peer by their address families; None where it may.

        Args:
            peer: an address. Of a name Mooncake itself takes an address of its own family.
        """
        if self._host is None or isinstance(parse_host(peer), str):
            return None
        if self._family is None:
            self._family = family_of(self._host)
        theirs = family_of(peer)
        if theirs == self._family:
            return None
        return (
            f"the peer's address {peer} is {theirs}, and Mooncake on {self._host} connects to "
            f"{self._family} alone: give both hosts addresses of one family (`mooncake.host`, "
            "`listen`, or the `host` of a connector)"
        )

    @property
    def address(self) -> str:
        """`host:port` under which peers reach this engine; starts it, on this host if need be.

        Raises:
            MissingDependencyError: Mooncake is not installed.
            TransportError: it does not start, or is closed.
        """
        engine = self._started()
        return str(HostPort(self._host or _LOOPBACK, engine.get_rpc_port()))

    def register(self, address: int, size: int) -> None:
        """Let peers read memory of ours. With `rdma`, our own reads need registered memory, too.

        Raises:
            MissingDependencyError, TransportError: as `address`; or Mooncake refuses the memory.
        """
        code = self._started().register_memory(address, size)
        if code != 0:
            raise TransportError(f"Mooncake does not register {size} bytes (code {code})")
        with self._lock:
            self._registered.add(address)

    def unregister(self, address: int) -> None:
        """Let no peer read this memory any more. Idempotent."""
        with self._lock:
            engine = self._engine
            known = address in self._registered
            self._registered.discard(address)
        if engine is not None and known:
            code = engine.unregister_memory(address)
            if code != 0:
                logger.warning("Mooncake does not unregister memory (code %d)", code)

    def fetch(self, peer: str, ranges: Sequence[MemoryRange], deadline: float) -> NDArray[np.uint8]:
        """Read ranges of a peer's registered memory.

        A transfer that hangs ends after `timeout_s`, even if that is after the deadline, and is not
        tried again.

        Args:
            peer: `host:port` of its engine.
            ranges: what to read; consecutive ones are joined, large ones are cut.
            deadline: `time.monotonic()` after which no transfer starts.

        Returns:
            A buffer of `pool` that begins with the bytes; give it back there, whole.

        Raises:
            PeerUnreachableError: the deadline passed, several tries failed, or too much memory is
                quarantined because of earlier ones.
            MissingDependencyError, TransportError: as `address`.
        """
        engine = self._started(peer)
        self.pool.tidy()
        if peer in self.pool.backed_off():
            raise PeerUnreachableError(
                f"reads from {peer} have failed, and may still write to memory here; it is not "
                "read from until that is over"
            )
        size = sum(each.size for each in ranges)
        rounded = max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length())
        code = 0
        for attempt in range(_ATTEMPTS):
            if attempt:
                logger.debug("Read from %s failed (code %d), once more", peer, code)
                time.sleep(min(_BACKOFF_S * 4**attempt, max(0.0, deadline - time.monotonic())))
            buffer = self.pool.take(rounded)
            at = int(buffer.ctypes.data)
            # If the queue was full, smaller batches may fit.
            for batch in _batches(cut(join(ranges)), max(1, _MAX_RANGES // 4**attempt)):
                started = time.monotonic()
                if started >= deadline:
                    self.pool.give_back(buffer)
                    raise PeerUnreachableError(f"{peer} did not send everything in time")
                failed = at
                at += sum(each.size for each in batch)
                large = at - failed >= len(batch) * _LARGE_BYTES
                # The blocking call gets over a peer that has started anew under its old address.
                if attempt or not (large or len(batch) <= _FEW_RANGES):
                    code = _read(engine, peer, batch, failed)
                else:
                    code = _read_and_poll(engine, peer, batch, failed, self._settings.timeout_s)
                if code != 0:
                    break
            else:
                return buffer
            # The queue is full, this was the first transfer after a pause, or the peer is gone.
            # Parts of the batch may still arrive, so the next try gets other memory.
            self._keep(peer, buffer, failed, at)
            if time.monotonic() - started >= self._settings.timeout_s:
                break  # it was stuck; one that fails sooner was refused, or lost its connection
        tries = "1 try" if not attempt else f"{attempt + 1} tries"
        raise PeerUnreachableError(f"Mooncake cannot read from {peer} (code {code}, {tries})")

    def close(self) -> None:
        """Unregister everything and end the engine. Idempotent; waits for no running read.

        Does nothing in another process: what is registered is the parent's.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            addresses = list(self._registered)
        self.pool.keep_spare(0)
        for address in addresses:
            self.unregister(address)
        with self._lock:
            self._engine = None

    def _abandon(self) -> None:
        # In a process that was forked, in which Mooncake has no threads.
        engine, self._engine = self._engine, None
        if engine is not None:
            never_destroy(engine)
        self._lock = threading.Lock()
        self._closed = True
        self._registered = set()

    def _started(self, peer: str | None = None) -> Any:
        with self._lock:
            if self._closed:
                raise TransportError("the connector is closed")
            if self._engine is None:
                if self._host is None:
                    towards = None if peer is None else parse_host_port(peer)
                    self._host = _LOOPBACK if towards is None else address_towards(towards)
                self._engine = self._start(self._host)
            return self._engine

    def _start(self, host: str) -> Any:
        # Mooncake reads these when the first engine of a process starts. What the user has set
        # takes precedence.
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(math.ceil(self._settings.timeout_s)))
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        engine = engine_module(family_of(host)).TransferEngine()
        settings = self._settings
        with threads_on(copy_cores()):
            code = engine.initialize(host, "P2PHANDSHAKE", settings.protocol, settings.device)
        if code != 0:
            raise TransportError(
                f"Mooncake's Transfer Engine does not start on {host} with "
                f"{settings.protocol} (code {code}); its own log says more"
            )
        return engine

    def _register_buffer(self, buffer: NDArray[np.uint8]) -> None:
        if self.protocol != "tcp":  # Over TCP it reads into any memory: ours stays unregistered.
            self.register(int(buffer.ctypes.data), buffer.nbytes)

    def _keep(self, peer: str, buffer: NDArray[np.uint8], start: int, end: int) -> None:
        """Quarantine a buffer: a failed read may still write to these addresses."""
        if self.protocol != "tcp":  # registered memory cannot be given back in part
            self.pool.quarantine(peer, buffer, buffer.nbytes)
            return
        at = int(buffer.ctypes.data)
        first = (start - at) // mmap.PAGESIZE * mmap.PAGESIZE
        last = -(-(end - at) // mmap.PAGESIZE) * mmap.PAGESIZE
        pages: mmap.mmap = buffer.base.obj  # type: ignore[union-attr]
        for lower, upper in ((0, first), (last, buffer.nbytes)):
            if upper > lower:
                pages.madvise(mmap.MADV_DONTNEED, lower, upper - lower)
        self.pool.quarantine(peer, buffer, last - first)


def address_towards(peer: HostPort) -> str:
    """The address that this machine has towards a peer; nothing is sent.

    Raises:
        PeerUnreachableError: there is no route to the peer, or its name cannot be looked up.
    """
    found = resolve(peer)
    try:
        family, kind, _, _, address = socket.getaddrinfo(*found, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerUnreachableError(f"no way to {peer}: {error}") from error


def join(ranges: Iterable[MemoryRange]) -> list[MemoryRange]:
    """The same bytes in the same order, in as few ranges as possible."""
    joined: list[MemoryRange] = []
    for each in ranges:
        if joined and (last := joined[-1]).address + last.size == each.address:
            joined[-1] = MemoryRange(last.address, last.size + each.size)
        else:
            joined.append(each)
    return joined


def cut(ranges: Iterable[MemoryRange], size: int = RANGE_BYTES) -> Iterator[MemoryRange]:
    """The same bytes in ranges of at most `size` bytes."""
    for each in ranges:
        for at in range(0, each.size, size):
            yield MemoryRange(each.address + at, min(size, each.size - at))


def _read(engine: Any, peer: str, batch: Sequence[MemoryRange], at: int) -> int:
    """Read ranges to this address, one after the other; Mooncake's code, 0 if all went well."""
    places = list(itertools.accumulate((each.size for each in batch), initial=at))
    addresses, sizes = [each.address for each in batch], [each.size for each in batch]
    return int(engine.batch_transfer_sync_read(peer, places[:-1], addresses, sizes))


def _read_and_poll(
    engine: Any, peer: str, batch: Sequence[MemoryRange], at: int, timeout: float
) -> int:
    """The same, leaving the core to others while the bytes are under way."""
    end = time.monotonic() + timeout
    transfers: deque[int] = deque()
    for each in batch:
        # Mooncake tells only of the first range of a transfer whether it is there.
        transfer = engine.batch_transfer_async_read(peer, [at], [each.address], [each.size])
        if transfer in _NO_TRANSFER:
            return -1
        transfers.append(transfer)
        at += each.size
    backoff = Backoff(_FIRST_POLL_S, _POLL_S)
    while transfers:
        code = engine.transfer_check_status(transfers[0])
        if code > 0:
            transfers.popleft()  # Mooncake has freed it
        elif code < 0 or time.monotonic() >= end:
            return int(code) or -1
        else:
            time.sleep(backoff.failed())
    return 0


def _batches(ranges: Iterable[MemoryRange], bound: int) -> Iterator[list[MemoryRange]]:
    left = iter(ranges)
    while batch := list(itertools.islice(left, bound)):
        yield batch
