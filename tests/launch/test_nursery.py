"""The programs of the tests' clusters: nothing outside this machine can reach them."""

from tests.launch.nursery import run_forked
from tests.launch.system_networks import needs_private_network


@needs_private_network
def test_its_programs_have_a_loopback_interface_only(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import socket\nprint([name for _, name in socket.if_nameindex()])\n")
    ended = run_forked(str(program), cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "['lo']\n"), ended.err
