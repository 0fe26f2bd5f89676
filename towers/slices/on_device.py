"""Runs a function on a device, and its gradient there too.

A GradientTape computes gradients on the device that is current when `gradient` is called, wherever the forward
pass ran. A layer's slice must compute both passes on its own device.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.errors import UserError


def on_device(device: str, function: Callable, inputs: Sequence[tf.Tensor]):
    """`function(*inputs)` computed on `device`, with a gradient that is computed there.

    Args:
      device: name of the device.
      function: returns a tensor or a list of tensors that depend on all inputs. It may read other tensors, which
        get no gradient.
      inputs: floating-point tensors, on any devices.

    Raises:
      UserError: a second-order gradient is needed, for example because a layer takes gradients in its call.
    """
    asked = False

    @tf.custom_gradient
    def placed(*own):
        # One tensor may be given twice, like an attention's query and value: each gets a gradient of its own. And
        # the tower's tape must not record what follows: with two tapes TensorFlow differentiates each called
        # function twice, which fails for functions that XLA compiles.
        own = [tf.stop_gradient(value) for value in own]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(own)
            outputs = function(*own)

        def gradient(*upstream):
            nonlocal asked
            if asked:
                raise UserError(
                    "a layer takes gradients in its call through a divided layer, which computes its gradients "
                    "only once: leave the divided layer whole (layout='NAME=whole'), or use another strategy"
                )
            asked = True
            with tf.device(device):
                of_outputs = list(upstream) if isinstance(outputs, list) else upstream[0]
                return tape.gradient(outputs, own, of_outputs)

        return outputs, gradient

    with tf.device(device):
        return placed(*inputs)
