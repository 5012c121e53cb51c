# SPDX-License-Identifier: Apache-2.0
"""What an engine does from time to time keeps nothing for ever."""

import time
from pathlib import Path

from omni_connector.handoff.upkeep import Upkeep


def test_what_is_counted_while_nobody_looks_takes_no_more_room(folder: Path) -> None:
    upkeep = Upkeep(folder, time.monotonic)
    for _ in range(100_000):
        upkeep.count("malformed_message")
    upkeep.count("handoffs_expired", 3)
    upkeep.count("handoffs_expired", 0)
    assert upkeep.events == {"malformed_message": 100_000, "handoffs_expired": 3}
    assert upkeep.take() == {"malformed_message": 100_000, "handoffs_expired": 3}
    assert upkeep.take() == {}
