"""Number formats that layers compute in, and the loss scale that keeps float16 gradients from underflow.

Parameters, slots and updates are float32; in the precision float64 they are float64.
"""

import contextlib
import dataclasses

import keras
import tensorflow as tf

from towers.errors import UserError

_POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "float64": "float64",
}
PRECISIONS = tuple(_POLICIES)
# The precisions of 16 bits.
SHORT_PRECISIONS = ("bfloat16", "float16")


def check_precision(name: str) -> None:
    """Raises UserError for an unknown precision."""
    if name not in PRECISIONS:
        raise UserError(f"precision={name!r} is unknown: use one of {', '.join(PRECISIONS)}")


def precision_of(policy: str) -> str | None:
    """The precision with this Keras dtype policy; None if there is none."""
    return next((name for name, of_layers in _POLICIES.items() if of_layers == policy), None)


@contextlib.contextmanager
def layer_precision(name: str):
    """Context manager: layers built in it compute in this precision. Restores Keras's own setting at the end."""
    check_precision(name)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(_POLICIES[name])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018): overflow halves the scale, many good steps double it.

    The scale multiplies the SUM of the losses, so its first value is lower than usual for a mean.

    If no gradient ever overflows, for example because all are 0, the scale would double up to infinity, and then
    no step would be finite. So it has a maximum, far above any useful scale: it lifts gradients of 2^-88 to the
    smallest float16, 2^-24. Float32 ends at 2^128, so all sums of losses and of weights below 2^64 stay finite
    when they are multiplied by it.
    """

    initial: float = 256.0
    growth_steps: int = 1000
    factor: float = 2.0
    smallest: float = 2.0**-14
    largest: float = 2.0**64

    def next_state(self, scale, good_steps, finite) -> tuple[tf.Tensor, tf.Tensor]:
        """The scale and the number of good steps, after a step whose gradients were `finite` or not."""
        grown = good_steps + 1 >= self.growth_steps
        scale_if_good = tf.where(grown, tf.minimum(scale * self.factor, self.largest), scale)
        # A checkpoint may hold an infinite scale, whose half is infinite too.
        scale_if_bad = tf.clip_by_value(scale / self.factor, self.smallest, self.largest)
        steps_if_good = tf.where(grown, tf.zeros_like(good_steps), good_steps + 1)
        return tf.where(finite, scale_if_good, scale_if_bad), tf.where(finite, steps_if_good, 0 * good_steps)


def loss_scaling_for(precision: str) -> LossScaling | None:
    """The loss scaling of a precision. Only float16 needs one: the other formats have float32's range."""
    return LossScaling() if precision == "float16" else None
