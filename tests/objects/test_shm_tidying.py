# SPDX-License-Identifier: Apache-2.0
"""Who gets an object tidies up after dead peers, but waits for nobody to do so."""

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from omni_connector.net import runtime
from omni_connector.objects.shm import SharedMemoryConnector


def leave_dead_sockets(place: Path, count: int) -> None:
    for number in range(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(place / f"o-{number:024x}.sock"))


@pytest.mark.parametrize("locked", [False, True])
def test_a_get_sweeps_once_and_waits_for_no_lock(
    place: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    leave_dead_sockets(place, 7)
    sweep, timeouts = runtime.sweep, []

    def noted(folder: Path, **options: Any) -> list[str]:
        timeouts.append(options["timeout"])
        return sweep(folder, **options)

    monkeypatch.setattr(runtime, "sweep", noted)
    holder = os.open(place, os.O_RDONLY)
    if locked:
        fcntl.flock(holder, fcntl.LOCK_EX)
    with SharedMemoryConnector(folder=place) as connector:
        assert connector.get("0", "1", "nowhere") is None
    os.close(holder)
    assert timeouts == [0.0]
    assert len(list(place.iterdir())) == (7 if locked else 0)
