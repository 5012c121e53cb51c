# SPDX-License-Identifier: Apache-2.0
"""Ports for servers of tests, which run in several processes at once."""

import contextlib
import socket
import subprocess
import sys

import pytest

from omni_connector.testing import ports
from omni_connector.testing.ports import free_port, free_ports

FEW = range(30_100, 30_140)
"""Beyond the ports that other tests of this host are given meanwhile."""
DRAWN = 15
"""Of `FEW`, in each of two processes: if these knew nothing of each other, both would draw the same
port at least once."""

OTHER = f"""
import sys
from omni_connector.testing import ports
ports._FIRST, ports._LAST = {FEW.start}, {FEW.stop}
print(*(ports.free_port() for _ in range({DRAWN})), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def claims(monkeypatch):
    """The claims of this process in one test. Those of the tests before it stay."""
    with contextlib.ExitStack() as claims:
        monkeypatch.setattr(ports, "_claims", claims)
        yield claims


def test_a_port_is_given_to_one_process_until_that_ends(monkeypatch):
    monkeypatch.setattr(ports, "_FIRST", FEW.start)
    monkeypatch.setattr(ports, "_LAST", FEW.stop)
    words = [sys.executable, "-c", OTHER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = [int(word) for word in other.stdout.readline().split()]
        ours = [free_port() for _ in range(DRAWN)]
        other.stdin.close()
        assert other.wait() == 0
    assert len({*theirs, *ours}) == 2 * DRAWN
    monkeypatch.setattr(ports, "_FIRST", theirs[0])
    monkeypatch.setattr(ports, "_LAST", theirs[0] + 2)
    assert free_port() == theirs[0]


def test_ports_in_a_row_are_all_given(monkeypatch):
    first = free_ports(3)
    monkeypatch.setattr(ports, "_FIRST", first)
    monkeypatch.setattr(ports, "_LAST", first + 4)
    with pytest.raises(OSError, match="no 1 ports"):
        free_port()


def test_a_port_that_a_server_has_is_not_given(claims, monkeypatch):
    port = free_port()
    claims.close()  # as if another process had been given it, and only its server still ran
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_LAST", port + 2)
        with pytest.raises(OSError, match="no 1 ports"):
            free_port()
    assert free_port() == port
