"""A few random trials; the program `random_trials` runs any number of them."""

import pytest

from tests.conformance.random_trials import trial


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 4])
def test_a_random_model_in_a_random_mode_equals_one_device(number):
    found = trial(number)
    assert found.difference is not None, f"this mode refuses the model: choose another trial: {found}"
    assert found.is_right, found
