# SPDX-License-Identifier: Apache-2.0
"""A transport of one's own: processes of one user open each other's arenas through /proc.

An exported arena is a link in the runtime folder, which leads to the descriptor of its owner.
"""

import os
from pathlib import Path
from urllib.parse import quote

from omni_connector.errors import PeerRefusedError, PeerUnreachableError, ProtocolError
from omni_connector.errors import TransportError as Failed
from omni_connector.net.runtime import runtime_dir
from omni_connector.transports import Arena, ArenaTransport, ArenaView, Endpoint, RemoteArena


class ProcArena(RemoteArena):
    def __init__(self, endpoint: Endpoint) -> None:
        try:
            fd = os.open(endpoint.address, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PeerUnreachableError(str(error)) from error
        epoch, n_slots, slot_bytes = endpoint.epoch, endpoint.n_slots, endpoint.slot_bytes
        try:  # `open` trusts nothing: it looks at the seals, the size and the epoch
            self._view = ArenaView.open(fd, epoch=epoch, n_slots=n_slots, slot_bytes=slot_bytes)
            self._inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        self.endpoint = endpoint

    @property
    def slots(self):
        return self._view.slots

    @property
    def alive(self):  # the link leads nowhere once its owner has ended
        try:
            return os.stat(self.endpoint.address).st_ino == self._inode
        except OSError:
            return False

    def verify(self, slot, generation):
        try:
            return self._view.verify(slot, generation)
        except IndexError as error:
            raise ProtocolError(str(error)) from error

    def close(self):
        self._view.close()


class ProcTransport(ArenaTransport):
    transport = "proc"
    supports_mapping = True

    def __init__(self, *, namespace: str = "default", folder: Path | None = None) -> None:
        self._folder = folder or runtime_dir(namespace)
        self._exports: dict[str, int] | None = {}

    def export(self, arena: Arena, name: str) -> Endpoint:
        if self._exports is None:
            raise Failed("the transport is closed")
        address = f"{self._folder}/{quote(name, safe='')}.arena"
        fd = os.dup(arena.fd)
        try:
            os.symlink(f"/proc/{os.getpid()}/fd/{fd}", address)
        except OSError as error:
            os.close(fd)
            raise Failed(str(error)) from error
        self._exports[address] = fd
        return Endpoint.of(arena, self.transport, address)

    def withdraw(self, endpoint):
        fd = (self._exports or {}).pop(endpoint.address, None)
        if fd is not None:
            os.unlink(endpoint.address)
            os.close(fd)

    def attach(self, endpoint, *, timeout):
        if endpoint.transport != self.transport or Path(endpoint.address).parent != self._folder:
            raise PeerRefusedError(f"{endpoint.address} is no arena of {self._folder}")
        return ProcArena(endpoint)

    def details(self):
        return {"status": "closed"} if self._exports is None else {}

    def close(self):
        exports, self._exports = self._exports or {}, None
        for address, fd in exports.items():
            os.unlink(address)
            os.close(fd)
