# SPDX-License-Identifier: Apache-2.0
"""A forked process closes the sockets at which peers find its parent.

The child has no threads that would answer there. And while the child kept a socket open, peers
could still connect after the parent was killed, and none of them would notice its end.
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
    """Have `forget(owner)` called in each process that is forked, as long as the owner exists.

    In such a process any lock may be held for ever, so `forget` must take none.
    """
    _known[owner] = forget


def close_bound_to(address: object) -> None:
    """Close this process's descriptors of all sockets with this local address: the listening
    socket and the accepted ones."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                name = found.getsockname()
                ours = (name[:2] if isinstance(name, tuple) else name) == address
            if ours:
                os.close(descriptor)


def _in_child() -> None:
    for owner, forget in list(_known.items()):
        with contextlib.suppress(Exception):  # one that fails must not keep the others
            forget(owner)


os.register_at_fork(after_in_child=_in_child)
