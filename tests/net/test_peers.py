# SPDX-License-Identifier: Apache-2.0
"""Which hosts are allowed, and what is a host at all."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.errors import ConfigError
from omni_connector.net.peers import (
    MAX_HOST_CHARS,
    HostPort,
    Peers,
    is_loopback,
    parse_host,
    parse_host_port,
    parse_listen,
)

ADDRESSES = st.ip_addresses()
LABELS = st.from_regex(r"[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,20}[a-zA-Z0-9_])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("entries", "host", "allowed"),
    [
        ([], "127.0.0.1", False),
        ([], "localhost", False),
        (["10.0.0.1"], "10.0.0.1", True),
        (["10.0.0.1"], "10.0.0.2", False),
        (["10.0.0.0/8"], "10.255.0.1", True),
        (["10.0.0.0/8"], "11.0.0.0", False),
        (["10.0.0.0/8"], "127.0.0.1", False),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", True),
        (["::ffff:10.0.0.0/104"], "10.1.2.3", True),
        (["::ffff:10.0.0.0/104"], "11.1.2.3", False),
        (["::ffff:10.0.0.1"], "10.0.0.1", True),
        (["0.0.0.0/0"], "fd00::1", False),
        (["::/0"], "10.0.0.1", False),
        (["0.0.0.0/0"], "0.0.0.0", False),
        (["::/0"], "::", False),
        (["fd00::/8"], "fd12::1", True),
        (["fd00::1"], "fd00:0:0::0:1", True),
        (["Node-7.Rack"], "nODE-7.rack", True),
        (["node-7"], "node-77", False),
        (["node-7.rack"], "node-7", False),
        (["node-7"], "node-7.", False),
        (["127.0.0.1"], "localhost", False),
        (["localhost"], "127.0.0.1", False),
        (["127.0.0.1"], "127.1", False),
        (["10.0.0.1", "node"], "node", True),
        (["node"], "node;10.0.0.1", False),
    ],
)
def test_only_what_is_listed_is_allowed(entries: list[str], host: str, allowed: bool) -> None:
    assert Peers(entries).allows(host) is allowed


BAD_ENTRIES = """* *.rack 10.0.0.1/8 10.0.0.0/33 10.0.0.0/ 10.0.0.1:5600 10.0.0 010.0.0.1 0.0.0.0
224.0.0.1 fe80::1%eth0 fe80::%eth0/64 [::1] http://node/ n\u00f6de 127.1 0x7f.1"""


@pytest.mark.parametrize("entry", [*BAD_ENTRIES.split(), "", " ", "no de", "node\n", "x" * 64])
def test_a_malformed_entry_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match="peers: ") as error:
        Peers(["10.0.0.1", entry])
    assert repr(entry) in str(error.value)


@settings(deadline=None)
@given(ADDRESSES, st.integers(0, 128))
def test_a_network_allows_the_addresses_in_it(address: ipaddress.IPv4Address, bits: int) -> None:
    network = ipaddress.ip_network((address, min(bits, address.max_prefixlen)), strict=False)
    peers = Peers([str(network)])
    for each in (address, network[0], network[-1]):
        assert peers.allows(str(each)) or each.is_unspecified or each.is_multicast or _mapped(each)
    for outside in (int(network[0]) - 1, int(network[-1]) + 1):
        if 0 <= outside < 1 << address.max_prefixlen:
            assert not peers.allows(str(type(address)(outside)))


def _mapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None


@settings(deadline=None)
@given(st.lists(ADDRESSES.map(str) | NAMES), st.text() | NAMES | ADDRESSES.map(str))
def test_what_is_allowed_is_listed(entries: list[str], host: str) -> None:
    entries = [entry for entry in entries if _is_host(entry)]
    assert Peers(entries).allows(host) == (
        _is_host(host) and parse_host(host) in [parse_host(entry) for entry in entries]
    )


def _is_host(text: str) -> bool:
    try:
        parse_host(text)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(st.text() | st.text("0123456789abcdefx.:-_[]%;/*", max_size=20) | NAMES)
def test_what_is_a_host_changes_no_address_that_it_is_put_in(text: str) -> None:
    if not _is_host(text):
        return
    assert len(text) <= MAX_HOST_CHARS
    assert text.isascii()
    host = str(parse_host(text))
    assert not set(host) & set("*;/%[]@ \t\n\0")
    assert parse_host(host) == parse_host(text)
    assert parse_host_port(str(HostPort(host, 5))) == (host, 5)
    if ":" in host or host.replace(".", "").isdigit():
        assert not ipaddress.ip_address(host).is_unspecified


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_known_by_its_address(host: str) -> None:
    assert is_loopback(host)


# What a name means is not known before.
@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "localhost", "127.0.0.1.example.org"])
def test_what_may_be_another_host_is_no_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:5600", "10.0.0.1", 5600),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[fd00:0::1]:65535", "fd00::1", 65535),
        ("Node-7:5600", "node-7", 5600),
    ],
)
def test_an_address_to_listen_at_is_read(text: str, host: str, port: int) -> None:
    assert parse_listen(text) == HostPort(host, port)


NOWHERE = """: 5600 node :5600 node: node:65536 node:-1 node:+5 node:5_0 node:\u0665 node:http
fd00::1:5600 [fd00::1] [10.0.0.1]:5600 [node]:5600 0.0.0.0:5600 [::]:5600 [::0]:5600
[::ffff:0.0.0.0]:5600 *:5600 0:5600 tcp://10.0.0.1:5600 node:1:2"""


@pytest.mark.parametrize("text", [*NOWHERE.split(), "", "node: 5"])
def test_what_does_not_say_where_to_listen_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name the address that peers shall use") as error:
        parse_listen(text)
    assert repr(text) in str(error.value)
