"""Sets stay on the host, and the next step's input is on the towers' devices."""

import pytest

from tests.gpu.fresh_process import run_check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["images", "own arrays"])
def test_sets_stay_on_the_host(kind):
    run_check("data", "sets_stay_on_the_host", kind)


def test_parts_are_on_their_towers_before_the_step():
    run_check("data", "parts_are_there_before_the_step")


def test_a_label_out_of_range_is_named():
    run_check("data", "a_label_out_of_range_is_named")
