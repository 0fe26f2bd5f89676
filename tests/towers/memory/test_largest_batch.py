"""The largest batch that fits, compared with a trial of all batches."""

import pytest

from towers.memory.largest_batch import largest_batch

CURVES = {
    "too large from some length on": lambda length: 3 * length if length < 100 else float("inf"),
    "a line": lambda length: 100 + 7 * length,
    "steps": lambda length: 100 + 50 * (length // 8),
    "a workspace that stops growing": lambda length: 10 + 3 * length + min(40, 20 * length),
    "nearly flat": lambda length: 100 + length // 100,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("multiple", [1, 4])
def test_it_is_the_largest_that_fits(name, multiple):
    curve = CURVES[name]
    for limit in (99, 130, 517):
        fitting = [length for length in range(multiple, 50_000, multiple) if curve(length) <= limit]
        assert largest_batch(curve, limit, multiple=multiple) == max(fitting, default=0)


def test_a_batch_takes_few_trials():
    tried = []

    def needed(length):
        tried.append(length)
        return 10**6 + 4321 * length

    assert largest_batch(needed, 2**34) == (2**34 - 10**6) // 4321
    assert len(tried) <= 8, tried
