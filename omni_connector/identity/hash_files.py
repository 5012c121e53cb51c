# SPDX-License-Identifier: Apache-2.0
"""The process that hashes files of weights, at idle priority; `full_digest` starts it.

It is a process and not a thread. A thread at idle priority may be preempted while it holds the GIL,
and would then stall all threads of the engine for seconds.

It runs as a script, without site-packages, so that it starts fast and needs little memory. Standard
input has the paths, each followed by a zero byte. For each file it writes one line of JSON: the
path's position, and either the SHA-256 of all bytes with what `stat` says of the file, or an error.
It ends with the process that started it.
"""

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator

_PIECE = 4 << 20  # bytes of a read; hashing one takes some milliseconds
_ALIVE_S = 1.0  # between two looks at whether the parent is alive


def main(parent: int, idle: int, threads: int, *cores: int) -> None:
    """Hash the files that standard input names.

    Args:
        parent: process id of the process that started this one.
        idle: whether to run at idle priority.
        threads: the most files that are read at once.
        cores: cores to run on.
    """
    with contextlib.suppress(OSError):  # the cpuset may have shrunk
        os.sched_setaffinity(0, cores)
    if idle:
        _lower_priority()
    paths = [os.fsdecode(each) for each in sys.stdin.buffer.read().split(b"\0")[:-1]]
    left = iter(enumerate(paths))
    lock = threading.Lock()
    workers = [
        threading.Thread(target=_work, args=(left, lock), daemon=True)
        for _ in range(min(threads, len(paths)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            if os.getppid() != parent:
                os._exit(1)
            worker.join(_ALIVE_S)


def _work(left: "Iterator[tuple[int, str]]", lock: threading.Lock) -> None:
    while True:
        with lock:
            position, path = next(left, (None, ""))
        if position is None:
            return
        try:
            found: dict[str, object] = _hashed(path)
        except OSError as error:
            found = {"error": f"{path}: {error.strerror}"}
        line = json.dumps({"position": position, **found}) + "\n"
        with lock:
            os.write(1, line.encode())


def _hashed(path: str) -> dict[str, object]:
    hasher = hashlib.sha256()
    piece = bytearray(_PIECE)
    with open(path, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        while size := file.readinto(piece):
            hasher.update(memoryview(piece)[:size])
        after = os.fstat(file.fileno())
    if _version(before) != _version(after):
        return {"error": f"{path} changed while it was read"}
    return {"sha256": hasher.hexdigest(), "version": _version(after)}


def _version(found: os.stat_result) -> list[int]:
    # Some file systems have inodes of 64 bits, and JSON is read with 63.
    inode = found.st_ino & ((1 << 63) - 1)
    return [inode, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _lower_priority() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # its reads are idle, too
    except OSError:  # some sandboxes refuse it
        os.nice(19)
    # If memory runs out, the kernel kills this process first, and no engine.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
