"""What the chief of TensorFlow's servers says about lost processes, and about what ended a worker's step."""

import pytest
import tensorflow as tf

from launch.binary import PEER_LOST
from strategies.distribute.coordinator_connection import lost_named
from tests.launch.nursery import run_forked
from tests.launch.programs import errors
from tests.towers.user_errors import refused


@pytest.mark.full
@pytest.mark.timeout(100)
def test_processes_that_are_lost_while_the_chief_connects_are_named(tmp_path):
    ended = run_forked("-m", "tests.strategies.distribute.lost_at_connecting_program", cwd=tmp_path)
    assert ended.code == PEER_LOST, ended.err
    (line,) = errors(ended)
    assert "ps:0 (127.0.0.1:" in line
    assert "worker:0 (127.0.0.1:" in line
    assert "was lost: restart all processes" in line


def test_a_worker_that_can_not_compile_the_model_is_one_line():
    text = "No kernel is here\n\ttf2xla conversion failed while converting __inference__train_7[]."
    with refused("xla=True: XLA can't compile", "No kernel is here", "use xla=False"), lost_named([]):
        raise tf.errors.InvalidArgumentError(None, None, text)
