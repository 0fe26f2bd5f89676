"""The chief of TensorFlow's servers connects to processes that are lost at that moment."""

import pytest

from launch.binary import PEER_LOST
from tests.launch.nursery import run_forked
from tests.launch.programs import errors


@pytest.mark.full
@pytest.mark.timeout(100)
def test_processes_that_are_lost_while_the_chief_connects_are_named(tmp_path):
    ended = run_forked("-m", "tests.strategies.distribute.lost_at_connecting_program", cwd=tmp_path)
    assert ended.code == PEER_LOST, ended.err
    (line,) = errors(ended)
    assert "ps:0 (127.0.0.1:" in line
    assert "worker:0 (127.0.0.1:" in line
    assert "was lost: restart all processes" in line
