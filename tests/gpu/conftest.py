"""Tests that need a GPU. Without one, each is reported as skipped."""

import pytest
import tensorflow as tf

from tests.gpu.fresh_process import STAND_IN
from towers.quiet_stderr import stderr_aside


@pytest.fixture(autouse=True)
def gpu(request):
    """Skips a test of GPUs where TensorFlow finds none."""
    if request.node.get_closest_marker("gpu") is None:
        return
    with stderr_aside():
        found = tf.config.list_physical_devices("GPU")
    if not found and not STAND_IN:
        pytest.skip("TensorFlow finds no GPU")
