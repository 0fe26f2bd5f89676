"""Clipping of the mean gradients: by value, by each parameter's norm, or by the global norm."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from towers.errors import UserError
from towers.gradients import Gradient, map_values, squared_norm
from towers.owners import CURRENT_DEVICE, Owners


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipping:
    """At most one attribute is set; without any, gradients are not clipped.

    Attributes:
      value: clips each element to [-value, value].
      norm: scales each parameter's gradient down to at most this Euclidean norm.
      global_norm: scales all gradients by one factor, down to at most this global norm (Pascanu et al. 2013).

    Raises:
      UserError: several attributes are set, or one is not a finite number above 0.
    """

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None

    def __post_init__(self):
        given = {name: bound for name, bound in dataclasses.asdict(self).items() if bound is not None}
        if len(given) > 1:
            written = ", ".join(f"{name}={bound:g}" for name, bound in given.items())
            raise UserError(f"clipping by {written}: only one is possible; remove the others")
        for name, bound in given.items():
            if not 0 < bound < math.inf:
                raise UserError(
                    f"clipping {name}={bound:g}: it must be a finite number above 0; omit it for no clipping"
                )

    def apply(
        self, gradients: Sequence[Gradient], overall_norm: tf.Tensor, owners: Owners = CURRENT_DEVICE
    ) -> list[Gradient]:
        """The clipped gradients.

        Args:
          gradients: mean gradients; sparse ones are merged.
          overall_norm: their global norm.
          owners: where the gradients are.
        """
        if self.value is not None:
            return owners.each(lambda gradient: map_values(self._clip_value, gradient), gradients)
        if self.norm is not None:
            norms = owners.norms(owners.each(squared_norm, gradients))
            return owners.each(lambda gradient, norm: _scaled_to(gradient, norm, self.norm), gradients, norms)
        if self.global_norm is not None:
            return owners.each(lambda gradient: _scaled_to(gradient, overall_norm, self.global_norm), gradients)
        return list(gradients)

    def _clip_value(self, values):
        return tf.clip_by_value(values, -self.value, self.value)


def _scaled_to(gradient, norm, bound):
    factor = tf.cast(bound, norm.dtype) / tf.maximum(norm, tf.cast(bound, norm.dtype))
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
