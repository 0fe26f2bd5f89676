"""Functions that graphs of another process call: what that process learns about their errors."""

import pytest
import tensorflow as tf

from strategies.data_checks.data_errors import user_error_in
from strategies.distribute.host_functions import HostFunctions, call
from towers.errors import UserError

# gRPC prints a longer message as a whole in each process.
MOST_CHARACTERS = 3072


def raises(error: Exception):
    """A function that raises `error` from an error with a long text, as TensorFlow's have."""

    def function(value):
        try:
            raise RuntimeError("cause " * MOST_CHARACTERS)
        except RuntimeError as cause:
            raise error from cause

    return function


@pytest.fixture
def offered():
    functions = HostFunctions({"user": raises(UserError("batch 3 is empty")), "own": raises(ValueError("a bug"))})
    yield
    functions.withdraw()


def error_of(name: str) -> tf.errors.OpError:
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        call(name, [tf.constant(1)], [tf.TensorSpec([], tf.int32)])
    return raised.value


def test_a_mistake_of_the_users_comes_without_its_causes(offered):
    error = error_of("user")
    assert str(user_error_in(error)) == "batch 3 is empty"
    assert len(str(error)) < MOST_CHARACTERS
    assert "cause cause" not in str(error)


def test_another_error_keeps_its_causes(offered):
    assert "cause cause" in str(error_of("own"))
