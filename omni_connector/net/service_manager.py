# SPDX-License-Identifier: Apache-2.0
"""Descriptors that systemd keeps for a service while it is restarted: its descriptor store.

A process of the service sends descriptors to the socket in `NOTIFY_SOCKET` (sd_notify(3):
`FDSTORE=1` and `FDNAME=`). The main process of the next start of the service gets them all, as it
gets sockets that it is activated by (sd_listen_fds(3)). systemd says by `FDSTORE` in the
environment how many it takes: since its version 254, and only where the unit sets
`FileDescriptorStoreMax`.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

from omni_connector.errors import TransportError
from omni_connector.net.descriptors import reason

FIRST_DESCRIPTOR: Final = 3
"""The first descriptor that systemd passes; the others follow."""

MAX_RECEIVED: Final = 4096
"""Most descriptors that are looked at, which bounds what a wrong environment costs."""


def keeps_descriptors(environ: Mapping[str, str]) -> bool:
    """Whether a service manager keeps descriptors for this process."""
    number = environ.get("FDSTORE", "")
    return bool(environ.get("NOTIFY_SOCKET")) and number.isdecimal() and int(number) > 0


def store(environ: Mapping[str, str], name: str, descriptor: int) -> None:
    """Have the service manager keep a duplicate of a descriptor. Never waits.

    Args:
        environ: of a process for which `keeps_descriptors`.
        name: at most 255 printable ASCII characters, without a colon.

    Raises:
        TransportError: the service manager cannot be told.
    """
    _notify(environ, f"FDSTORE=1\nFDNAME={name}", [descriptor])


def forget(environ: Mapping[str, str], name: str) -> None:
    """Have the service manager close what it keeps under a name. Never waits.

    Raises:
        TransportError: the service manager cannot be told.
    """
    _notify(environ, f"FDSTOREREMOVE=1\nFDNAME={name}", [])


def received(environ: Mapping[str, str], prefix: str) -> dict[str, int]:
    """The descriptors that the service manager has passed to this process, by their names.

    They are not inherited by programs that are started. The caller closes them; call it once.

    Args:
        environ: of this process as it was started.
        prefix: of the names that are wanted. Other descriptors are left alone.
    """
    number = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not number.isdecimal():
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")[: min(int(number), MAX_RECEIVED)]
    found: dict[str, int] = {}
    for descriptor, name in enumerate(names, FIRST_DESCRIPTOR):
        if not name.startswith(prefix):
            continue
        with contextlib.suppress(OSError):  # there is no such descriptor
            os.set_inheritable(descriptor, False)
            if name in found:
                os.close(found[name])
            found[name] = descriptor
    return found


def _notify(environ: Mapping[str, str], message: str, descriptors: list[int]) -> None:
    address = environ["NOTIFY_SOCKET"]
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.connect(address)
            socket.send_fds(manager, [message.encode()], descriptors)
    except OSError as error:
        raise TransportError(f"the service manager cannot be told: {reason(error)}") from error
