# SPDX-License-Identifier: Apache-2.0
"""Processes that stand still: SIGSTOP, waited for until no thread runs any more."""

import os
import signal
import time
from pathlib import Path

_STOP_S = 60.0
_STOPPED = frozenset("TtZX")  # stopped, traced, or ended


def stop(*pids: int) -> None:
    """Send SIGSTOP to processes and wait until all their threads stand still.

    The signal's sender goes on at once, and threads that run on other cores, or sleep in the
    kernel, may still answer somebody for a while after that.

    Raises:
        ProcessLookupError: there is no such process.
        TimeoutError: some thread still runs after a minute.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _STOP_S
    while running := [state for pid in pids for state in _running(pid)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"these threads were not stopped in {_STOP_S:.0f} s: {running}")
        time.sleep(0.001)


def stop_group(group: int) -> None:
    """The same for all processes of a process group.

    Raises:
        ProcessLookupError, TimeoutError: as `stop`.
    """
    os.killpg(group, signal.SIGSTOP)  # all at once, so that none starts another one meanwhile
    there = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stop(*(pid for pid in there if _group(pid) == group))


def _running(pid: int) -> list[str]:
    """The threads of a process that do not stand still: `thread:state`."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        state = _fields(task)[:1]
        if state and state[0] not in _STOPPED:
            found.append(f"{task.name}:{state[0]}")
    return found


def _group(pid: int) -> int | None:
    fields = _fields(Path(f"/proc/{pid}"))
    return int(fields[2]) if fields and fields[0] not in "ZX" else None


def _fields(process: Path) -> list[str]:
    """The fields of its `stat` behind the name, which may contain anything; none if it has gone."""
    try:
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
