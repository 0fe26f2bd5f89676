"""A few random trials; the program `random_trials` runs any number of them."""

import types

import pytest

from tests.conformance import random_trials
from tests.conformance.random_trials import trial


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 4])
def test_a_random_model_in_a_random_mode_equals_one_device(number):
    found = trial(number)
    assert found.difference is not None, f"this mode refuses the model: choose another trial: {found}"
    assert found.is_right, found


def test_a_ring_worker_without_a_whole_variable_compares_its_evaluation(monkeypatch):
    monkeypatch.setattr(random_trials, "differences", lambda *_: [])
    ours, theirs = (
        types.SimpleNamespace(evaluate=lambda loss=loss: {"loss": loss}, collect=lambda: None, keeps_files=False)
        for loss in (1.0, 2.0)
    )
    assert random_trials.compared("ring", ours, ours, num_steps=3).is_right
    assert not random_trials.compared("ring", ours, theirs, num_steps=3).is_right
