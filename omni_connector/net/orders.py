# SPDX-License-Identifier: Apache-2.0
"""Orders to a running engine: signal files beside its status file in the runtime folder.

An engine whose status file is `<name>.status` obeys two files, for as long as they are there:

    <name>.drain    it offers no new hand-offs; the content does not matter
    <name>.role     it has the role that the file names: `prefill`, `decode` or `both`

The name is drawn anew at each start, so that no order reaches a later engine. Only this user can
enter the folder. An order is obeyed only if it is a small regular file of this user: a link, a pipe
or another user's file is refused.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct

from omni_connector.net.runtime import open_own_file

Role = Literal["prefill", "decode", "both"]
"""What an engine does of hand-offs: `prefill` only offers them, `decode` only fetches them."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)

Phase = Literal["serving", "draining", "drained"]
"""How far an engine is: `drained` is one that drains, and has nothing left to answer."""

DRAIN: Final = ".drain"
ROLE: Final = ".role"
ORDER: Final = re.compile(r"\.?([0-9a-f]{16})(?:\.[0-9a-f]{16})?\.(?:drain|role)")
"""Names of signal files, and of hidden ones that are being written, with the engine's name."""

MAX_BYTES: Final = 64
"""Bound on the size of an order in bytes: it is one word."""

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Service(Struct, frozen=True):
    """Which requests an engine serves at one moment.

    Attributes:
        phase: whether it drains, and whether anything is left.
        role: what it does of hand-offs now; None on an engine that takes no part in any.
        roles: all roles that its configuration lets it have.
        requests: requests that have not ended.
        arrived: requests that have arrived since the start.
    """

    phase: Phase = "serving"
    role: Role | None = None
    roles: tuple[Role, ...] = ()
    requests: _Count = 0
    arrived: _Count = 0

    @property
    def gauges(self) -> dict[str, int]:
        """The metrics that tell of it, by name."""
        drains = self.phase != "serving"
        return {
            "draining": int(drains),
            "offers_handoffs": int(self.role in ("prefill", "both") and not drains),
            "fetches_handoffs": int(self.role in ("decode", "both")),
        }


class Orders(Struct, frozen=True):
    """What an engine is asked to do.

    Attributes:
        drain: whether it shall drain; None where the signal file is refused, so that nothing
            changes.
        role: the role that it shall have, "" for that of its configuration; None as for `drain`.
        refused: why signal files were not obeyed.
    """

    drain: bool | None = False
    role: Role | Literal[""] | None = ""
    refused: tuple[str, ...] = ()


NO_ORDERS: Final = Orders()


def read_orders(status: Path) -> Orders:
    """Read the signal files of the engine with this status file. Never waits, raises nothing."""
    drain: bool | None = None
    role: Role | Literal[""] | None = None
    refused: list[str] = []
    try:
        drain = _content(status.with_suffix(DRAIN)) is not None
    except (OSError, ValueError) as error:
        refused.append(f"{status.stem}{DRAIN}: {error}")
    try:
        text = _content(status.with_suffix(ROLE))
        role = "" if text is None else _role(text)
    except (OSError, ValueError) as error:
        refused.append(f"{status.stem}{ROLE}: {error}")
    return Orders(drain, role, tuple(refused))


def _role(text: bytes) -> Role:
    for role in ROLES:
        if text.strip() == role.encode():
            return role
    raise ValueError(f"it does not say one of {', '.join(ROLES)}")


def _content(path: Path) -> bytes | None:
    """What a signal file says; None where there is none.

    Raises:
        OSError: it is no file of this user, or cannot be read.
        ValueError: it is too large.
    """
    try:
        fd = open_own_file(path)
    except FileNotFoundError:
        return None
    try:
        text = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return text


def give_order(status: Path, kind: str, text: str = "") -> None:
    """Make or replace a signal file of the engine with this status file.

    Several processes may do so at the same time: each API server of an engine, for one.

    Args:
        kind: `DRAIN` or `ROLE`.
        text: what the file says.

    Raises:
        OSError: it cannot be written.
    """
    hidden = status.with_name(f".{status.stem}.{os.urandom(8).hex()}{kind}")
    fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
        os.rename(hidden, status.with_suffix(kind))
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def take_back(status: Path, kind: str) -> None:
    """Remove a signal file; nothing happens where there is none.

    Raises:
        OSError: it cannot be removed.
    """
    status.with_suffix(kind).unlink(missing_ok=True)


def forget_orders(status: Path) -> None:
    """Remove all signal files of an engine that has ended. Raises nothing."""
    with contextlib.suppress(OSError):
        for name in os.listdir(status.parent):
            order = ORDER.fullmatch(name)
            if order is not None and order[1] == status.stem:
                status.with_name(name).unlink(missing_ok=True)
