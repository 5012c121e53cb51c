# SPDX-License-Identifier: Apache-2.0
"""Deadlines of the product that no test counts on, so long that a busy machine meets them.

Threads of a busy machine may get no time for seconds. Then a block that was to be loaded is
computed, a peer is left alone, a copy is given up: all right in production, and a failure of a test
that counts what was loaded. A test of such a deadline sets it itself.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from omni_connector.objects.mooncake import MooncakeTransferEngineConnector
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
from omni_connector.objects.shm import SharedMemoryConnector

PATIENCE_S: Final = 30.0
"""Longer than a thread gets no time, and no longer than tests wait for anything."""

STORE_S: Final = 8.0
"""The same for the answers of a store where others do not come, and hold up a test."""


_LOOK_S: Final = 0.01
"""Seconds between two looks of `wait_until`."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until it holds, for a minute at least.

    The deadline is a number of sleeps: where a process is held up, its clock jumps, and a deadline
    in seconds would be over after one look.
    """
    for _ in range(round(2 * PATIENCE_S / _LOOK_S)):
        if condition():
            return
        time.sleep(_LOOK_S)
    pytest.fail("what was waited for did not come")


def lengthen(patch: pytest.MonkeyPatch, names: Iterable[str]) -> None:
    """Have these constants be `PATIENCE_S`: each an importable name."""
    for name in names:
        patch.setattr(name, PATIENCE_S)


def lengthen_objects(patch: pytest.MonkeyPatch) -> None:
    """Have connectors of objects wait for their peers as long, unless they are told otherwise."""
    for kind, names in _OBJECTS.items():
        defaults = kind.__init__.__kwdefaults__
        patch.setattr(
            kind.__init__, "__kwdefaults__", {**defaults, **dict.fromkeys(names, PATIENCE_S)}
        )
    lengthen(
        patch,
        [
            "omni_connector.objects.mooncake._CATCH_UP_S",
            "omni_connector.objects.shm._CATCH_UP_S",
            "omni_connector.stage.link.LEAST_ASK_S",
        ],
    )


_OBJECTS: Final = {
    SharedMemoryConnector: ("object_timeout", "peer_timeout"),
    MooncakeTransferEngineConnector: ("object_timeout", "transfer_timeout"),
    MooncakeStoreConnector: ("object_timeout",),
}
"""The settings of each that are such deadlines."""
