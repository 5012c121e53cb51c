# SPDX-License-Identifier: Apache-2.0
"""A process that has few file descriptors left."""

import contextlib
import os
import resource
from collections.abc import Iterator

_SOME = 64


@contextlib.contextmanager
def spare(count: int) -> Iterator[None]:
    """So many more descriptors can be opened in this context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(_SOME)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def memfds() -> int:
    """How many descriptors of memfds are open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found += "memfd:" in os.readlink(f"/proc/self/fd/{name}")
    return found
