"""Keras's schedules as plain arithmetic: Keras's rates at every step, without an operation of TensorFlow."""

import keras
import pytest

from towers.updates.keras_schedules import plain_rate

schedules = keras.optimizers.schedules

CASES = {
    "exponential": schedules.ExponentialDecay(0.1, 3, 0.5),
    "exponential, stairs": schedules.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    "inverse time": schedules.InverseTimeDecay(0.1, 4, 0.7),
    "inverse time, stairs": schedules.InverseTimeDecay(0.1, 4, 0.7, staircase=True),
    "piecewise": schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.02, 0.01]),
    "polynomial": schedules.PolynomialDecay(0.1, 8, 0.01, power=2.0),
    "polynomial, cycle": schedules.PolynomialDecay(0.1, 4, 0.01, power=0.5, cycle=True),
    "cosine": schedules.CosineDecay(0.1, 8, alpha=0.2),
    "cosine, warm-up": schedules.CosineDecay(0.01, 8, alpha=0.1, warmup_target=0.3, warmup_steps=4),
    "restarts": schedules.CosineDecayRestarts(0.1, 4, t_mul=2.0, m_mul=0.5, alpha=0.1),
    "equal restarts": schedules.CosineDecayRestarts(0.1, 5, t_mul=1.0, m_mul=0.9),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_keras(name):
    rate = plain_rate(CASES[name])
    found = [rate(step) for step in range(20)]
    assert all(type(value) is float for value in found)
    assert found == pytest.approx([float(CASES[name](step)) for step in range(20)], rel=1e-5, abs=1e-8)


def test_a_class_that_computes_something_else_is_not_translated():
    class Doubled(schedules.CosineDecay):
        def __call__(self, step):
            return 2 * super().__call__(step)

    assert plain_rate(Doubled(0.1, 8)) is None
    assert plain_rate(schedules.CosineDecayRestarts(0.1, 4, t_mul=0.5)) is None
