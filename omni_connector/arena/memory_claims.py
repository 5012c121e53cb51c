# SPDX-License-Identifier: Apache-2.0
"""Claims of arenas on the host's memory, visible to every process that sizes another arena.

An arena is populated in the background, and the kernel counts memory not populated yet as
available. Engines that start together would each size their arenas by the same memory. So a rank
with an arena binds an abstract Unix socket, to which nobody can connect. Its *name* is the claim:
it says how large the arena is, and how much of it is populated.

- `/proc/net/unix` lists all names, of all users.
- The kernel removes a name with the process that has bound it.
- Binding is atomic. So another name is the lock under which ranks look and claim in turn.

Without claims eight engines that start together and take a tenth of the available memory each, the
usual size, would take 80 % of it; with them they take 57 %.

Any user of the host can bind such names and so make the arenas of others smaller; taking the memory
itself has the same effect. A network namespace has names of its own: engines in containers with
networks of their own do not see each other.
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
"""Longest wait, in seconds, for the sizing lock. A rank holds it for milliseconds."""

_PREFIX: Final = "omni-connector-arena/1/"
_LOCK: Final = "omni-connector-sizing/1"
_NAME: Final = re.compile(
    re.escape(f"@{_PREFIX}")
    + r"([0-9a-f]{16})/([0-9a-f]{16})/([0-9a-f]{1,16})/([0-9a-f]{1,12})/([0-9a-f]{1,12})"
)
_MOST: Final = 4096
"""Most names read. A host has fewer arenas."""

_CLAIMED_PART: Final = 16
"""1/16 of the memory counts as unclaimed whatever others claim, because nobody verifies claims."""

_UNIT: Final = 1 << 20
"""Bytes of the unit in which names count: MiB."""

_POLL_S: Final = 0.01
"""Seconds between two attempts to take the sizing lock."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of one arena.

    Attributes:
        arena: a random id.
        deployment: the deployment that it belongs to, whose ranks share memory among themselves.
        cgroup: the memory-limiting cgroup of its process; 0 for none.
        size, populated: bytes of the arena, and how many of them are allocated.
    """

    arena: str
    deployment: str
    cgroup: int
    size: int
    populated: int

    @property
    def left(self) -> int:
        """Bytes claimed but not allocated yet."""
        return max(0, self.size - self.populated)

    @property
    def address(self) -> str:
        """The abstract address whose name is this claim."""
        size = self.size // _UNIT
        populated = self.populated // _UNIT
        numbers = f"{self.cgroup:x}/{size:x}/{populated:x}"
        return f"\0{_PREFIX}{self.arena}/{self.deployment}/{numbers}"


def deployment_id(engine_id: str) -> str:
    """The id that all ranks of a deployment have.

    vLLM appends a number to the engine ids of data-parallel engines, which is left out here.
    """
    whole = re.sub(r"_dp\d+$", "", engine_id)
    return hashlib.sha256(f"{os.geteuid()}/{whole}".encode()).hexdigest()[:16]


def claims(root: Path = Path("/")) -> list[Claim]:
    """The claims of all arenas of this host that this network namespace shows."""
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
                # An arena that reports progress has two names for a moment.
                before = found.get(arena)
                if before is None or before.populated < claim.populated:
                    found[arena] = claim
                if len(found) >= _MOST:
                    break
    except OSError:  # a sandbox without it
        return []
    return list(found.values())


def unclaimed_bytes(deployment: str = "") -> int:
    """Bytes of memory that no other deployment's arena claims; the base for sizing an arena."""
    others = []
    left = 0
    for claim in claims():
        if claim.deployment == deployment:
            # Ranks of this deployment share one base. What earlier ranks have populated is
            # no longer available to the kernel, but belongs to the base.
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
    """Holds the host's lock while a process looks at the unclaimed memory and claims a part.

    Yields whether the lock was taken. A holder that keeps it for `timeout` seconds hangs, or is no
    engine. Then the others go on without it, and may claim too much.
    """
    deadline = time.monotonic() + timeout
    held: socket.socket | None = None
    while held is None:
        try:
            held = _bound(f"\0{_LOCK}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                logger.warning(
                    "The arena's size is chosen without the host's lock: %s. Engines that start at "
                    "the same time may claim the same memory; set arena_gib if it is short",
                    error,
                )
                break
            time.sleep(_POLL_S)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()


class Reservation:
    """Keeps the claim of one arena visible until it is closed.

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
        """`nbytes` more are allocated. Any thread may call this."""
        with self._lock:
            populated = min(self._claim.size, self._claim.populated + nbytes)
            self._tell(replace(self._claim, populated=populated))

    def close(self) -> None:
        """Withdraw the claim. Idempotent."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _tell(self, claim: Claim) -> None:
        if self._closed:
            return
        before = self._socket
        told = self._claim.address
        self._claim = claim
        if before is not None and claim.address == told:
            return
        try:
            # The new name before the old one goes, so that the claim never disappears.
            self._socket = _bound(claim.address)
        except OSError as error:  # no more descriptors; the old name stays
            logger.debug("An arena's size is not told to other engines: %s", error)
            return
        if before is not None:
            before.close()


def _bound(address: str) -> socket.socket:
    """A socket bound to this abstract address, without listening.

    Raises:
        OSError: the address is taken, or there are no descriptors.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound
