# SPDX-License-Identifier: Apache-2.0
"""What a process that was forked must not keep of its parent: sockets at which the parent is found.

Its threads are not there to answer, and a socket that is open in one process is open to its peers:
a parent that is killed would go on accepting, and none of its peers would see its end.
"""

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Callable
from typing import Any, Final

_Forget = Callable[[Any], None]

_known: Final[weakref.WeakKeyDictionary[Any, _Forget]] = weakref.WeakKeyDictionary()


def forget_in_child(owner: object, forget: _Forget) -> None:
    """Have `forget(owner)` called in each process that is forked, as long as there is the owner.

    It runs where any lock may be held for ever: it must take none.
    """
    _known[owner] = forget


def close_bound_to(address: object) -> None:
    """Close this process's descriptors of sockets that have this address: the one that listens
    there, and those that were accepted."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # it is the descriptor of the listing itself
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                name = found.getsockname()
                ours = (name[:2] if isinstance(name, tuple) else name) == address
            if ours:
                os.close(descriptor)


def _in_child() -> None:
    for owner, forget in list(_known.items()):
        with contextlib.suppress(Exception):  # of several, each is to be forgotten
            forget(owner)


os.register_at_fork(after_in_child=_in_child)
