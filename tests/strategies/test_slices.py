"""The strategy 'slices': checkpoints that fit any number of slices, and what it refuses."""

import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from strategies.slices import SliceOptions
from strategies.training.checkpoints import Checkpoints
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    dense_task,
    parameters_of,
    stacked,
    vectors,
)
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.composed_rules import Lookahead, ScaledRates, norm_biases
from towers.updates.rules import Adam, Momentum, Muon, everything
from towers.updates.schedules import Constant


@pytest.mark.full
def test_a_run_goes_on_with_other_slices_and_with_towers(tmp_path):
    def built(name, devices):
        return build_strategy(name, dense_task(), devices, StepOptions(rule=Adam(), schedule=Constant(0.1)))

    modes = [("slices", cpus_in_groups("slice:2")), ("slices", cpus_in_groups("slice:3")), ("towers", cpus(1))]
    undivided = built("towers", cpus(1))
    undivided.run_steps(6)
    for step, (name, devices) in enumerate(modes):
        strategy = built(name, devices)
        checkpoints = Checkpoints(tmp_path, strategy)
        assert checkpoints.restore_latest() == (2 * step or None)
        strategy.restored()
        strategy.run_steps(2)
        checkpoints.prepare()
        checkpoints.save()
    assert_close(parameters_of(strategy), parameters_of(undivided))


@pytest.mark.parametrize(
    "name, devices, options, parts",
    [
        ("slices", cpus(1), {}, ("'slices' with 1 device a tower", "'towers'")),
        ("slices", cpus(2), {"rule": Muon()}, ("Muon with", "needs whole parameters", "use momentum or adamw")),
        (
            "slices",
            cpus(2),
            {"rule": Lookahead(rule=ScaledRates(rule=Adam(), factor=2.0), num_updates=9)},
            ("Lookahead with layers divided", "; omit lookahead_every"),
        ),
        (
            "slices",
            cpus(2),
            {"rule": ScaledRates(rule=Muon(), factor=2.0)},
            ("Muon with layers divided", "; use momentum or adamw"),
        ),
        ("slices", cpus(2), {"xla": True}, ("xla=True", "omit xla")),
        (
            "towers",
            cpus_in_groups("slice:2"),
            {},
            ("a grid with strategy 'towers'", "'slices'"),
        ),
    ],
)
def test_what_it_refuses(name, devices, options, parts):
    with refused(*parts):
        build_strategy(name, dense_task(), devices, StepOptions(**options))


def normed_task() -> TinyTask:
    """A task with layers that are divided, and a normalisation layer between them that is not."""

    def build():
        hidden, norm = layers.Dense(16, name="hidden"), layers.LayerNormalization(name="norm")
        return stacked((4,), hidden, norm, layers.Dense(NUM_CLASSES, name="logits"))

    def losses(outputs, batch):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, outputs)  # in float64

    return TinyTask(build=build, examples=vectors(8), losses=losses)


def beta_or_kernel(path, shape):
    return norm_biases(path, shape) or shape.rank > 1


@pytest.mark.parametrize(
    "name, devices",
    [
        ("slices", cpus_in_groups("slice:2")),
        pytest.param("slices", cpus_in_groups("data:2,slice:2", zero=1), marks=pytest.mark.full),
        pytest.param("slices", cpus_in_groups("data:2,slice:2", zero=3), marks=pytest.mark.full),
        pytest.param("towers", cpus(2, zero=3), marks=pytest.mark.full),
    ],
    ids=["slices", "zero_1_of_slices", "zero_3_of_slices", "zero_3"],
)
@pytest.mark.parametrize("scales", first_quick([beta_or_kernel, norm_biases]), ids=["sliced", "whole"])
def test_rates_by_parameter_equal_one_device(name, devices, scales):
    """In float64, for whole parameters and slices; with weight decay, which the factor does not change."""
    decaying = Momentum(weight_decay=0.1, decays=everything)
    expected, found = (
        build_strategy(
            strategy,
            normed_task(),
            given,
            StepOptions(
                rule=ScaledRates(rule=decaying, factor=8.0, scales=scales),
                schedule=Constant(0.01),
                precision="float64",
            ),
        )
        for strategy, given in (("towers", cpus(1)), (name, devices))
    )
    for strategy in (expected, found):
        strategy.run_steps(5)
    assert any(part.shard.dimension is not None for part in found.engine.placement.parts), "slices are updated"
    assert_close(parameters_of(found), parameters_of(expected), 1e-9)


@pytest.mark.parametrize("layout", ["a=rows", {"a": "rows"}, (("a", "rows", "b"),)], ids=str)
def test_a_layout_of_another_form(layout):
    with refused(f"layout={layout!r}", "pairs of a pattern", "layout=(("):
        SliceOptions(layout=layout)


class Penalised(layers.Layer):
    """Adds the squared gradient of a divided layer."""

    def build(self, shape):
        self.dense = layers.Dense(6, name="divided")
        self.dense.build(shape)

    def call(self, inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = self.dense(inputs)
        self.add_loss(tf.reduce_sum(tape.gradient(outputs, inputs) ** 2))
        return outputs


def test_a_layer_that_takes_gradients_of_a_divided_one():
    task = TinyTask(
        build=lambda: stacked((4,), Penalised(name="penalised"), layers.Dense(NUM_CLASSES, name="logits")),
        examples=vectors(8),
    )
    strategy = build_strategy("slices", task, cpus(2), StepOptions())
    with refused("a divided layer", "takes gradients in its call", "layout='NAME=whole'"):
        strategy.run_steps(1)
