"""The strategy 'slices': checkpoints that fit any number of slices, and what it refuses."""

import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from strategies.slices import SliceOptions
from strategies.training.checkpoints import Checkpoints
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
from towers.updates.composed_rules import Lookahead, ScaledRates
from towers.updates.rules import Adam, Muon
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
            ("Lookahead and ScaledRates", "; omit lookahead_every and omit norm_bias_rate_factor"),
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
