"""A cluster's private network: which processes can reach a port that listens on every interface."""

import socket
import subprocess
import sys

import pytest

from tests.launch.clusters import launched, run_cluster
from tests.launch.programs import environment
from tests.launch.system_networks import needs_private_network

pytestmark = pytest.mark.timeout(120)

SERVER = """
import socket

if name == "worker:0":
    server = socket.create_server(("", 0))
    (here / "new").write_text(str(server.getsockname()[1]))
    (here / "new").rename(here / "port")
else:
    until_marked("port")
    socket.create_connection(("127.0.0.1", int((here / "port").read_text())), timeout=10)
    print(sorted(name for _, name in socket.if_nameindex()))
    mark("reached")
until_marked("tried")
"""


def reachable_from_here(folder, *flags) -> tuple[bool, str]:
    """Whether this process can connect to a worker's port; and the output of a cluster whose workers can."""
    with launched(folder, SERVER, "--workers=2", *flags) as cluster:
        cluster.wait_for("reached")
        try:
            socket.create_connection(("127.0.0.1", int((folder / "port").read_text())), timeout=10).close()
            reached = True
        except ConnectionRefusedError:
            reached = False
        (folder / "tried").touch()
        return reached, cluster.ended().out


@needs_private_network
def test_only_the_cluster_reaches_its_ports(tmp_path):
    reached, out = reachable_from_here(tmp_path)
    assert not reached
    assert "[worker:1] ['lo']" in out


def test_without_a_private_network_the_port_is_reachable(tmp_path):
    assert reachable_from_here(tmp_path, "--noprivate_network")[0]


@needs_private_network
def test_the_owner_of_new_files_stays_the_same(tmp_path):
    done = run_cluster(tmp_path, "print(os.getuid(), os.getgid()); mark(name)", "--workers=1")
    assert done.out.split()[1:] == [str(tmp_path.stat().st_uid), str(tmp_path.stat().st_gid)]
    assert (tmp_path / "worker:0").stat().st_uid == tmp_path.stat().st_uid


REFUSED_LATE = """
import os
from launch.networks import private_network

def refused():
    raise PermissionError(1, "Operation not permitted")

private_network._raise_loopback = refused
before = os.readlink("/proc/self/ns/net")
try:
    private_network.enter_private_network()
except OSError as error:
    print(error.strerror, before == os.readlink("/proc/self/ns/net"))
"""


@pytest.mark.full
@needs_private_network
def test_a_system_that_refuses_a_later_step_leaves_the_process_in_its_network():
    """For example a system where a namespace may be made but its loopback interface may not be started."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_LATE], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("Operation not permitted True\n", "")


def test_without_permission_the_cluster_runs_with_a_warning(tmp_path):
    program = """
import sys
from launch import local

def refused():
    raise PermissionError(1, "Operation not permitted")

local.enter_private_network = refused
sys.argv = ["local.py", "--workers=1", "--", "python", "-c", "print('ran')"]
local.cli()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "[worker:0] ran\n")
    assert done.stderr.startswith(
        "warning: could not create a private network (Operation not permitted), so others"
    )
    assert done.stderr.endswith("--noprivate_network silences this warning\n")
    assert done.stderr.count("\n") == 1
