"""Update rules: the arithmetic of an update, by TensorFlow's fused kernels on the variable's own device.

SGD; Momentum, plain or Nesterov's; Adam, which with decoupled weight decay is AdamW; Muon.

Momentum has Keras's form, with the learning rate inside the velocity; weight decay is decoupled and applied before
the update, as in Keras. So Keras's optimizers can be translated.

The kernels lock the variable while they change it, so simultaneous updates lose nothing. A rule holds numbers
only. Its slots (momenta) are variables that the placement creates with the parameters.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import tensorflow as tf

from towers.errors import UserError
from towers.gradients import Gradient

Slots = Mapping[str, tf.Variable]


def matrices_only(path: str, shape: tf.TensorShape) -> bool:
    """Selects kernels and embeddings for weight decay, not biases and the vectors of norm layers."""
    return shape.rank > 1


def everything(path: str, shape: tf.TensorShape) -> bool:
    """Selects every parameter for weight decay."""
    return True


class UpdateRule(Protocol):
    """How a gradient changes a parameter."""

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots of a parameter. Each has the parameter's shape and dtype and starts at zero."""

    @property
    def elementwise(self) -> bool:
        """Whether an update of an element depends on that element alone, so that pieces can be updated."""

    def apply(self, path: str, variable: tf.Variable, slots: Slots, gradient: Gradient, rate, update) -> None:
        """Changes `variable` and `slots` in place.

        Args:
          path: the parameter's canonical name.
          variable: the parameter.
          slots: its slots, by name.
          gradient: gradient of the mean loss; IndexedSlices have each row at most once.
          rate: float32 scalar, learning rate.
          update: int64 scalar, number of updates before this one.
        """

    def changed(self, value, slots: Mapping[str, tf.Tensor], gradient, rate, update) -> tuple:
        """The update as a function of tensors, without weight decay; only for elementwise rules.

        Args:
          value, gradient: tensors of one shape and dtype.
          slots: tensors like them, by name.
          rate, update: as for `apply`.

        Returns:
          The new value and the new slots.
        """

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the run after which `finish` is called, once; None if it is never called."""

    def finish(self, path: str, variable: tf.Variable, slots: Slots, updates) -> None:
        """Changes `variable` and `slots` in place after the last step, whether that was applied or skipped.

        Args:
          path, variable, slots: as for `apply`.
          updates: int64 scalar, number of updates of the run.
        """

    def with_decay_divided(self, factor: float) -> "UpdateRule":
        """The same rule with its weight decay divided by `factor`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decaying:
    """Decoupled weight decay (Loshchilov and Hutter 2019) before each update: w -= rate * weight_decay * w."""

    weight_decay: float = 0.0
    decays: Callable[[str, tf.TensorShape], bool] = matrices_only
    elementwise = True
    num_steps = None

    def finish(self, path, variable, slots, updates):
        """Nothing to do."""

    def __post_init__(self):
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay={self.weight_decay}: it must be a finite number of at least 0")

    def with_decay_divided(self, factor):
        return dataclasses.replace(self, weight_decay=self.weight_decay / factor)

    def new_values(self, path, value, slots, gradient, rate, update):
        """Weight decay, then `changed`; arguments and result as for `changed`, plus the parameter's name."""
        if self.weight_decay and self.decays(path, value.shape):
            rate_of_decay = tf.cast(rate, value.dtype) * tf.constant(self.weight_decay, value.dtype)
            value -= value * rate_of_decay
        return self.changed(value, slots, gradient, rate, update)

    def _decay(self, path, variable, rate):
        if self.weight_decay and self.decays(path, variable.shape):
            variable.assign_sub(variable * (rate * tf.constant(self.weight_decay, rate.dtype)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(_Decaying):
    """w -= rate * g. Sparse gradients touch only their rows."""

    slot_names = ()

    def apply(self, path, variable, slots, gradient, rate, update):
        rate = tf.cast(rate, variable.dtype)
        self._decay(path, variable, rate)
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(tf.IndexedSlices(gradient.values * rate, gradient.indices))
            return
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient, use_locking=True)

    def changed(self, value, slots, gradient, rate, update):
        return value - tf.cast(rate, value.dtype) * gradient, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(_Decaying):
    """v = momentum * v - rate * g; w += v (Keras's form), or with nesterov w += momentum * v - rate * g.

    Sparse gradients become dense here, because the momentum of a row decays even if a gradient does not touch it.
    A lazy update would give other numbers than the dense rule.
    """

    momentum: float = 0.9
    nesterov: bool = False
    slot_names = ("momentum",)

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum={self.momentum}: it must be in [0, 1); 0.9 is usual")

    def apply(self, path, variable, slots, gradient, rate, update):
        rate = tf.cast(rate, variable.dtype)
        self._decay(path, variable, rate)
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=slots["momentum"].handle,
            lr=rate,
            grad=tf.convert_to_tensor(gradient),
            momentum=tf.constant(self.momentum, variable.dtype),
            use_locking=True,
            use_nesterov=self.nesterov,
        )

    def changed(self, value, slots, gradient, rate, update):
        step = tf.cast(rate, value.dtype) * gradient
        momentum = tf.constant(self.momentum, value.dtype)
        velocity = momentum * slots["momentum"] - step
        return value + (momentum * velocity - step if self.nesterov else velocity), {"momentum": velocity}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(_Decaying):
    """Adam (Kingma and Ba 2015), epsilon outside the bias correction as in Keras; with decay it is AdamW."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    slot_names = ("first_moment", "second_moment")

    def __post_init__(self):
        super().__post_init__()
        for name in ("beta_1", "beta_2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: it must be in [0, 1)")
        # With 0 the update of a weight whose gradients were all 0 would be 0 / 0, and no check of a step finds it.
        if not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon={self.epsilon}: it must be a finite number above 0; 1e-7 is usual")

    def apply(self, path, variable, slots, gradient, rate, update):
        dtype = variable.dtype
        rate, count = tf.cast(rate, dtype), tf.cast(update + 1, dtype)
        beta_1, beta_2 = tf.constant(self.beta_1, dtype), tf.constant(self.beta_2, dtype)
        self._decay(path, variable, rate)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=slots["first_moment"].handle,
            v=slots["second_moment"].handle,
            beta1_power=tf.pow(beta_1, count),
            beta2_power=tf.pow(beta_2, count),
            lr=rate,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.constant(self.epsilon, dtype),
            grad=tf.convert_to_tensor(gradient),
            use_locking=True,
            use_nesterov=False,
        )

    def changed(self, value, slots, gradient, rate, update):
        dtype = value.dtype
        count = tf.cast(update + 1, dtype)
        beta_1, beta_2 = tf.constant(self.beta_1, dtype), tf.constant(self.beta_2, dtype)
        first, second = slots["first_moment"], slots["second_moment"]
        first += (gradient - first) * (1 - beta_1)
        second += (gradient * gradient - second) * (1 - beta_2)
        corrected = tf.cast(rate, dtype) * tf.sqrt(1 - tf.pow(beta_2, count)) / (1 - tf.pow(beta_1, count))
        moved = corrected * first / (tf.sqrt(second) + tf.constant(self.epsilon, dtype))
        return value - moved, {"first_moment": first, "second_moment": second}


def convolutions_only(path: str, shape: tf.TensorShape) -> bool:
    """Selects kernels of convolutions, such as [height, width, inputs, outputs]."""
    return shape.rank is not None and shape.rank > 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(_Decaying):
    """Orthogonalised momentum (Jordan et al. 2024, "Muon"): all singular values of an update are near 1.

    v = momentum * v + g; w -= rate * orthogonal(g + momentum * v), where the kernel is reshaped to a matrix: its
    last dimension by all others. If a batch norm follows, the kernel's scale has no effect; rate and weight decay
    together determine by which angle an update turns the kernel.

    Parameters for which `orthogonalizes` returns False (biases, norms, the last layer) take `Momentum`'s Nesterov
    step at `other_factor` times the rate. A kernel's update consists of several operations, so it is not atomic.
    """

    momentum: float = 0.9
    orthogonalizes: Callable[[str, tf.TensorShape], bool] = convolutions_only
    other_factor: float = 4.0
    other_weight_decay: float = 5e-3
    slot_names = ("momentum",)
    elementwise = False

    def __post_init__(self):
        super().__post_init__()
        self._others()

    def with_decay_divided(self, factor):
        less = super().with_decay_divided(factor)
        return dataclasses.replace(less, other_weight_decay=self.other_weight_decay / factor)

    def _others(self) -> Momentum:
        return Momentum(
            momentum=self.momentum, nesterov=True, weight_decay=self.other_weight_decay, decays=self.decays
        )

    def apply(self, path, variable, slots, gradient, rate, update):
        if not self.orthogonalizes(path, variable.shape):
            self._others().apply(path, variable, slots, gradient, rate * self.other_factor, update)
            return
        rate = tf.cast(rate, variable.dtype)
        self._decay(path, variable, rate)
        value, found = self.changed(variable.read_value(), slots, tf.convert_to_tensor(gradient), rate, update)
        slots["momentum"].assign(found["momentum"])
        variable.assign(value)

    def new_values(self, path, value, slots, gradient, rate, update):
        if not self.orthogonalizes(path, value.shape):
            return self._others().new_values(path, value, slots, gradient, rate * self.other_factor, update)
        return super().new_values(path, value, slots, gradient, rate, update)

    def changed(self, value, slots, gradient, rate, update):
        momentum = tf.constant(self.momentum, value.dtype)
        velocity = momentum * slots["momentum"] + gradient
        direction = tf.reshape(gradient + momentum * velocity, [-1, value.shape[-1]])
        moved = tf.cast(rate, value.dtype) * tf.reshape(orthogonalized(direction), value.shape)
        return value - moved, {"momentum": velocity}


# Coefficients of the quintic polynomial that moves singular values towards 1 fastest (Jordan et al. 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalized(matrix: tf.Tensor) -> tf.Tensor:
    """Approximates the nearest matrix with orthonormal rows or columns; singular values become 0.68 to 1.21.

    Newton-Schulz iterations X <- aX + b(XX')X + c(XX')^2 X on the matrix divided by its norm. Singular values
    below 0.002 times the norm stay smaller.
    """
    rows, columns = matrix.shape
    a, b, c = (tf.constant(coefficient, matrix.dtype) for coefficient in _QUINTIC)
    x = tf.transpose(matrix) if rows > columns else matrix
    x = tf.math.divide_no_nan(x, tf.norm(x))
    for _ in range(_ITERATIONS):
        gram = tf.matmul(x, x, transpose_b=True)
        x = a * x + tf.matmul(b * gram + c * tf.matmul(gram, gram), x)
    return tf.transpose(x) if rows > columns else x
