# SPDX-License-Identifier: Apache-2.0
"""TCP ports of the loopback for servers that must know theirs before they start.

They lie below the ports that Linux gives to whoever asks for any (32768 and up, see
`ip_local_port_range`): one of those may belong to somebody's connection by the time that a server
which starts slowly binds it.
"""

import contextlib
import random
import socket
from typing import Final

_FIRST: Final = 20_000
_LAST: Final = 30_000

_given: set[int] = set()
_draw = random.SystemRandom()  # tests seed the module's generator, each in the same way


def free_port() -> int:
    """Return a port that nobody had a moment ago, and that this process never returned before.

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
        ports = range(first, first + count)
        if not _given.isdisjoint(ports):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            _given.update(ports)
            return first
    raise OSError(f"no {count} ports in a row are free between {_FIRST} and {_LAST}")
