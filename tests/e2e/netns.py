# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with a cable between them, which can be cut."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NETWORK = "10.213.77"


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one interface besides loopback.

    Attributes:
        name: of the namespace.
        address: of its end of the cable.
    """

    name: str
    address: str

    @property
    def interface(self) -> str:
        """Its end of the cable."""
        return f"v-{self.name}"[:15]


@dataclass(frozen=True, slots=True)
class Cable:
    """Between two hosts."""

    left: Host
    right: Host

    @contextmanager
    def cut(self) -> Iterator[None]:
        """While inside, nothing passes, and nobody is told."""
        _ip("-n", self.left.name, "link", "set", self.left.interface, "down")
        try:
            yield
        finally:
            _ip("-n", self.left.name, "link", "set", self.left.interface, "up")

    @contextmanager
    def worse(self) -> Iterator[str]:
        """While inside, what passes is slow (5 MB/s) and late, and some is lost; yields by what."""
        both = [self.left, self.right]
        # The kernel may lack netem. A short queue before a slow line does the same to TCP.
        for kind in (_NETEM, _SLOW_LINE):
            done = [_tc(host, "replace", "root", *kind) for host in both]
            if all(done):
                break
        else:
            raise OSError("neither netem nor tbf can be had")
        try:
            yield kind[0]
        finally:
            for host in both:
                _tc(host, "del", "root")


_NETEM = ["netem", "delay", "10ms", "3ms", "loss", "0.5%", "rate", "40mbit"]
_SLOW_LINE = ["tbf", "rate", "40mbit", "burst", "32kb", "limit", "64kb"]


def obstacle() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "needs iproute2"
    if os.geteuid() != 0:
        return "needs to be root"
    name = f"omni-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode:
        return f"may make no network namespace: {probe.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_hosts(network: str = _NETWORK) -> Iterator[Cable]:
    """Two namespaces and the cable; they are gone afterwards.

    Args:
        network: the first three numbers of their addresses, which end in 1 and 2.
    """
    hosts = [Host(f"omni{os.getpid()}{side}", f"{network}.{i}") for i, side in ((1, "a"), (2, "b"))]
    left, right = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        _ip(
            *("-n", left.name, "link", "add", left.interface, "type", "veth"),
            *("peer", "name", right.interface, "netns", right.name),
        )
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
        yield Cable(left, right)
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _tc(host: Host, verb: str, *words: str) -> bool:
    command = ["tc", "-n", host.name, "qdisc", verb, "dev", host.interface, *words]
    return subprocess.run(command, capture_output=True).returncode == 0
