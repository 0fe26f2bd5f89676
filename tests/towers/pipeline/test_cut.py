"""Cuts make the largest stage as small as possible: a comparison with all possible cuts."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as drawn

from tests.towers.user_errors import refused
from towers.pipeline.cut import balanced_boundaries, sized_boundaries


def all_cuts(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield [0, *inner, num_layers]


@drawn.composite
def chains(draw, costs):
    layers = draw(drawn.lists(costs, min_size=1, max_size=8))
    return layers, draw(drawn.integers(1, len(layers)))


def stage_costs(costs, boundaries) -> list[float]:
    return [sum(costs[first:end]) for first, end in itertools.pairwise(boundaries)]


@settings(max_examples=100, deadline=None)
@given(chains(drawn.integers(0, 20)))
def test_no_cut_is_better(case):
    costs, num_stages = case
    boundaries = balanced_boundaries(costs, num_stages)
    assert boundaries in all_cuts(len(costs), num_stages)

    def badness(cut):
        loads = stage_costs(costs, cut)
        return max(loads), sum(load**2 for load in loads)

    assert badness(boundaries) == min(map(badness, all_cuts(len(costs), num_stages)))


@settings(max_examples=50, deadline=None)
@given(chains(drawn.floats(0, 1e300)))
def test_no_cut_of_measured_seconds_is_better(case):
    costs, num_stages = case
    largest = max(stage_costs(costs, balanced_boundaries(costs, num_stages)))
    best = min(max(stage_costs(costs, cut)) for cut in all_cuts(len(costs), num_stages))
    assert largest == pytest.approx(best)


@pytest.mark.parametrize(
    "costs, num_stages, boundaries",
    [
        ([3, 1, 1, 5, 2], 3, [0, 3, 4, 5]),
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        # The largest stage is 10 for every cut of the others, so these are balanced.
        ([10, 1, 1, 1, 1], 3, [0, 1, 3, 5]),
        ([0, 0, 0], 3, [0, 1, 2, 3]),
        ([5], 1, [0, 1]),
    ],
)
def test_examples(costs, num_stages, boundaries):
    assert balanced_boundaries(costs, num_stages) == boundaries


def test_deep_models_take_no_time():
    costs = [1 + index % 7 for index in range(120)]
    boundaries = balanced_boundaries(costs, 8)
    assert max(stage_costs(costs, boundaries)) - min(stage_costs(costs, boundaries)) <= 7


def test_given_sizes():
    assert sized_boundaries((1, 3, 2), 6) == [0, 1, 4, 6]


@pytest.mark.parametrize(
    "cut, parts",
    [
        (lambda: balanced_boundaries([1, 1, 1], 4), ["4 stages for 3 operations", "at least one", "stages=3"]),
        (lambda: balanced_boundaries([1, 1, 1], 0), ["0 stages for 3 operations"]),
        (lambda: sized_boundaries((1, 3, 2), 8), ["balance=1,3,2", "add up to 6", "8 operations"]),
        (lambda: sized_boundaries((3, 0, 3), 6), ["balance=3,0,3", "at least one operation"]),
        (lambda: sized_boundaries((), 6), ["at least one operation"]),
    ],
)
def test_what_is_refused(cut, parts):
    with refused(*parts):
        cut()
