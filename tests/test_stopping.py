# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .stopping import stop, stop_group

# Threads that are busy outside of the GIL, so that several of them run at a time.
BUSY = """
import hashlib, threading
block = bytes(1 << 24)
def work():
    while True:
        hashlib.sha256(block).digest()
threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
print("busy", flush=True)
threads[0].join()
"""


def _states(pid: int) -> set[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


@pytest.mark.parametrize("group", [False, True])
def test_a_process_with_busy_threads_stands_still_when_the_call_returns(group: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=group
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"busy\n"
            for _ in range(5):
                if group:
                    stop_group(process.pid)
                else:
                    stop(process.pid)
                assert _states(process.pid) == {"T"}
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.01)
        finally:
            process.kill()


def test_a_process_that_is_not_there_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    with pytest.raises(ProcessLookupError):
        stop(process.pid)
