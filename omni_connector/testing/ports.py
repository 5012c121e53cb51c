# SPDX-License-Identifier: Apache-2.0
"""TCP ports of the loopback for servers that must know theirs before they start.

They lie below the ports that Linux gives to whoever asks for any (32768 and up, see
`ip_local_port_range`): one of those may belong to somebody's connection by the time that a server
which starts slowly binds it. A port is given to one process, and to no other while that one lives.
"""

import atexit
import contextlib
import random
import socket
from typing import Final

_FIRST: Final = 20_000
_LAST: Final = 30_000

# Sockets whose names say which ports this process was given. They stay open until it ends.
_claims: Final = contextlib.ExitStack()
atexit.register(_claims.close)

_draw = random.SystemRandom()  # tests seed the module's generator, each in the same way


def free_port() -> int:
    """Return a port at which nobody listened a moment ago, and that no living process was given.

    Raises:
        OSError: none of 1,000 ports is free.
    """
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row; see `free_port`.

    Raises:
        OSError: none were found in 1,000 tries.
    """
    for _ in range(1000):
        first = _draw.randrange(_FIRST, _LAST - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(_claim(port))
                socket.create_server(("127.0.0.1", port)).close()
            _claims.enter_context(held.pop_all())
            return first
    raise OSError(f"no {count} ports in a row are free between {_FIRST} and {_LAST}")


def _claim(port: int) -> socket.socket:
    """A socket whose name says that this process was given a port.

    The kernel frees an abstract name when the last process that holds it has ended. Each network
    namespace has its own names, as it has its own ports.

    Raises:
        OSError: another process was given it.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0omni-connector/port/{port}")
    except OSError:
        claim.close()
        raise
    return claim
