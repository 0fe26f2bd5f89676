"""Memory growth: other programs can use the rest of the GPU."""

import pytest

from tests.gpu.fresh_process import STAND_IN, run_check

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(STAND_IN, reason="only a GPU's memory grows")
def test_a_process_leaves_the_rest_of_the_gpu():
    run_check("memory_growth", "a_process_leaves_the_rest_of_the_gpu")
