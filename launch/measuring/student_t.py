"""Student's t distribution and Welch's test: how much two means of few rounds differ by chance."""

import math

# Intervals of Simpson's rule; even. The integrand is smooth.
_INTERVALS = 128
_BISECTIONS = 40
# cos(x)^v is less than e^-72 from x = _FAR / sqrt(v) on.
_FAR = 12.0


def noise_of_means(errors: tuple[float, float], rounds: tuple[int, int], confidence: float) -> float:
    """The difference of two means of equal expectation that is exceeded with probability 1 - confidence.

    Welch's test (B. L. Welch, Biometrika 34, 1947), which allows unequal variances:
    t(confidence, v) * sqrt(e0^2 + e1^2), with v = (e0^2 + e1^2)^2 / (e0^4 / (n0 - 1) + e1^4 / (n1 - 1)).

    Args:
      errors: standard error e of each mean.
      rounds: number n of values of each mean, at least 2.
      confidence: as 0.95.
    """
    variances = [error**2 for error in errors]
    if not sum(variances):
        return 0.0
    # Relative to the sum: the square of a small variance would underflow.
    shares = [variance / sum(variances) for variance in variances]
    degrees = 1 / sum(share**2 / (count - 1) for share, count in zip(shares, rounds, strict=True))
    return two_sided_quantile(confidence, degrees) * math.sqrt(sum(variances))


def two_sided_quantile(confidence: float, degrees: float) -> float:
    """The t with P(|T| < t) = confidence, for Student's T with `degrees` >= 1 degrees of freedom.

    With t = sqrt(v) tan(x), P(|T| < t) is proportional to the integral of cos(y)^(v - 1) over y from 0 to x
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.1, substituted).
    """
    low, high = 0.0, min(math.pi / 2, _FAR / math.sqrt(degrees))
    target = confidence * _integral(high, degrees - 1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _integral(middle, degrees - 1) < target else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _integral(end: float, power: float) -> float:
    """The integral of cos(y)^power over y from 0 to `end` <= pi/2, by Simpson's rule."""
    width = end / _INTERVALS
    # cos(pi/2) may be rounded to less than 0.
    values = [max(math.cos(width * index), 0.0) ** power for index in range(_INTERVALS + 1)]
    return width / 3 * (values[0] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]) + values[-1])
