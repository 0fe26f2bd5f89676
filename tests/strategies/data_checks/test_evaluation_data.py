"""Evaluation data may differ from training data: other dtypes, with or without weights."""

import dataclasses

import keras
import numpy as np
import pytest

from models.own_task import OwnTask
from strategies.registry import build_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(25, 5)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 25)
WEIGHTS = RANDOM.choice([0.5, 1.0, 2.0], 25).astype(np.float32)

DATA = {
    "weights only in evaluation": ((X, LABELS), (X, LABELS, WEIGHTS)),
    "weights only in training": ((X, LABELS, WEIGHTS), (X, LABELS)),
    "other labels": ((X, LABELS.astype(np.int32)), (X, LABELS.astype(np.int64))),
    "whole numbers only in training": ((np.round(10 * X).astype(np.int64), LABELS), (X, LABELS)),
    "whole numbers only in evaluation": ((X, LABELS), (np.round(10 * X).astype(np.int64), LABELS)),
    "other weights": ((X, LABELS, WEIGHTS), (X, LABELS, WEIGHTS.astype(np.float64))),
}


def model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, name="logits")])


def task(train_data, eval_data) -> OwnTask:
    return OwnTask(
        model=model,
        train_data=train_data,
        eval_data=eval_data,
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        metric_functions={"accuracy": keras.metrics.sparse_categorical_accuracy},
        batch_size=8,
    )


@pytest.mark.parametrize(
    "name, kind",
    first_quick(
        [*(("towers", kind) for kind in DATA), ("mirrored", "other labels"), ("ring", "other weights")],
    ),
)
def test_evaluation_has_its_own_spec(name, kind):
    strategy = build_strategy(name, task(*DATA[kind]), cpus(2), StepOptions())
    strategy.run_steps(1)
    found = strategy.evaluate()
    trained = strategy.portable_model()
    trained.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        run_eagerly=True,
    )
    x, labels, *weights = DATA[kind][1]
    expected = trained.evaluate(
        x, labels, batch_size=25, sample_weight=weights[0] if weights else None, verbose=0, return_dict=True
    )
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-5)


@pytest.mark.parametrize("name", first_quick(["mirrored", "towers", "ring"]))
def test_evaluation_is_traced_once(name):
    calls = []

    def accuracy(labels, outputs):
        calls.append(labels.dtype)
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)

    own = dataclasses.replace(task(*DATA["other labels"]), metric_functions={"accuracy": accuracy})
    strategy = build_strategy(name, own, cpus(2), StepOptions())
    first = strategy.evaluate()
    count = len(calls)
    assert strategy.evaluate() == first and len(calls) == count > 0
