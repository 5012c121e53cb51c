# SPDX-License-Identifier: Apache-2.0
"""Descriptors of a process that was forked."""

import os
import socket

from omni_connector.net.forks import close_bound_to


def descriptors() -> set[str]:
    # Without that of the listing.
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def test_only_sockets_of_an_address_are_closed() -> None:
    with (
        open(os.devnull) as file,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        before = descriptors()
        close_bound_to(server.getsockname())
        assert descriptors() == before - {str(server.detach())}
        assert other.getsockname()
        assert not file.closed
