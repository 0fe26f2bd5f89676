"""Addresses of the processes of a cluster."""

import socket

import pytest

from strategies.cluster import Member
from strategies.waiting import listening, listens

resolve = socket.getaddrinfo


@pytest.fixture
def names(monkeypatch):
    """Names of this machine and their addresses; a test adds some."""
    known: dict[str, list[str]] = {}

    def getaddrinfo(host, port, family=0, *arguments, **named):
        found = []
        for address in known.get(host, [host]):
            of_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if host not in known or family in (0, of_family):
                found += resolve(address, port, family, *arguments, **named)
        return found

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize(
    "addresses, family",
    [(["::1"], socket.AF_INET6), (["127.0.0.1"], socket.AF_INET), (["::1", "127.0.0.1"], socket.AF_INET)],
)
def test_the_family_of_a_name(names, addresses, family):
    names["six"] = addresses
    assert Member("worker", 0, "six:2222").family == family


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("addresses", [["::1"], ["127.0.0.1"], ["::1", "127.0.0.1"]])
def test_others_reach_a_member_by_its_name(names, addresses):
    names["six"] = addresses
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as free:
        port = free.getsockname()[1]
    with listening(Member("worker", 0, f"six:{port}")):
        assert listens(f"six:{port}")
