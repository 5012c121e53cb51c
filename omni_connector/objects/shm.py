# SPDX-License-Identifier: Apache-2.0
"""`SharedMemoryConnector`: objects between processes of one user on one host."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_connector.arena.arena import Arena
from omni_connector.net.unix import Connection
from omni_connector.objects.exchange import Exchange
from omni_connector.objects.object_store import DEFAULT_TTL_S, object_geometry
from omni_connector.objects.peer import Find, Read
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import SharedMemoryTransport

# Names of the sockets begin with this.
_OBJECT_SOCKET: Final = "o-"

# Longest wait of a `put` that finds no room for what peers have read so far, in seconds.
_CATCH_UP_S: Final = 0.2


class SharedMemoryConnector(Exchange[str]):
    """Objects in shared memory. Its peers are all connectors with a socket in the runtime folder.

    Args:
        namespace: connectors of one namespace find each other's objects.
        folder: the runtime folder, by default the one of the namespace.
        object_gib: size of the arena, which bounds the objects that were put and neither got nor
            cleaned up; by default a tenth of the machine's memory, 4 GiB at most. The arena has at
            most 4096 slots of 1 MiB or more, and an object takes whole slots.
        geometry: instead of a size, the number of slots and the bytes of each (whole pages).
        object_timeout: seconds that a `get` waits for all peers.
        peer_timeout: seconds that it waits for one of them. A peer that gives no answer is not
            asked for ten times as long.
        buffer_ttl_seconds: seconds after which an object that nobody has got may be evicted; zero
            or less is never.
        clock: seconds, monotonic, for `buffer_ttl_seconds`.

    Raises:
        ConfigError: the runtime folder cannot be had, or is not private.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        namespace: str = "default",
        folder: Path | None = None,
        object_gib: float | None = None,
        geometry: tuple[int, int] | None = None,
        object_timeout: float = 5.0,
        peer_timeout: float = 1.0,
        buffer_ttl_seconds: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sockets = SharedMemoryTransport(
            namespace=namespace,
            folder=folder,
            kind=_OBJECT_SOCKET,
            answers={Find: self._answer, Read: self._note},
        )
        super().__init__(
            self._sockets,
            geometry=geometry or object_geometry(object_gib),
            object_timeout=object_timeout,
            peer_timeout=peer_timeout,
            ttl_s=buffer_ttl_seconds,
            clock=clock,
            stamp=time.monotonic_ns,
        )

    def _announce(self, arena: Arena, undo: ExitStack) -> tuple[Endpoint, str]:
        endpoint = self._sockets.export(arena, arena.epoch.hex())
        undo.callback(self._sockets.withdraw, endpoint)
        return endpoint, endpoint.address

    def _known(self) -> Sequence[str]:
        return self._sockets.sockets()

    @classmethod
    def _hint(cls, metadata: Mapping[str, Any]) -> str | None:
        hint = msgspec.convert(metadata, _Hint)
        return hint.address if hint.transport == SharedMemoryTransport.transport else None

    def _metadata(self, address: str) -> dict[str, Any]:
        return {"address": address}

    def _way(self, address: str) -> Callable[[float], Connection]:
        return functools.partial(Connection, Path(address))

    def _catch_up(self) -> None:
        self._sockets.catch_up(_CATCH_UP_S)

    def _tidy(self) -> None:
        self._sockets.sweep()


class _Hint(msgspec.Struct, frozen=True):
    """The fields of an object's metadata that are read; others are ignored."""

    transport: str | None = None
    address: str | None = None
