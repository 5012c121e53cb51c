# SPDX-License-Identifier: Apache-2.0
"""Whether a user id that the kernel reports is that of this process's user.

A user namespace has a range of user ids (Kubernetes gives each pod with `hostUsers: false` one of
its own). The kernel reports every user outside the range as the overflow id, 65534. So a process
that itself runs as 65534, in a namespace that lacks some users, cannot tell them from its own.
"""

import os
from pathlib import Path
from typing import Final

_ALL_IDS: Final = (1 << 32) - 1


def other_user(uid: int, remedy: str, root: Path = Path("/")) -> str | None:
    """The user with this id, as a part of an error's sentence; None if it is this process's user.

    Args:
        uid: what the kernel reports, of a peer or of a file.
        remedy: what to do where another user has a number of its own here.
        root: the folder with /proc.
    """
    own = os.geteuid()
    overflow = _overflow_id(root)
    if own == overflow and lacks_users(root):
        return (
            f"user {uid}, and this process cannot tell its own user {own} from those of other user "
            "namespaces, which the kernel reports with the same number; run engines as another "
            "user (in Kubernetes: `runAsUser`)"
        )
    if uid == own:
        return None
    if uid == overflow and lacks_users(root):
        return (
            f"user {uid}, not {own}: the kernel reports users of other user namespaces with this "
            "number; run the engines of a host in one user namespace (in Kubernetes: with the "
            "same `hostUsers`, in one pod if it is false)"
        )
    return f"user {uid}, not {own}; {remedy}"


def lacks_users(root: Path = Path("/")) -> bool:
    """Whether some users have no number in the user namespace of this process."""
    try:
        ranges = (root / "proc/self/uid_map").read_text().splitlines()
    except OSError:  # a kernel without user namespaces
        return False
    return sum(int(line.split()[2]) for line in ranges) < _ALL_IDS


def _overflow_id(root: Path) -> int:
    try:
        return int((root / "proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):  # a sandbox may hide it
        return 65534
