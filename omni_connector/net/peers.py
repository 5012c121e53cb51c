# SPDX-License-Identifier: Apache-2.0
"""Hosts: how a setting or a message names one, and which hosts are allowed.

A host is an IP address or a host name. Nothing here resolves a name, as its address may change
between the check and its use: a name is allowed only if the name itself is listed, and no name
counts as loopback.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from omni_connector.errors import ConfigError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOST_CHARS: Final = 253
MAX_PORT: Final = 65535

_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# The C library reads a name that ends in a number as an address: "127.1", "0x7f000001", even "0".
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")


class HostPort(NamedTuple):
    """A TCP address; the host as `parse_host` reads it, IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peers:
    """The hosts that this engine may connect to.

    Args:
        entries: IP addresses, networks such as `10.0.0.0/8`, and host names, which are compared as
            text, without regard to case. No host is implied, not even loopback.

    Raises:
        ConfigError: an entry is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._networks: list[IPNetwork] = []
        self._names: set[str] = set()
        for entry in entries:
            try:
                found = _parse_network(entry) if "/" in entry else parse_host(entry)
            except ValueError as error:
                raise ConfigError(
                    f"peers: {entry!r} is no IP address, network or host name ({error})"
                ) from None
            if isinstance(found, str):
                self._names.add(found)
            elif isinstance(found, IPNetwork):
                self._networks.append(found)
            else:
                self._networks.append(ipaddress.ip_network(found))

    @property
    def family(self) -> str | None:
        """`IPv4` or `IPv6` where all entries are addresses of that family, else None."""
        found = {f"IPv{network.version}" for network in self._networks}
        return found.pop() if len(found) == 1 and not self._names else None

    def allows(self, host: str) -> bool:
        """Whether `host`, an address or a name, is listed; False for what is neither."""
        try:
            found = parse_host(host)
        except ValueError:
            return False
        if isinstance(found, str):
            return found in self._names
        return any(found in network for network in self._networks)


def parse_host(text: str) -> IPAddress | str:
    """Read an IP address, or a host name, which is returned in lower case.

    An IPv4 address in IPv6's form (`::ffff:10.0.0.1`) is returned as IPv4.

    Raises:
        ValueError: `text` is neither, or an address of no single host (`0.0.0.0`, multicast).
    """
    if len(text) > MAX_HOST_CHARS:
        raise ValueError(f"{len(text)} characters are no host")
    try:
        address: IPAddress = ipaddress.ip_address(text)
    except ValueError:
        return _parse_name(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise ValueError("an address with a zone means something on one host only")
        address = address.ipv4_mapped or address
    if address.is_unspecified:
        raise ValueError("a wildcard address names no host")
    if address.is_multicast:
        raise ValueError("a multicast address names no host")
    return address


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address; a name never is.

    Raises:
        ValueError: `host` is neither an address nor a name.
    """
    found = parse_host(host)
    return not isinstance(found, str) and found.is_loopback


def parse_host_port(text: str) -> HostPort:
    """Read `host:port` or `[IPv6 address]:port`, with a port of 0 to 65535.

    Raises:
        ValueError: `text` is neither.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or (":" in host) != bracketed:
        raise ValueError("it is neither 'host:port' nor '[IPv6 address]:port'")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= MAX_PORT):
        raise ValueError(f"{port!r} is no port")
    return HostPort(str(parse_host(host)), int(port))


def parse_listen(text: str, rank: int = 0) -> HostPort:
    """The address to listen at that the setting `listen` names.

    Args:
        text: the setting.
        rank: data-parallel rank of the engine, which is added to the port, unless that is 0, with
            which the system chooses one.

    Raises:
        ConfigError: it is no address, or a wildcard, which peers could not connect to.
    """
    try:
        host, port = parse_host_port(text)
        if port and port + rank > MAX_PORT:
            raise ValueError(f"data-parallel rank {rank} would listen at port {port + rank}")
        return HostPort(host, port + rank if port else 0)
    except ValueError as error:
        raise ConfigError(
            f"listen: {text!r} is no address to listen at ({error}); name the address that peers "
            "shall use, as 'host:port' or '[IPv6 address]:port'"
        ) from None


def _parse_name(text: str) -> str:
    labels = text.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        raise ValueError("it is neither an IP address nor a host name")
    return text.lower()


def _parse_network(text: str) -> IPNetwork:
    if "%" in text:
        raise ValueError("an address with a zone means something on one host only")
    network: IPNetwork = ipaddress.ip_network(text)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        mapped = network.network_address.ipv4_mapped
        return ipaddress.ip_network((int(mapped or 0), network.prefixlen - 96))
    return network
