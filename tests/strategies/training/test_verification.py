"""Verification reports the differences of a faulty strategy and passes a correct one."""

import math

import numpy as np
import pytest
import tensorflow as tf

from strategies.one_device_reference import reference_strategy
from strategies.registry import build_strategy
from strategies.training import verification
from strategies.training.verification import differences, relative_difference
from tests.strategies.small_task import random_task, small_strategy, small_task
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers import sums
from towers.task import Batch, WeightedLoss, batch_length

STEPS = 7  # more than an epoch, whose last batch does not divide evenly


def found(task, *, name="towers", num_towers=2, spoil=lambda strategy: None, shares=None, **options):
    """(differences of a strategy from its reference, after `spoil`; how the reference divides batches)."""
    plain = small_strategy(task, name=name, num_towers=num_towers, precision="float64", **options).options
    strategy = build_strategy(name, task, cpus(num_towers), plain, shares=shares)
    spoil(strategy)
    reference, how = reference_strategy(task, strategy, plain)
    return differences(strategy, reference, STEPS), how


@pytest.mark.parametrize(
    "options, how",
    first_quick(
        [
            ({"task": small_task(), "num_towers": 3, "shares": (3.0, 1.0, 1.0)}, "undivided"),
            ({"task": random_task(), "name": "mirrored"}, "in the same 2 parts"),
            ({"task": small_task(batch_norm=True), "name": "mirrored", "batch_stats": "synced"}, "undivided"),
            ({"task": small_task(), "accumulation": 2}, "undivided"),
        ]
    ),
    ids=["shares", "random", "synced", "accumulation"],
)
def test_a_correct_strategy_does_not_differ(options, how):
    differences, description = found(**options)
    assert how in description
    assert differences[0].relative < 1e-9
    assert {difference.kind for difference in differences} >= {"parameters", "slots/momentum"}


def test_the_one_device_cuts_each_batch_for_the_workers_first(monkeypatch):
    """Six examples for a worker of one tower and one of three. A cut over all towers would be 2, 1, 2, 1."""
    strategy = small_strategy(random_task(), num_towers=4)
    by_worker = property(lambda self: ((1.0,), (1.0, 1.0, 1.0)))
    monkeypatch.setattr(type(strategy), "shares_by_worker", by_worker)
    reference, _ = reference_strategy(random_task(), strategy, strategy.options)
    batch = Batch(tf.range(6), tf.range(6))
    parts = [reference.engine.parts.part(batch, tower)[0] for tower in range(4)]
    assert [int(batch_length(part)) for part in parts] == [2, 2, 1, 1]


def test_every_variable_is_compared():
    differences, how = found(random_task())
    assert "in the same 2 parts" in how
    assert differences[0].relative < 1e-9
    names = {(difference.kind, difference.name) for difference in differences}
    assert ("parameters", "hidden0/kernel") in names
    assert ("slots/momentum", "logits/bias") in names
    assert ("state", "norm0/moving_mean") in names
    assert len(names) == len(differences) == 6 + 6 + 2


class TestSpoiltStrategy:
    def test_one_wrong_variable_is_found(self):
        def spoil(strategy):
            bias = strategy.engine.parameters()["logits/bias"]
            bias.assign_add(tf.constant([1e-3, 0, 0], bias.dtype))

        differences, _ = found(small_task(), spoil=spoil)
        assert differences[0].relative > 1e-4
        assert "logits/bias" in {difference.name for difference in differences[:3]}
        values = [difference.relative for difference in differences]
        assert values == sorted(values, reverse=True), "the largest difference is first"

    @pytest.mark.full
    def test_a_mean_of_towers_means_is_found(self):
        """With uneven parts, the mean of the towers' means is not the mean over the examples."""

        class MeanOfMeans(type(small_task())):
            def loss(self, outputs, batch):
                total, weight = super().loss(outputs, batch)
                return WeightedLoss(total / weight, tf.ones_like(weight))

        plain = small_task()
        task = MeanOfMeans(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
        differences, _ = found(task, shares=(3.0, 1.0))
        assert differences[0].relative > 1e-3

    @pytest.mark.full
    def test_a_missing_tower_is_found(self, monkeypatch):
        add_results = sums.add_results

        def add_without_the_second(results, sum_gradients, **named):
            def of_the_first(per_tower):
                return sum_gradients([per_tower[0], *(list(map(tf.zeros_like, other)) for other in per_tower[1:])])

            return add_results(results, of_the_first, **named)

        # The reference has one tower, so this does not change it.
        monkeypatch.setattr(sums, "add_results", add_without_the_second)
        differences, _ = found(small_task())
        assert differences[0].relative > 1e-3

    @pytest.mark.full
    def test_wrong_state_is_found(self):
        differences, _ = found(
            small_task(batch_norm=True),
            spoil=lambda strategy: strategy.engine.state()["norm0/moving_mean"].assign([1.0] * 8),
        )
        assert ("state", "norm0/moving_mean") in {(found.kind, found.name) for found in differences[:2]}

    @pytest.mark.full
    def test_nan_is_an_infinite_difference(self):
        differences, _ = found(
            small_task(),
            on_nan="skip",
            spoil=lambda strategy: strategy.engine.parameters()["logits/bias"].assign([math.nan, 0, 0]),
        )
        assert differences[0].relative == math.inf


def test_synced_statistics_with_dropout_are_refused():
    with refused("batch_stats='synced' and dropout", "verify with batch_stats='average'"):
        found(random_task(), batch_stats="synced")


@pytest.mark.parametrize(
    "value, reference, expected",
    [
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.0], [0.0], 0),
        ([], [], 0),
        ([1e-9], [2e-9], 1e-9 / verification._SMALLEST_SCALE),
        ([math.nan], [math.nan], math.inf),
        ([math.inf], [math.inf], math.inf),
    ],
)
def test_relative_difference(value, reference, expected):
    assert relative_difference(np.array(value), np.array(reference)) == pytest.approx(expected)
