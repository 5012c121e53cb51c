# SPDX-License-Identifier: Apache-2.0
"""Host names are looked up on threads of their own: the C library may take half a minute.

Both sides of a connection choose alike: the first IPv4 address of a name, else its first address.
"""

import socket
import threading
from collections.abc import Callable
from typing import Final

from omni_connector.errors import PeerUnreachableError
from omni_connector.net.peers import HostPort, parse_host

MAX_LOOKUPS: Final = 16

Resolved = HostPort | PeerUnreachableError


def resolve(address: HostPort) -> HostPort:
    """The address with its name, if any, replaced by an IP; may wait for half a minute.

    Raises:
        PeerUnreachableError: the name is not known, or cannot be looked up.
    """
    if not isinstance(parse_host(address.host), str):
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PeerUnreachableError(f"cannot look up {address.host!r}: {error}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return HostPort(str(found[0][4][0]), address.port)


class Resolver:
    """Looks up names, each on a thread of its own; no call waits."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_LOOKUPS)

    def look_up(self, address: HostPort, done: Callable[[Resolved], None]) -> None:
        """Have another thread call `done` with what `resolve` returns or raises.

        If too many lookups are under way, or no thread can be started, `done` is called at once.
        """
        if not self._free.acquire(blocking=False):
            done(PeerUnreachableError(f"{MAX_LOOKUPS} host names are being looked up already"))
            return
        thread = threading.Thread(
            target=self._look_up, args=(address, done), name="omni-resolve", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._free.release()
            done(PeerUnreachableError(f"cannot look up {address.host!r}: {error}"))

    def _look_up(self, address: HostPort, done: Callable[[Resolved], None]) -> None:
        found: Resolved
        try:
            found = resolve(address)
        except PeerUnreachableError as error:
            found = error
        finally:
            self._free.release()
        done(found)
