# SPDX-License-Identifier: Apache-2.0
"""What the arenas of this host will take of its memory, told by each to whoever sizes another.

An arena is populated in the background, and what is not populated yet counts as available to the
kernel: engines that start together would each take a part of the same memory. So a rank that makes
an arena binds an abstract Unix socket whose *name* says how large the arena is and how much of it
is populated. `/proc/net/unix` lists the names, those of other users too; the kernel removes a name
with the process that has bound it; and binding is atomic, so a name is also the lock under which
one rank after the other looks and tells. Nobody can connect to these sockets.

Any user of the host can bind such names, and so make the arenas of others smaller, as who takes the
memory itself can. A network namespace has names of its own: engines in containers with networks of
their own do not see each other.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from omni_connector.arena.available import available_bytes, memory_cgroup

logger = logging.getLogger("vllm.omni_connector.worker")

LOCK_TIMEOUT_S: Final = 5.0

_PREFIX: Final = "omni-connector-arena/1/"
_LOCK: Final = "omni-connector-sizing/1"
_NAME: Final = re.compile(
    re.escape(f"@{_PREFIX}")
    + r"([0-9a-f]{16})/([0-9a-f]{16})/([0-9a-f]{1,16})/([0-9a-f]{1,12})/([0-9a-f]{1,12})"
)
_MOST: Final = 4096
"""Names that are read at most; a host has fewer arenas."""

_CLAIMED_PART: Final = 16
"""Others may claim all but 1/16 of the memory: nobody checks what other users say."""

_UNIT: Final = 1 << 20
"""Names count whole MiB."""

_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Claim:
    """What one arena takes.

    Attributes:
        arena: of it; a number that was drawn.
        deployment: whose ranks divide their memory among themselves.
        cgroup: of its process, whose memory is limited; 0 where none is.
        size, populated: bytes of the arena, and those of them that are allocated.
    """

    arena: str
    deployment: str
    cgroup: int
    size: int
    populated: int

    @property
    def left(self) -> int:
        """Bytes that it will take, and that nobody has taken yet."""
        return max(0, self.size - self.populated)

    @property
    def address(self) -> str:
        """The abstract address that says so."""
        size, populated = self.size // _UNIT, self.populated // _UNIT
        numbers = f"{self.cgroup:x}/{size:x}/{populated:x}"
        return f"\0{_PREFIX}{self.arena}/{self.deployment}/{numbers}"


def deployment_id(engine_id: str) -> str:
    """What the ranks of a deployment have in common: vLLM numbers its data-parallel engines."""
    whole = re.sub(r"_dp\d+$", "", engine_id)
    return hashlib.sha256(f"{os.geteuid()}/{whole}".encode()).hexdigest()[:16]


def claims(root: Path = Path("/")) -> list[Claim]:
    """Those of all arenas of this host, as far as its network namespaces show them."""
    found: dict[str, Claim] = {}
    try:
        with open(root / "proc/net/unix", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                match = _NAME.fullmatch(line.rstrip("\n").rpartition(" ")[2])
                if match is None:
                    continue
                arena, deployment = match[1], match[2]
                cgroup, size, populated = (int(match[n], 16) for n in (3, 4, 5))
                claim = Claim(arena, deployment, cgroup, size * _UNIT, populated * _UNIT)
                # While it tells of its progress, an arena has two names.
                before = found.get(arena)
                if before is None or before.populated < claim.populated:
                    found[arena] = claim
                if len(found) >= _MOST:
                    break
    except OSError:  # a sandbox without it
        return []
    return list(found.values())


def unclaimed_bytes(deployment: str = "") -> int:
    """Bytes of memory of which the arenas of a deployment take a part: what is available, without
    what the arenas of others will take of it."""
    others = []
    left = 0
    for claim in claims():
        if claim.deployment == deployment:
            # Ranks that were sized before this one populate their parts of the same memory.
            left += claim.populated
        else:
            others.append(claim)
    cgroup = memory_cgroup()
    claimed = sum(each.left for each in others)
    in_cgroup = sum(each.left for each in others if cgroup and each.cgroup == cgroup)
    unclaimed = available_bytes(claimed=claimed, in_cgroup=in_cgroup)
    return left + max(unclaimed, available_bytes() // _CLAIMED_PART)


@contextlib.contextmanager
def sizing_lock(timeout: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
    """Let one process of the host after the other look at what is left, and claim a part of it.

    Yields whether this process has the lock. Whoever holds it for `timeout` seconds is stopped, or
    no engine at all: the others go on, and may take more than there is.
    """
    deadline = time.monotonic() + timeout
    held: socket.socket | None = None
    while held is None:
        try:
            held = _bound(f"\0{_LOCK}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                logger.warning("The size of the arena is chosen without the host's lock: %s", error)
                break
            time.sleep(_POLL_S)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()


class Reservation:
    """The claim of one arena, as long as it is open.

    Args:
        deployment: see `Claim`.
        size: bytes of the arena.
    """

    def __init__(self, deployment: str, size: int) -> None:
        self._lock = threading.Lock()
        self._claim = Claim(os.urandom(8).hex(), deployment, memory_cgroup(), size, 0)
        self._socket: socket.socket | None = None
        self._closed = False
        self._tell(self._claim)

    def populated(self, nbytes: int) -> None:
        """So many bytes more are allocated; may be called on any thread."""
        with self._lock:
            populated = min(self._claim.size, self._claim.populated + nbytes)
            self._tell(replace(self._claim, populated=populated))

    def close(self) -> None:
        """Let go of it. Idempotent."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _tell(self, claim: Claim) -> None:
        if self._closed:
            return
        before, told = self._socket, self._claim.address
        self._claim = claim
        if before is not None and claim.address == told:
            return
        try:
            # The new name first: at no time is nothing claimed.
            self._socket = _bound(claim.address)
        except OSError as error:  # no more descriptors; the name before stays
            logger.debug("An arena's size is not told to other engines: %s", error)
            return
        if before is not None:
            before.close()


def _bound(address: str) -> socket.socket:
    """A socket that has this abstract address, and to which nobody can connect.

    Raises:
        OSError: another has it, or there are no descriptors.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound
