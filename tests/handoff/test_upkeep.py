# SPDX-License-Identifier: Apache-2.0
"""What an engine does from time to time: it waits for nobody, and keeps nothing for ever."""

import socket
import time
from pathlib import Path

from omni_connector.handoff.upkeep import Upkeep
from omni_connector.net.runtime import locked


def test_a_locked_folder_holds_nobody_up(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "dead.sock"))
    upkeep = Upkeep(folder, time.monotonic)
    with locked(folder):
        started = time.monotonic()
        upkeep.sweep()
        assert time.monotonic() - started < 1.0
    assert (folder / "dead.sock").exists()
    upkeep.sweep()
    assert not (folder / "dead.sock").exists()


def test_what_is_counted_while_nobody_looks_takes_no_more_room(folder: Path) -> None:
    upkeep = Upkeep(folder, time.monotonic)
    for _ in range(100_000):
        upkeep.count("malformed_message")
    upkeep.count("handoffs_expired", 3)
    upkeep.count("handoffs_expired", 0)
    assert upkeep.events == {"malformed_message": 100_000, "handoffs_expired": 3}
    assert upkeep.take() == {"malformed_message": 100_000, "handoffs_expired": 3}
    assert upkeep.take() == {}
