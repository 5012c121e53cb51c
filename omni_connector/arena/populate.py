# SPDX-License-Identifier: Apache-2.0
"""The process that allocates an arena's memory, at idle priority; `prefault` starts it.

It is a process and not a thread. A thread at idle priority may be preempted while it holds the GIL
or the lock of the process's memory map, and would then stall all threads of the engine for seconds.
A process of its own holds neither.

It runs as a script, without site-packages, so that it starts fast and needs little memory. For each
byte that it reads from standard input it allocates the next window of the file, and writes a byte
to standard output. It ends at the end of its input, or with the process that started it.
"""

import contextlib
import mmap
import os
import select
import sys
import time

MADV_POPULATE_READ = 22
_STEP = 2 << 20  # bytes of a system call; a copy that begins waits for one at most
_PAGE = 4096
_PAUSE_S = 0.001  # between two looks at whether a copy still runs
_ALIVE_S = 1.0  # between two looks at whether the parent is alive


def main(
    parent: int, fd: int, busy_fd: int, size: int, window: int, idle: int, *cores: int
) -> None:
    """Serve the process that started this one.

    Args:
        parent: its process id.
        fd: the memfd of the arena.
        busy_fd: a page of memory whose first byte is not 0 while a copy runs.
        size: bytes of the file.
        window: bytes that are allocated for each byte of input; a multiple of a huge page.
        idle: whether to run at idle priority.
        cores: cores to run on.
    """
    if cores:
        with contextlib.suppress(OSError):  # the cpuset may have shrunk
            os.sched_setaffinity(0, cores)
    if idle:
        _lower_priority()
    busy = mmap.mmap(busy_fd, _PAGE, prot=mmap.PROT_READ)
    for at in range(0, size, window):
        if not _asked(parent):
            return
        length = min(window, size - at)
        # The seals forbid another writable mapping. A read populates pages as well.
        with mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=at) as mapped:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, length, _STEP):
                while busy[0]:
                    if os.getppid() != parent:
                        return
                    time.sleep(_PAUSE_S)
                _populate(mapped, start, min(_STEP, length - start))
        os.write(1, b".")


def _asked(parent: int) -> bool:
    # A forked child of the parent may hold the input open after the parent's end. So the end of
    # the input is not enough: the parent is looked at, too.
    while not select.select([0], [], [], _ALIVE_S)[0]:
        if os.getppid() != parent:
            return False
    return bool(os.read(0, 1))


def _lower_priority() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # some sandboxes refuse it
        os.nice(19)
    # If memory runs out, the kernel kills this process first, and no engine.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _populate(mapped: mmap.mmap, start: int, length: int) -> None:
    try:
        mapped.madvise(MADV_POPULATE_READ, start, length)
    except OSError:  # before Linux 5.14: touch each page
        mapped[start : start + length : _PAGE]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
