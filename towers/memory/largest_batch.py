"""The largest batch that fits a memory."""

import math
from collections.abc import Callable


def largest_batch(bytes_of: Callable[[int], float], limit_bytes: float, *, multiple: int = 1) -> int:
    """The largest multiple of `multiple` whose batch needs at most `limit_bytes`; 0 if none fits.

    The bytes are almost linear in the batch size, so each trial is where the line through the last two points
    meets the limit; every second trial bisects the remaining interval instead, for curves with steps.

    Args:
      bytes_of: bytes for a batch of this many examples, infinity if it cannot be computed; must not decrease,
        and must exceed the limit somewhere.
      limit_bytes: bytes of the memory.
      multiple: towers times microbatches, so that all parts are equal.
    """

    def needed(units: int) -> float:
        return bytes_of(units * multiple)

    fits, fits_bytes = 0, 0.0
    fails, fails_bytes = 1, needed(1)
    while fails_bytes <= limit_bytes:
        rise = (fails_bytes - fits_bytes) / (fails - fits) if fits else 0
        beyond = int((limit_bytes - fails_bytes) / rise) + 1 if rise > 0 else 0
        fits, fits_bytes = fails, fails_bytes
        fails = max(2 * fails, fails + beyond)
        fails_bytes = needed(fails)
    may_halve = False
    while fails - fits > 1:
        guess = fits + int((limit_bytes - fits_bytes) * (fails - fits) / (fails_bytes - fits_bytes))
        halves = may_halve or not fits or math.isinf(fails_bytes)
        guess = (fits + fails) // 2 if halves else min(fails - 1, max(fits + 1, guess))
        found = needed(guess)
        may_halve = not may_halve and abs(guess - fits) > 1 and abs(fails - guess) > 1
        if found <= limit_bytes:
            fits, fits_bytes = guess, found
        else:
            fails, fails_bytes = guess, found
    return fits * multiple
