"""Commands that make hosts: however a command fails, it raises the error that callers expect."""

import pytest

from launch.networks import network_namespaces
from launch.networks.network_namespaces import NetworkError


def test_a_program_that_is_missing():
    with pytest.raises(NetworkError, match="no-such-program link add: .*No such file"):
        network_namespaces._run("no-such-program", "link", "add")


def test_a_program_that_hangs(monkeypatch):
    monkeypatch.setattr(network_namespaces, "_COMMAND_SECONDS", 0.1)
    with pytest.raises(NetworkError, match="sleep 60: .*timed out"):
        network_namespaces._run("sleep", "60")


def test_a_program_that_fails():
    with pytest.raises(NetworkError, match="^sh -c echo no >&2; exit 3: no$"):
        network_namespaces._run("sh", "-c", "echo no >&2; exit 3")
