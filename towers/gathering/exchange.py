"""What a tower exchanges with other processes that have parts of its parameters, and in which order: plain data.

    gather 0   gather 1   gather 2   scatter a   gather 3   scatter b   ...

All processes make the same calls in this order, one after another. Gradients are also sent inside the graph,
because operations after a stateful call wait for all exchanges in it. A call serves all towers of a process
(`towers.gathering.copied`), so their numbers may differ between processes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from towers.gathering.units import Use, waited_for


class OwnPart(NamedTuple):
    """A parameter's value, of which this process has a part or nothing.

    Attributes:
      parts: the part; empty if this process has none.
      whole: shape and dtype of the parameter.
    """

    parts: Sequence[tf.Tensor]
    whole: tf.TensorSpec


class UnitExchange(Protocol):
    """Calls between processes. Each of them runs its calls in order, so a call may wait for the other processes.

    Attributes:
      bytes_per_call: gradients are sent together up to this size.
      small_bytes: parameters are gathered together up to this size, even if the largest parameter is smaller.
    """

    bytes_per_call: int
    small_bytes: int

    def gather(self, parameters: Sequence[int], purpose: str) -> Callable[..., list[tf.Tensor]]:
        """A function from this process's parts of these parameters to their whole values.

        Args:
          parameters: indices of the parameters, ascending.
          purpose: what the call is for; the same in all processes.
        """

    def scatter(self, parameters: Sequence[int], purpose: str) -> Callable[..., list[tf.Tensor]]:
        """A function from this process's gradients to its parts of the sums over all processes.

        Arguments as for `gather`; parameters in any order. The function returns only parts that this process owns.
        """


class Call(NamedTuple):
    """A call of all processes.

    Attributes:
      unit: index of the unit that is gathered; None if gradients are sent.
      parameters: indices of the parameters.
      device: the device of the unit, or of the gradients.
    """

    unit: int | None
    parameters: tuple[int, ...]
    device: str = ""


class Gradient(NamedTuple):
    """A parameter's gradient.

    Attributes:
      level: position in the order of the computation, as in `Use`.
      parameter: index of the parameter.
      device: the device that computes it, as in `Use`.
    """

    level: int
    parameter: int
    device: str = ""


def calls_of(
    units: Sequence[Sequence[Use]],
    gradients: Sequence[Gradient],
    num_bytes: Sequence[int],
    *,
    bytes_per_call: int,
) -> list[Call]:
    """The calls in an order in which none waits for a later one.

    The gather of unit k of a device may begin after the device's unit k - 2, so its level is that of the last use
    in unit k - 2. Gradients are sent at the level of the last gradient in their call, after the gathers of this
    level: a gather depends on nothing of a higher level, and only later calls depend on sent gradients.

    Args:
      units: units from `towers.gathering.units.units_of`.
      gradients: gradients in any order.
      num_bytes: bytes of each parameter.
      bytes_per_call: gradients leave together up to this size; a larger one leaves alone.
    """
    ordered: list[tuple[int, int, Call]] = []
    for index, (unit, before) in enumerate(zip(units, waited_for(units), strict=True)):
        level = max((use.level for use in before), default=-1)
        used = tuple(sorted({use.parameter for use in unit}))
        ordered.append((level, 0, Call(index, used, unit[0].device)))
    for device in sorted({gradient.device for gradient in gradients}):
        own = sorted(gradient for gradient in gradients if gradient.device == device)
        for pack in _packs(own, num_bytes, bytes_per_call):
            ordered.append((pack[-1].level, 1, Call(None, tuple(each.parameter for each in pack), device)))
    return [call for _, _, call in sorted(ordered, key=lambda each: each[:2])]


def _packs(gradients: Sequence[Gradient], num_bytes: Sequence[int], bytes_per_call: int) -> list[list[Gradient]]:
    """Gradients that are sent together, in order."""
    found: list[list[Gradient]] = []
    for gradient in gradients:
        if not found or sum(num_bytes[each.parameter] for each in (*found[-1], gradient)) > bytes_per_call:
            found.append([])
        found[-1].append(gradient)
    return found
