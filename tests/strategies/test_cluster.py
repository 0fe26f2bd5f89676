"""Addresses of the processes of a cluster."""

import socket
import subprocess
import sys

import pytest

from strategies.cluster import Member
from strategies.ring.exchange import tcp_connect
from strategies.servers.own.connections.listener import Listener
from strategies.waiting import listening, listens
from tests.launch.programs import environment

resolve, create_server = socket.getaddrinfo, socket.create_server
LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"


@pytest.fixture
def names(monkeypatch):
    """This machine's names with their addresses, to which a test adds some."""
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


@pytest.fixture
def own_name(names, monkeypatch) -> str:
    """A machine's own name as in Debian's /etc/hosts: other machines know it by another address."""

    def bound(address, **named):
        host, port = address
        return create_server((names.get(host, [host])[0], port), **named)

    monkeypatch.setattr(socket, "create_server", bound)
    names["own"] = [LOOPBACK]
    return "own"


def host_of(listener: socket.socket) -> str:
    with listener:
        return listener.getsockname()[0]


@pytest.mark.parametrize("more", [[], ["192.0.2.1"]])
def test_other_machines_reach_a_machine_whose_name_has_a_loopback_address_there(names, own_name, more):
    names[own_name] += more
    assert host_of(tcp_connect._listener(Member("worker", 0, f"{own_name}:2222"))) == ALL
    assert host_of(Listener(Member("ps", 0, f"{own_name}:0"))._socket) == ALL


@pytest.mark.parametrize(
    "addresses, host",
    [
        (["192.0.2.1"], "own"),
        (["192.0.2.1", "198.51.100.1"], ""),
        (["2001:db8::1", "2001:db8::2"], ""),
        (["192.0.2.1", "2001:db8::1", "2001:db8::2"], "own"),
    ],
)
def test_other_machines_reach_a_machine_by_each_address_of_its_name(names, addresses, host):
    """They may not know the first address, or not reach it. With both families it listens on IPv4."""
    names["own"] = addresses
    assert Member("worker", 0, "own:2222").listening_host == host


# Runs a command in a network of its own and with an /etc/hosts of its own.
TWO_ADDRESSES = """
set -e
ip link set lo up
for address in 10.1.0.1 10.2.0.1; do ip address add $address/24 dev lo; echo $address own; done > hosts
mount --bind hosts /etc/hosts
"$@"
"""
REACHED = """
from strategies.cluster import Member
from strategies.ring.exchange import tcp_connect
from strategies.servers.own.connections.listener import Listener
from strategies.waiting import listens

ring, server = tcp_connect._listener(Member("worker", 0, "own:2222")), Listener(Member("ps", 0, "own:3333"))
for port in (ring.getsockname()[1], 3333):
    print([listens(f"10.{network}.0.1:{port}") for network in (1, 2)])
server.close()
"""


def in_own_network(folder, *command: str) -> subprocess.CompletedProcess:
    """Runs a command on a machine whose name `own` has two addresses, neither of them a loopback address."""
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", TWO_ADDRESSES, "sh"]
    return subprocess.run(
        [*unshare, *command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=100
    )


@pytest.mark.full
def test_a_machine_whose_name_has_two_addresses_is_reached_at_both(tmp_path):
    try:
        problem = in_own_network(tmp_path, "true").stderr
    except OSError as error:
        problem = str(error)
    if problem:
        pytest.skip(f"this system permits no network with names of its own: {problem}")
    done = in_own_network(tmp_path, sys.executable, "-c", REACHED)
    assert done.stdout == "[True, True]\n[True, True]\n", done.stderr


@pytest.mark.parametrize("host", ["localhost", LOOPBACK])
def test_an_address_of_this_machine_alone_stays_so(host):
    assert host_of(tcp_connect._listener(Member("worker", 0, f"{host}:2222"))) == LOOPBACK
    assert host_of(Listener(Member("ps", 0, f"{host}:0"))._socket) == LOOPBACK


def test_whom_no_secret_keeps_out_must_be_of_this_machine(own_name):
    assert host_of(Listener(Member("ps", 0, f"{own_name}:0"), for_other_machines=False)._socket) == LOOPBACK
