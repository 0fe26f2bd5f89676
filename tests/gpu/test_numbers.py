"""Training on a GPU gives the CPU's numbers, within the tolerance of `tests.gpu.checks.numbers`."""

import pytest

from tests.gpu.fresh_process import run_check
from tests.gpu.modes import MODES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", MODES)
def test_20_steps_beside_the_cpu(mode):
    run_check("numbers", "beside_cpu", mode)


@pytest.mark.parametrize("mode", ["parameters on the first device", "replicated", "xla"])
def test_several_steps_in_an_execution_beside_the_cpu(mode):
    run_check("numbers", "several_steps", mode)


@pytest.mark.parametrize("mode", ["parameters on the first device", "replicated", "mirrored"])
def test_late_reports_beside_steps_that_are_awaited(mode):
    run_check("numbers", "late_reports", mode)
