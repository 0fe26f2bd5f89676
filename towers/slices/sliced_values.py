"""The parameters of a tower as its layers read them: slices on their devices, or joined where a layer needs all.

    slice 1 of a table, on CPU:1  -+- alias read by the lookup        -+
                                   +- alias read by the projection    -+- gradients added on CPU:1
                                   +- joined with the other slices     -   (only if something reads the whole)

Each use has an alias of its own, because a GradientTape adds the gradients of one tensor's uses on the device that
is current when `gradient` is called, which is the tower's first.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers import gradients
from towers.recompute.recomputation import TracedPass
from towers.slices.layout import Layout


@dataclasses.dataclass(frozen=True)
class _Use:
    """A tensor that a layer reads.

    Attributes:
      index: index of the parameter.
      slice_index: index of the slice; None for the whole parameter.
      tensor: the value.
    """

    index: int
    slice_index: int | None
    tensor: tf.Tensor


class SlicedValues:
    """The parameters' values while one pass of a tower is traced.

    Attributes:
      devices: the device of each slice.
      graph: the graph of the pass. A layer called in another graph (the body of a loop) reads whole parameters.
    """

    def __init__(
        self,
        parameters: Sequence[tf.Tensor | Sequence[tf.Tensor]],
        layout: Layout,
        devices: Sequence[str],
        tape: tf.GradientTape | None = None,
    ):
        """Args:
        parameters: for each parameter its value, or a list of its slices, each on its device.
        layout: how they are sliced.
        devices: the device of each slice.
        tape: records what the aliases are used for; None for a pass without gradients.
        """
        self.devices, self.graph = devices, tf.compat.v1.get_default_graph()
        self._layout, self._tape, self._parameters = layout, tape, parameters
        self._uses: list[_Use] = []

    def parts(self, variable: keras.Variable) -> list[tf.Tensor]:
        """The slices of a parameter for one use, each on its device."""
        index = self._layout.index(variable)
        found = []
        for slice_index, (device, value) in enumerate(zip(self.devices, self._parameters[index], strict=True)):
            with tf.device(device):
                found.append(self._used(index, slice_index, tf.identity(value)))
        return found

    def whole_values(self) -> list[tf.Tensor]:
        """The whole value of each parameter; slices are joined. Values that nothing reads are not computed."""
        cuts = self._layout.cuts
        return [
            self._used(index, None, tf.concat(value, cuts[index][0]) if index in cuts else value)
            for index, value in enumerate(self._parameters)
        ]

    def gradients_of(
        self, objective: tf.Tensor, traced: TracedPass
    ) -> list[gradients.Gradient | list[gradients.Gradient] | None]:
        """For each parameter the gradient of the objective, or a list of its slices' gradients, on their devices.

        None for a parameter that the objective does not depend on.

        Args:
          objective: a scalar.
          traced: the pass, which knows what its backward pass computes again.
        """
        found = traced.gradients(self._tape, objective, [use.tensor for use in self._uses])
        of_use: dict[tuple[int, int | None], list] = {}
        for use, gradient in zip(self._uses, found, strict=True):
            if gradient is not None:
                of_use.setdefault((use.index, use.slice_index), []).append(gradient)
        return [self._gradient(index, of_use) for index in range(len(self._parameters))]

    def _gradient(self, index: int, of_use: Mapping):
        whole = of_use.get((index, None), [])
        if index not in self._layout.cuts:
            return whole[0] if whole else None
        dimension, lengths = self._layout.cuts[index]
        cut = [tf.split(tf.convert_to_tensor(gradient), lengths, dimension) for gradient in whole]
        found = []
        for slice_index, device in enumerate(self.devices):
            own = [*of_use.get((index, slice_index), []), *(parts[slice_index] for parts in cut)]
            if not own:
                return None
            with tf.device(device):
                found.append(gradients.add(own))
        return found

    def _used(self, index, slice_index, tensor):
        if self._tape is not None:
            self._tape.watch(tensor)
        self._uses.append(_Use(index, slice_index, tensor))
        return tensor
