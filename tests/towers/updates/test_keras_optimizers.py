"""Keras optimizers: each translation gives the optimizer's numbers; others are refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.towers.user_errors import refused
from towers import gradients
from towers.options import StepOptions
from towers.updates.keras_optimizers import translate
from towers.updates.rules import SGD, Adam, Momentum

NUM_STEPS = 10
SHAPES = {"kernel": (4, 3), "bias": (3,), "gamma": (3,)}
schedules = keras.optimizers.schedules


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients_of(step: int) -> list[tf.Tensor]:
    draw = np.random.default_rng(100 + step)
    return [tf.constant(draw.normal(size=shape), tf.float32) for shape in SHAPES.values()]


def with_keras(optimizer) -> list[np.ndarray]:
    with keras.name_scope("layer"):  # as in a model, whose variables are named with their layers
        variables = [keras.Variable(value, name=name) for name, value in start().items()]
    for step in range(NUM_STEPS):
        optimizer.apply(gradients_of(step), variables)
    return [variable.numpy() for variable in variables]


def with_translation(optimizer) -> list[np.ndarray]:
    rule, schedule, clipping = translate(optimizer)
    variables = {f"layer/{name}": tf.Variable(value) for name, value in start().items()}
    slots = {path: {slot: tf.Variable(v * 0) for slot in rule.slot_names} for path, v in variables.items()}
    for step in range(NUM_STEPS):
        means = gradients_of(step)
        clipped = clipping.apply(means, gradients.global_norm(means))
        rate, update = tf.constant(schedule(step), tf.float32), tf.constant(step, tf.int64)
        for (path, variable), gradient in zip(variables.items(), clipped, strict=True):
            rule.apply(path, variable, slots[path], gradient, rate, update)
    return [variable.numpy() for variable in variables.values()]


def leaving_out(optimizer, *names):
    optimizer.exclude_from_weight_decay(var_names=list(names))
    return optimizer


optimizers = keras.optimizers
TRANSLATED = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "sgd_decay": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "plain_sgd_decay": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "adam": lambda: optimizers.Adam(0.01),
    "adam_of_other_numbers": lambda: optimizers.Adam(0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "adam_decay": lambda: optimizers.Adam(0.01, weight_decay=0.1),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adamw_leaves_out_biases": lambda: leaving_out(optimizers.AdamW(0.01, weight_decay=0.1), "bias"),
    "adamw_leaves_out_two": lambda: leaving_out(optimizers.AdamW(0.1, weight_decay=0.5), "bias", "gam+a"),
    "adamw_leaves_out_a_layer": lambda: leaving_out(optimizers.AdamW(0.01, weight_decay=0.5), "layer"),
    "adamw_leaves_out_by_the_last_letters": lambda: leaving_out(optimizers.AdamW(0.01, weight_decay=0.5), "bias$"),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.2),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.7),
    "cosine": lambda: optimizers.SGD(schedules.CosineDecay(0.1, 8), momentum=0.9),
    "piecewise": lambda: optimizers.Adam(schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.02, 0.01])),
    "exponential_decay": lambda: optimizers.AdamW(schedules.ExponentialDecay(0.1, 3, 0.5), weight_decay=0.1),
}


# Others have the same options.
ALIKE = {"momentum", "plain_sgd_decay", "adam", "adam_decay", "adamw_leaves_out_biases"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.full] if name in ALIKE else [])
        for name, make in TRANSLATED.items()
    ],
)
def test_translation_gives_the_optimizers_numbers(make):
    for ours, theirs in zip(with_translation(make()), with_keras(make()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "make, kind",
    [
        (lambda: optimizers.SGD(0.1), SGD),
        (lambda: optimizers.SGD(0.1, momentum=0.9), Momentum),
        (lambda: optimizers.AdamW(0.1), Adam),
    ],
)
def test_kind_of_rule(make, kind):
    assert type(translate(make()).rule) is kind


class OwnSGD(keras.optimizers.SGD):
    """A subclass may have arithmetic of its own."""


def used(optimizer):
    optimizer.apply([tf.ones([2])], [keras.Variable(np.zeros(2, np.float32))])
    return optimizer


def without_a_variable():
    optimizer = optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[keras.Variable(np.zeros(2))])
    return optimizer


@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda: "adam", ["the optimizer is a str", "keras.optimizers.Adam(0.001)"]),
        (lambda: optimizers.Adam, ["the optimizer is the class", "keras.optimizers.Adam(0.001)"]),
        (lambda: optimizers.RMSprop(0.1), ["RMSprop", "SGD, Adam, AdamW"]),
        (lambda: optimizers.Lion(0.1), ["Lion"]),
        (lambda: OwnSGD(0.1), ["OwnSGD"]),
        (lambda: optimizers.Adam(0.1, amsgrad=True), ["Adam(amsgrad=True)"]),
        (lambda: optimizers.SGD(0.1, use_ema=True), ["SGD(use_ema=True)"]),
        (lambda: optimizers.SGD(0.1, loss_scale_factor=8.0), ["loss_scale_factor=8.0", "precision='float16'"]),
        (lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2), ["gradient_accumulation_steps=2"]),
        (lambda: used(optimizers.SGD(0.1)), ["SGD", "taken 1 steps", "pass a new optimizer"]),
        (without_a_variable, ["var_list", "var_names"]),
        (lambda: optimizers.SGD(lambda: 0.1), ["SGD(learning_rate=...) is a function", "LearningRateSchedule"]),
    ],
)
def test_what_is_refused(make, parts):
    optimizer = make()
    with refused(*parts):
        translate(optimizer)


class Forgetful(schedules.LearningRateSchedule):
    """A user's own schedule without a rate from step `end` on."""

    def __init__(self, end=5):
        self._end = end

    def __call__(self, step):
        return tf.constant(0.1) if step < self._end else None


def test_a_users_own_schedule_that_returns_no_number_is_refused_by_its_name():
    rate = StepOptions.of_keras(optimizers.SGD(Forgetful())).rate
    assert rate(4) == pytest.approx(0.1)
    with refused("Forgetful returns None at step 5"):
        rate(5)


@pytest.mark.parametrize(
    "schedule, step, parts",
    [
        (schedules.PiecewiseConstantDecay([3], [0.1, -0.1]), 4, ["PiecewiseConstantDecay returns -0.1 at step 4"]),
        (schedules.PolynomialDecay(0.1, 5, power=-1.0), 5, ["PolynomialDecay returns inf at step 5"]),
        (schedules.ExponentialDecay(0.1, 1, 10.0), 400, ["ExponentialDecay returns inf at step 400"]),
    ],
)
def test_a_schedule_of_keras_is_refused_by_its_name(schedule, step, parts):
    rate = StepOptions.of_keras(optimizers.SGD(schedule)).rate
    assert rate(0) == pytest.approx(0.1)
    with refused(*parts):
        rate(step)


def test_the_first_rate_is_read_before_a_strategy_is_made():
    with refused("Forgetful returns None at step 0"):
        StepOptions.of_keras(optimizers.SGD(Forgetful(end=0)))
    with refused("returns '0.1' at step 0"):
        StepOptions(schedule=lambda step: "0.1")
