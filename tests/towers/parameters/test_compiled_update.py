"""An update that XLA compiles gives the numbers of TensorFlow's kernels, and changes nothing where it must not."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.own_task import OwnTask
from strategies.towers import towers_strategy
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from towers.mean_and_update import mean_gradients
from towers.options import StepOptions
from towers.parameters import compiled_update
from towers.parameters.compiled_update import new_values
from towers.tower import TowerResult
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead, ScaledRates
from towers.updates.rules import SGD, Adam, Momentum, Muon, matrices_only
from towers.updates.schedules import Constant
from towers.xla_choice import conversion_problem

STEPS = 7
NESTEROV = Momentum(nesterov=True, weight_decay=0.01)
RULES = [
    pytest.param(SGD(weight_decay=0.01), id="sgd", marks=pytest.mark.full),
    pytest.param(NESTEROV, id="nesterov", marks=pytest.mark.full),
    pytest.param(Adam(weight_decay=0.01), id="adamw", marks=pytest.mark.full),
    pytest.param(Muon(orthogonalizes=matrices_only, weight_decay=0.01), id="muon", marks=pytest.mark.full),
    pytest.param(
        Lookahead(rule=ScaledRates(rule=NESTEROV, factor=4.0), num_updates=STEPS, every=3), id="lookahead"
    ),
]


def strategy_of(rule, *, xla, task=None, parameters=0, schedule=None, **options):
    # With masks, as when a GPU has the parameters.
    devices = dataclasses.replace(cpus(1, parameters), masks=True)
    schedule = schedule or Constant(0.05)
    options = StepOptions(rule=rule, schedule=schedule, xla=xla, precision="float64", **options)
    return towers_strategy(task or small_task(batch_norm=True), devices, options)


def variables_of(strategy) -> dict[str, np.ndarray]:
    engine = strategy.engine
    slots = {f"{slot} of {name}": one for slot, by_name in engine.slots().items() for name, one in by_name.items()}
    return {name: one.numpy() for name, one in {**engine.parameters(), **engine.state(), **slots}.items()}


# Without 'nesterov', because Lookahead's rule has it.
@pytest.mark.full
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.id != "nesterov"])
def test_the_numbers_are_those_of_the_kernels(rule):
    """The fifth batch is short, and XLA compiles the step again for it, so only one rule trains on it."""
    num_steps, found = (STEPS if isinstance(rule, Lookahead) else 4), []
    for xla in (False, True):
        strategy = strategy_of(rule, xla=xla, clipping=Clipping(global_norm=0.5))
        with recorded_graphs() as graphs:
            strategy.run_steps(num_steps)
        assert len([node for node in graphs.nodes if node.attr["_XlaMustCompile"].b]) == (1 if xla else 0)
        found.append(variables_of(strategy))
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_step_takes_nothing_from_the_host():
    """The step gets a part of a batch, a learning rate and variables: a GPU would wait for the host's tensors."""
    strategy = strategy_of(NESTEROV, xla=True)
    graph = strategy.engine.train_function.get_concrete_function().graph
    (step,) = (one for one in graph.get_operations() if one.node_def.attr["_XlaMustCompile"].b)
    given = [one for one in step.inputs if one.dtype != tf.resource]
    assert all(one.op.type == "Placeholder" for one in given)
    # Features, labels and the rate.
    assert len(given) == 3


class Counted(layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        self.count = self.add_weight(name="count", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.count.assign(self.count + 1)
        return inputs


def counting_task() -> OwnTask:
    draw = np.random.default_rng(0)
    return OwnTask(
        model=lambda: keras.Sequential([layers.Input((5,)), Counted(name="counted"), layers.Dense(3)]),
        train_data=(draw.normal(size=(37, 5)), draw.integers(0, 3, 37)),
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size=8,
    )


def test_state_that_a_gpu_does_not_hold():
    """TensorFlow keeps variables of int32 on the host, and a compiled function can't use them there."""
    strategy = strategy_of(NESTEROV, xla=True, task=counting_task())
    state = strategy.engine.placement.state
    (name,) = state
    with tf.device("/device:CPU:1"):  # another device than that of the parameters
        state[name] = tf.Variable(state[name].read_value(), trainable=False)
    strategy.run_steps(2)
    assert int(state[name]) == 2


def test_a_tower_stays_on_its_device():
    """The parameters are on another device, where XLA updates them."""
    strategy = strategy_of(NESTEROV, xla=True, parameters=1)
    operations = strategy.graph().get_operations()
    compiled = [one.device.rpartition("/")[2] for one in operations if one.node_def.attr["_XlaMustCompile"].b]
    assert compiled == ["device:CPU:0", "device:CPU:1", "device:CPU:1"]


@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_compiles_it(rule):
    scalars = [tf.TensorSpec([], dtype) for dtype in (tf.float32, tf.int64, tf.bool)]
    parameters = [tf.TensorSpec(shape, tf.float32) for shape in ([3, 3, 8, 4], [8, 4], [4])]
    slots = [dict.fromkeys(rule.slot_names, parameter) for parameter in parameters]
    names = ["convolution/kernel", "dense/kernel", "dense/bias"]
    of_update = [parameters, slots, parameters, parameters[2:], parameters[2:], *scalars]
    assert conversion_problem(functools.partial(new_values, rule, names), *of_update) == ""


def test_a_gpu_compiles_the_mean():
    def mean(summed, loss_sum, weight, scale):
        sums = TowerResult(loss_sum, weight, summed, {}, {})
        return mean_gradients(sums, StepOptions(clipping=Clipping(global_norm=0.5)), scale)

    scalar = tf.TensorSpec([], tf.float32)
    assert conversion_problem(mean, [tf.TensorSpec([8, 4], tf.float32)], *[scalar] * 3) == ""


def test_a_schedule_of_a_user_s_own_returns_tensors():
    of_steps = [tf.constant(0.25), np.float64(0.5), 1]
    strategy = strategy_of(NESTEROV, xla=True, task=counting_task(), schedule=lambda step: of_steps[step])
    assert strategy.run_steps(3).learning_rate == 1
    found = strategy.engine.rates([strategy.options.rate(step) for step in range(3)])
    assert [(float(rate), rate.dtype) for rate in found] == [(rate, tf.float32) for rate in (0.25, 0.5, 1.0)]


def test_a_skipped_step_changes_nothing():
    strategy = strategy_of(NESTEROV, xla=True, task=counting_task(), on_nan="skip")
    strategy.run_steps(1)
    first = next(iter(strategy.engine.parameters().values()))
    first.assign(np.full(first.shape, np.inf))
    before = variables_of(strategy)
    assert strategy.run_steps(1).skipped == 1
    for name, value in variables_of(strategy).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_a_rule_of_a_user_s_own_is_not_compiled():
    class Own(Momentum):
        def apply(self, path, variable, slots, gradient, rate, update):
            variable.assign_sub(rate * gradient)

    assert compiled_update.can_compile(NESTEROV, {}, [])
    assert not compiled_update.can_compile(Own(), {}, [])
    assert not compiled_update.can_compile(ScaledRates(rule=Own(), factor=2.0), {}, [])
