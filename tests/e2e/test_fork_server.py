# SPDX-License-Identifier: Apache-2.0
"""What starts the engines of these tests leaves none behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_connector.testing.ports import free_port

from .fork_server import Forked, ForkServer

WAIT_S = 30.0
each_signal = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path / "server.log", {}, loads=())
    try:
        yield server
    finally:
        server.close()


def started(server: ForkServer, folder: Path) -> Forked:
    """A process that runs until somebody ends it."""
    words = ["--bind", "127.0.0.1", str(free_port())]
    with (folder / "log").open("wb") as log:
        return server.start("http.server", words, os.environ, log)


@each_signal
def test_what_it_has_started_ends_with_it_though_signals_ask_all_to_end(
    server: ForkServer, tmp_path: Path, number: signal.Signals
) -> None:
    first = started(server, tmp_path)
    server.send_signal(number)
    second = started(server, tmp_path)
    assert first.poll() is None
    server.close()
    first.wait(WAIT_S)
    second.wait(WAIT_S)


@each_signal
def test_what_it_has_started_can_be_ended_by_itself(
    server: ForkServer, tmp_path: Path, number: signal.Signals
) -> None:
    forked = started(server, tmp_path)
    forked.send_signal(number)
    forked.wait(WAIT_S)
