"""Schedules: their bounds, first and last rates, continuity, and the values that they refuse."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as drawn

from tests.towers.user_errors import refused
from towers.updates.schedules import Constant, Cosine, OneCycle, Piecewise, Triangular, WarmUp, rate_at

rates = drawn.floats(1e-4, 10)
lengths = drawn.integers(1, 500)
steps_drawn = drawn.integers(0, 1000)


@given(rates, steps_drawn)
def test_constant(rate, step):
    assert Constant(rate)(step) == rate


@given(drawn.lists(drawn.integers(1, 900), max_size=5, unique=True).map(sorted), steps_drawn, drawn.data())
def test_piecewise_changes_at_its_boundaries(boundaries, step, data):
    own_rates = data.draw(
        drawn.lists(rates, min_size=len(boundaries) + 1, max_size=len(boundaries) + 1), label="rates"
    )
    schedule = Piecewise(tuple(boundaries), tuple(own_rates))
    assert schedule(step) == own_rates[sum(step >= boundary for boundary in boundaries)]


@given(rates, lengths, drawn.floats(0, 1), steps_drawn)
def test_cosine_falls_from_peak_to_end(peak, steps, part, step):
    end = peak * part
    schedule = Cosine(peak, steps, end)
    assert schedule(0) == pytest.approx(peak)
    assert schedule(steps) == pytest.approx(end, abs=1e-12)
    assert schedule(steps + step) == schedule(steps)
    assert schedule(step + 1) <= schedule(step) * (1 + 1e-12)
    assert end * (1 - 1e-12) <= schedule(step) <= peak


@given(rates, lengths, steps_drawn)
def test_cosine_is_that_of_keras(peak, steps, step):
    ours, theirs = Cosine(peak, steps)(step), keras.optimizers.schedules.CosineDecay(peak, steps)(step)
    assert ours == pytest.approx(float(theirs), rel=1e-4, abs=1e-5 * peak)


@given(rates, drawn.integers(2, 500), drawn.floats(0.05, 0.95), steps_drawn)
def test_triangular_is_two_straight_lines(peak, steps, rise, step):
    schedule = Triangular(peak, steps, rise, start=0.25, end=0.125)
    assert schedule(0) == pytest.approx(peak / 4)
    assert schedule(steps) == schedule(steps + step) == pytest.approx(peak / 8)
    assert schedule(step) <= peak * (1 + 1e-9)
    halfway_up, halfway_down = rise * steps / 2, steps * (1 + rise) / 2
    assert schedule(halfway_up) == pytest.approx(peak * 0.625)
    assert schedule(halfway_down) == pytest.approx(peak * 0.5625)


def test_triangular_needs_both_sides():
    with refused("triangular rise=1", "between 0 and 1"):
        Triangular(0.1, 10, 1.0)


@given(rates, drawn.integers(2, 500), drawn.floats(0.05, 0.95), steps_drawn)
def test_one_cycle_rises_then_falls(peak, steps, rise, step):
    schedule, top = OneCycle(peak, steps, rise), rise * steps
    assert schedule(0) == pytest.approx(peak / 25)
    assert schedule(steps) == pytest.approx(peak / 1e4)
    assert schedule(steps + step) == schedule(steps)
    assert peak / 1e4 * (1 - 1e-9) <= schedule(step) <= peak * (1 + 1e-9)
    if step + 1 <= top:
        assert schedule(step) < schedule(step + 1)
    if top <= step and step + 1 <= steps:
        assert schedule(step) > schedule(step + 1)


@pytest.mark.parametrize("name", ["start_divisor", "end_divisor"])
@pytest.mark.parametrize("divisor", [0, -25.0, math.nan])
def test_one_cycle_needs_divisors_above_0(name, divisor):
    with refused(f"one-cycle {name}={divisor}", "more than 0"):
        OneCycle(0.1, 10, **{name: divisor})


@given(rates, drawn.integers(2, 500), drawn.floats(0.05, 0.95))
def test_one_cycle_is_continuous(peak, steps, rise):
    """No change from one step to the next is larger than the steepest slope of the two branches."""
    schedule = OneCycle(peak, steps, rise)
    steepest = peak * max(1 / (rise * steps), math.pi / 2 / ((1 - rise) * steps))
    changes = [abs(schedule(step + 1) - schedule(step)) for step in range(steps + 2)]
    assert max(changes) <= steepest * (1 + 1e-9)


@given(rates, drawn.integers(0, 100), steps_drawn)
def test_warm_up_scales_the_first_steps(rate, steps, step):
    schedule = WarmUp(Constant(rate), steps)
    assert 0 < schedule(step) <= rate
    if step + 1 >= steps:
        assert schedule(step) == rate
    else:
        assert schedule(step) == pytest.approx(rate * (step + 1) / steps)


@given(rates, drawn.integers(1, 100), lengths, steps_drawn)
def test_warm_up_does_not_shift_the_schedule_that_it_wraps(rate, warm_up, steps, step):
    assume(step >= warm_up)
    inner = Cosine(rate, steps)
    assert WarmUp(inner, warm_up)(step) == inner(step)


@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda: Constant(-0.1), ["-0.1"]),
        (lambda: Constant(float("nan")), ["nan"]),
        (lambda: Constant(float("inf")), ["inf"]),
        (lambda: Piecewise((10, 20), (1.0, 0.1)), ["2 boundaries and 2 rates"]),
        (lambda: Piecewise((20, 10), (1.0, 0.1, 0.01)), ["(20, 10)", "ascend"]),
        (lambda: Piecewise((10, 10), (1.0, 0.1, 0.01)), ["(10, 10)"]),
        (lambda: Cosine(0.1, 0), ["0 steps"]),
        (lambda: OneCycle(0.1, 0), ["0 steps"]),
        (lambda: OneCycle(0.1, 10, rise=1.0), ["rise=1.0"]),
        (lambda: OneCycle(0.1, 10, rise=0.0), ["rise=0.0"]),
        (lambda: WarmUp(Constant(0.1), -1), ["-1 steps"]),
    ],
)
def test_what_is_refused(make, parts):
    with refused(*parts):
        make()


@pytest.mark.parametrize(
    "value", [0, 1, 0.5, np.float64(0.5), tf.constant(0.5, tf.float64), tf.constant(1), tf.Variable(0.5)], ids=repr
)
def test_rate_of_a_users_own_schedule_is_a_plain_number(value):
    found = rate_at(lambda step: value, 0)
    assert type(found) is float and found == float(value)


def test_a_rate_below_0_by_rounding_is_0():
    assert rate_at(lambda step: 0.1 - 0.1 * (3 * 0.1) / 0.3, 0) == 0
    assert rate_at(lambda step: -1e-17, 0) == 0


NO_RATES = {
    "None": None,
    "'0.1'": "0.1",
    "b'0.1'": b"0.1",
    "nan": tf.constant(math.nan),
    "inf": math.inf,
    "1e+39": 1e39,  # infinite in float32
    "-0.1": -0.1,
    "(0.1,)": (0.1,),
    "an array of shape [1]": tf.constant([0.1]),
    "an array of shape [2, 0]": np.zeros((2, 0)),
    "1000": 10**400,
}


@pytest.mark.parametrize("written, value", NO_RATES.items(), ids=NO_RATES)
def test_what_is_no_rate_is_refused_with_its_step(written, value):
    def falling(step):
        return value if step == 3 else 0.1

    with refused("falling returns " + written, "at step 3", "one finite number of at least 0", "correct"):
        rate_at(falling, 3)
    with refused("falling returns " + written):
        WarmUp(falling, 10)(3)
    assert rate_at(falling, 2) == 0.1
