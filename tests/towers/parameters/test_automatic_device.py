"""Where parameters are by default with towers on GPUs."""

import pytest

from towers.parameters.automatic_device import chosen_device

MIB, GIB = 2**20, 2**30


def chosen(num_gpus, parameters, slots=None, memory=16 * GIB, **named):
    slots = 2 * parameters if slots is None else slots
    return chosen_device(
        num_gpus=num_gpus, parameter_bytes=parameters, slot_bytes=slots, gpu_bytes=memory, **named
    )


@pytest.mark.parametrize(
    "num_gpus, parameters, named, device, reason",
    [
        pytest.param(1, MIB, {}, "gpu:0", "the only GPU of this process; 4 MiB of parameters", id="one"),
        pytest.param(4, MIB, {}, "replicated", "each of 4 GPUs updates its own copy", id="several"),
        pytest.param(8, 2 * GIB, {}, "replicated", "8 GiB of parameters, gradients and", id="exactly_half"),
        pytest.param(8, 2 * GIB + MIB, {}, "cpu", "more than half of a GPU's 16 GiB", id="more_than_half"),
        pytest.param(1, 3 * GIB, {}, "cpu", "more than half", id="one_too_small"),
        pytest.param(2, GIB, {"reads_rows": True}, "gpu:0", "rows of large tables", id="tables"),
        pytest.param(2, 3 * GIB, {"reads_rows": True}, "cpu", "more than half", id="tables_too_large"),
        pytest.param(2, GIB, {"memory": None}, "replicated", "whose size is unknown", id="unknown_memory"),
        pytest.param(1, GIB, {"memory": None}, "gpu:0", "whose size is unknown", id="one_of_unknown_memory"),
    ],
)
def test_the_choice(num_gpus, parameters, named, device, reason):
    found = chosen(num_gpus, parameters, **named)
    assert found.device == device and reason in found.reason


def test_what_divides_a_state_that_fits_no_gpu():
    assert "zero=1 divides the optimizer state" in chosen(4, 3 * GIB).reason
    assert "zero=3 divides all" in chosen(4, 5 * GIB).reason
    assert "zero" not in chosen(1, 5 * GIB).reason, "there is nothing to divide it over"


def test_slots_count_as_the_rule_has_them():
    assert chosen(2, 3 * GIB, slots=0).device == "replicated"
    assert chosen(2, 3 * GIB, slots=3 * GIB).device == "cpu"
