# SPDX-License-Identifier: Apache-2.0
"""TCP ports of the loopback for servers that must know theirs before they start."""

import contextlib
import random
import socket
from typing import Final

_FIRST: Final = 20_000
_LAST: Final = 30_000


def free_port() -> int:
    """Return a port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody had a moment ago.

    Raises:
        OSError: none of 1,000 places has so many.
    """
    for _ in range(1000):
        first = random.randrange(_FIRST, _LAST - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise OSError(f"no {count} ports in a row are free between {_FIRST} and {_LAST}")
