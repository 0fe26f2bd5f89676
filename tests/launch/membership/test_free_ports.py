"""Ports that are free, different, and outside of the kernel's range for outgoing connections."""

import contextlib
import random
import socket
import sys

import pytest

from launch.membership import free_ports
from launch.membership.free_ports import free_addresses
from tests.towers.user_errors import refused


def ports_of(addresses) -> list[int]:
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    return [int(address.partition(":")[2]) for address in addresses]


def test_they_are_different_and_can_be_bound():
    ports = ports_of(free_addresses(20))
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_they_do_not_depend_on_the_seed():
    found = []
    for _ in range(2):
        random.seed(3)
        found.append(free_addresses(3))
    assert found[0] != found[1]


def test_a_process_that_may_listen_on_no_port(monkeypatch):
    def refuse(self, address):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with refused("listen on no port (Operation not permitted)"):
        free_addresses(1)


@pytest.fixture
def set_range(tmp_path, monkeypatch):
    """Replaces the text of the kernel's range for outgoing connections."""

    def set_text(text):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(free_ports, "_RANGE_FILE", tmp_path / "range")

    return set_text


def test_they_lie_below_the_range_for_outgoing_connections(set_range):
    set_range("10100\t60999\n")
    assert all(10000 <= port < 10100 for port in ports_of(free_addresses(30)))


def test_a_port_in_use_is_skipped(monkeypatch):
    with contextlib.ExitStack() as used:
        taken = ports_of(free_addresses(3))
        for port in taken:
            used.enter_context(socket.socket()).bind(("127.0.0.1", port))
        monkeypatch.setattr(free_ports._DRAW, "sample", lambda population, k: [next(iter(population)), *taken])
        assert not set(ports_of(free_addresses(2))) & set(taken)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_port_in_use_on_another_address_is_skipped(monkeypatch):
    """TensorFlow's server listens on all addresses."""
    (taken,) = ports_of(free_addresses(1))
    with socket.socket() as other:
        other.bind(("127.0.0.2", taken))
        other.listen()
        monkeypatch.setattr(free_ports._DRAW, "sample", lambda population, k: [next(iter(population)), taken])
        assert ports_of(free_addresses(1)) != [taken]


@pytest.mark.parametrize("text", ["1024 65535", "", "nonsense"])
def test_any_free_port_is_used_if_the_range_leaves_none(set_range, text):
    set_range(text)
    assert len(set(ports_of(free_addresses(3)))) == 3
