"""Ports that are free, different, and not the kernel's to lend."""

import contextlib
import random
import socket

import pytest

from launch.membership import free_ports
from launch.membership.free_ports import free_addresses


def ports_of(addresses) -> list[int]:
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    return [int(address.partition(":")[2]) for address in addresses]


def test_they_are_different_and_can_be_bound():
    ports = ports_of(free_addresses(20))
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_they_do_not_depend_on_a_seed():
    found = []
    for _ in range(2):
        random.seed(3)
        found.append(free_addresses(3))
    assert found[0] != found[1]


@pytest.fixture
def lent(tmp_path, monkeypatch):
    """Says which ports the kernel lends."""

    def lend(text):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(free_ports, "_RANGE_FILE", tmp_path / "range")

    return lend


def test_they_lie_below_those_that_are_lent(lent):
    lent("10100\t60999\n")
    assert all(10000 <= port < 10100 for port in ports_of(free_addresses(30)))


def test_a_port_in_use_is_passed_over(lent, monkeypatch):
    with contextlib.ExitStack() as used:
        taken = ports_of(free_addresses(3))
        for port in taken:
            used.enter_context(socket.socket()).bind(("127.0.0.1", port))
        monkeypatch.setattr(free_ports._DRAW, "sample", lambda population, k: [next(iter(population)), *taken])
        assert not set(ports_of(free_addresses(2))) & set(taken)


@pytest.mark.parametrize("text", ["1024 65535", "", "nonsense"])
def test_where_all_are_lent_any_free_one_will_do(lent, text):
    lent(text)
    assert len(set(ports_of(free_addresses(3)))) == 3
