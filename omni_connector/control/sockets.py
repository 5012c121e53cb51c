# SPDX-License-Identifier: Apache-2.0
"""The Unix socket at which a serving engine is found by the engines of its user on its host."""

import os
import socket as unix_socket
from pathlib import Path

import zmq

from omni_connector.errors import TransportError
from omni_connector.network.sockets import Context, Socket, prepare
from omni_connector.transports.runtime import locked


def bind_unix(context: Context, path: Path) -> Socket:
    """A ROUTER at a Unix socket, which appears at `path` once it accepts.

    Raises:
        zmq.ZMQError: it cannot be bound.
        TransportError: another engine listens there, or the folder cannot be locked.
    """
    router = context.socket(zmq.ROUTER)
    prepare(router)
    # A socket is visible only once it accepts, so that a peer may take "refused" for dead;
    # under the lock nobody sweeps it before.
    hidden = hidden_path(path)
    with locked(path.parent):
        if _accepts(path):
            raise TransportError(
                f"another engine listens at {path}; give each engine its own engine_id"
            )
        router.bind(f"ipc://{hidden}")
        os.rename(hidden, path)
    return router


def hidden_path(path: Path) -> Path:
    """Where a socket is bound before it appears at `path`: its address to the kernel."""
    return path.with_name(f".{path.name}")


def _accepts(path: Path) -> bool:
    with unix_socket.socket(unix_socket.AF_UNIX, unix_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) == 0
