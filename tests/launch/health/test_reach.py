"""Connections to real sockets that answer, refuse or stay silent, and to unknown names."""

import errno
import socket
import threading

import pytest

from launch.health.reach import (
    REACHED,
    REFUSED,
    SILENT,
    UNKNOWN_NAME,
    UNREACHABLE,
    is_port_free,
    reach,
    reach_all,
)
from tests.launch.health.sockets import closed, listening, silent


def test_each_address_has_its_state():
    with listening() as answers, silent() as drops:
        addresses = [
            f"127.0.0.1:{answers}",
            f"localhost:{closed()}",
            f"127.0.0.1:{drops}",
            "no-such-host.invalid:2222",  # RFC 2606 reserves .invalid for names that never exist.
            "a..b:2222",
        ]
        found = reach_all(addresses, timeout_seconds=0.5)
    assert [one.state for one in found] == [REACHED, REFUSED, SILENT, UNKNOWN_NAME, UNKNOWN_NAME]
    assert found[4].reason == "not a valid host name"
    assert found[0].seconds < found[2].seconds and found[2].seconds >= 0.5


@pytest.mark.timeout(15)
def test_addresses_are_tried_concurrently():
    """Forty silent peers take about as long as one."""
    with silent() as drops:
        found = reach_all([f"127.0.0.1:{drops}"] * 40, timeout_seconds=0.5)
    # One after another they would take 20 seconds.
    assert {one.state for one in found} == {SILENT}


@pytest.mark.timeout(30)
def test_a_silent_name_server_does_not_delay_the_result(monkeypatch):
    over = threading.Event()

    def getaddrinfo(*_, **__):
        over.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "late")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    (found,) = reach_all(["worker-1.ring:2222"], timeout_seconds=0.2)
    over.set()
    assert (found.state, found.reason) == (UNKNOWN_NAME, "the name server does not answer")


def answers_of(*ports):
    return lambda *_, **__: [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port)) for port in ports
    ]


def test_one_address_that_answers_is_enough(monkeypatch):
    """For example localhost, which may resolve to ::1 first, where nothing listens."""
    with listening() as answers, silent() as drops:
        monkeypatch.setattr(socket, "getaddrinfo", answers_of(closed(), drops, answers))
        found = reach("several:1", timeout_seconds=0.6)
        assert found.state == REACHED
        assert found.seconds < 0.6, "the addresses must share the timeout"
        monkeypatch.setattr(socket, "getaddrinfo", answers_of(drops, closed()))
        assert reach("several:1", timeout_seconds=0.6).state == REFUSED


def test_no_route_to_the_host(monkeypatch):
    def connect(*_):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket.socket, "connect", connect)
    found = reach("10.0.0.1:2222", timeout_seconds=0.5)
    assert (found.state, found.reason) == (UNREACHABLE, "No route to host")


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_ipv6_address_in_brackets():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no ::1")
    with server:
        assert reach(f"[::1]:{server.getsockname()[1]}", timeout_seconds=0.5).state == REACHED


def test_a_port_is_free_or_taken():
    with listening() as port:
        assert not is_port_free(port)
    assert is_port_free(port)


def test_the_port_of_a_server_that_has_just_ended_is_free():
    """Connections that the server closed first stay in the kernel for a minute; a new server can still listen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.close()
        client.recv(1)
        client.close()
    assert is_port_free(port)
