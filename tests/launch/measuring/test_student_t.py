"""Student's t against published values, and Welch's test against drawn numbers."""

import numpy as np
import pytest

from launch.measuring.student_t import noise_of_means, two_sided_quantile
from tests.tiers import first_quick


# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, columns 0.975 and 0.995 (one-sided).
@pytest.mark.parametrize(
    "degrees, at_95, at_99",
    [
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (4, 2.776, 4.604),
        (5, 2.571, 4.032),
        (10, 2.228, 3.169),
        (30, 2.042, 2.750),
        (100, 1.984, 2.626),
    ],
)
def test_quantiles_are_the_published_ones(degrees, at_95, at_99):
    # A published 63.657 is rounded from 63.6567.
    assert two_sided_quantile(0.95, degrees) == pytest.approx(at_95, abs=0.0006)
    assert two_sided_quantile(0.99, degrees) == pytest.approx(at_99, abs=0.0006)


def test_fractions_of_degrees_of_freedom_lie_between():
    assert 3.182 < two_sided_quantile(0.95, 2.5) < 4.303
    # For many degrees it is the normal distribution's 1.95996.
    assert two_sided_quantile(0.95, 1e5) == pytest.approx(1.95999, abs=1e-4)


def test_welchs_example():
    # Equal errors of three values each: 4 degrees of freedom.
    assert noise_of_means((1.0, 1.0), (3, 3), 0.95) == pytest.approx(2.7764 * 2**0.5, abs=1e-3)
    # If one mean has no error, the degrees are those of the other.
    assert noise_of_means((1.0, 0.0), (3, 9), 0.95) == pytest.approx(4.3027, abs=1e-3)
    assert noise_of_means((0.0, 0.0), (3, 3), 0.95) == 0.0


@pytest.mark.parametrize(
    "rounds, spreads", first_quick([((3, 3), (1, 5)), ((3, 3), (1, 1)), ((2, 4), (1, 1)), ((5, 5), (1, 1))])
)
def test_at_most_one_difference_in_twenty_exceeds_the_noise_by_chance(rounds, spreads):
    draw, trials = np.random.default_rng(0), 400
    drawn = [draw.normal(0, spread, (trials, count)) for count, spread in zip(rounds, spreads, strict=True)]
    means = [values.mean(axis=1) for values in drawn]
    errors = [values.std(axis=1, ddof=1) / values.shape[1] ** 0.5 for values in drawn]
    noise = [noise_of_means((one, other), rounds, 0.95) for one, other in zip(*errors, strict=True)]
    exceeded = np.mean(np.abs(means[0] - means[1]) > noise)
    # 0.05 for many rounds; for unequal spreads of few rounds Welch's test is a little liberal.
    assert 0.01 < exceeded < 0.075
