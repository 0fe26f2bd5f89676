"""A private network that a process gives to others: who can reach it, and that the process's own stays."""

import os
import socket
import subprocess
import sys

import pytest

from launch.networks import held_network
from launch.networks.held_network import private_network
from tests.launch.system_networks import needs_private_network

pytestmark = [pytest.mark.timeout(60), pytest.mark.full]
SERVE = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); s.accept()"
REACH = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)"


@needs_private_network
def test_only_those_inside_reach_a_server_on_every_interface():
    before = socket.if_nameindex()
    with private_network() as network:
        command = [*network.inside, sys.executable, "-c"]
        with subprocess.Popen([*command, SERVE], stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(port)), timeout=5)
            subprocess.run([*command, REACH, port], check=True, timeout=30)
    assert server.returncode == 0
    assert socket.if_nameindex() == before


@needs_private_network
@pytest.mark.parametrize("command, code", [(["true"], 0), (["sh", "-c", "exit 7"], 7), (["no-such-program"], 127)])
def test_the_exit_code_is_that_of_the_command(command, code):
    with private_network() as network:
        done = subprocess.run([*network.inside, *command], capture_output=True, timeout=30, check=False)
    assert done.returncode == code


def test_without_permission_commands_run_where_they_are(monkeypatch):
    command = (sys.executable, "-c", "print('Operation not permitted'); input()")
    monkeypatch.setattr(held_network, "own_program", lambda module: (command, {}))
    with private_network() as network:
        assert (network.inside, network.problem) == ((), "Operation not permitted")


def test_a_holder_that_stands_still_is_ended(monkeypatch):
    command = (sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)")
    monkeypatch.setattr(held_network, "own_program", lambda module: (command, {}))
    monkeypatch.setattr(held_network, "_LIMIT_SECONDS", 5)
    with private_network() as network:
        holder = int(network.inside[-1])
        monkeypatch.setattr(held_network, "_LIMIT_SECONDS", 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(holder, 0)


def test_a_holder_that_says_nothing(monkeypatch):
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(held_network, "own_program", lambda module: (command, {}))
    monkeypatch.setattr(held_network, "_LIMIT_SECONDS", 0.2)
    with private_network() as network:
        assert (network.inside, network.problem) == ((), "no answer for 0.2 seconds")
