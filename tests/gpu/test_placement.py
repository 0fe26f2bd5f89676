"""Parameters, slots and towers are on the devices that the mode says, and a step copies no input."""

import pytest

from tests.gpu.fresh_process import run_check
from tests.gpu.modes import MODES

pytestmark = pytest.mark.gpu
_ELSEWHERE = ("synced", "accumulation", "dropout", "xla", "mirrored")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in _ELSEWHERE])
def test_parameters_and_slots(mode):
    run_check("placement", "variables", mode)


@pytest.mark.parametrize("mode", ["central", "replicated", "zero=2"])
def test_a_towers_operations_are_on_its_device(mode):
    run_check("placement", "tower_operations", mode)


@pytest.mark.parametrize("mode", ["central", "replicated", "zero=2", "zero=3", "mirrored"])
def test_a_step_sends_no_input(mode):
    run_check("placement", "no_copies_of_input", mode)


@pytest.mark.parametrize("kind", ["text", "clicks"])
def test_the_host_reads_no_integer_of_a_tower(kind):
    run_check("placement", "integers_stay", kind)


@pytest.mark.parametrize("mode", ["parameters on the first device", "replicated", "sharded", "zero=1"])
def test_what_gpus_send_each_other_is_packed(mode):
    run_check("placement", "packed_copies", mode)
