# SPDX-License-Identifier: Apache-2.0
"""Host names are looked up on threads of their own: the C library may take half a minute.

Both sides of a connection choose alike: the first IPv4 address of a name, else its first address.
"""

import socket
from concurrent.futures import Future
from typing import Final

from omni_connector.errors import PeerUnreachableError, TransportError
from omni_connector.net.peers import HostPort, parse_host
from omni_connector.runtime.blocking_calls import CallThreads

MAX_LOOKUPS: Final = 16
"""Most names that are looked up at a time, each on its own thread. Further ones fail at once."""


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
    """Looks up names on threads of its own; no call waits."""

    def __init__(self) -> None:
        self._calls = CallThreads("omni-resolve", MAX_LOOKUPS)

    def look_up(self, address: HostPort) -> "Future[HostPort]":
        """What `resolve` returns or raises, later.

        If too many lookups are under way, or no thread can be started, the future fails at once.
        """
        try:
            return self._calls.start(lambda: resolve(address))
        except TransportError as error:
            failed: Future[HostPort] = Future()
            failed.set_exception(PeerUnreachableError(f"cannot look up {address.host!r}: {error}"))
            return failed

    def close(self) -> None:
        """Look up nothing more. Idempotent."""
        self._calls.close()
