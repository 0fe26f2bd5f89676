"""How much of an old moving statistic a training pass keeps: new = decay * old + what the pass adds."""

import contextlib
from collections.abc import Iterator

import keras

from towers.layers.batch_norm.calls import batch_norm_layers, has_stock_arithmetic
from towers.layers.shadowing import shadowed


@contextlib.contextmanager
def noted_decays(model: keras.Model) -> Iterator[dict[int, float]]:
    """Context manager: notes the decays of batch norms' moving statistics while the model is traced.

    A layer that the model calls k times keeps momentum ** k.

    Yields:
      The decays by id of the variable. Layers whose arithmetic isn't known (a subclass, renorm), and layers that
      don't update their statistics, are not in it.
    """
    decays: dict[int, float] = {}

    def noting(variable: keras.Variable, momentum: float):
        def assign(value):
            decays[id(variable)] = decays.get(id(variable), 1.0) * momentum
            return type(variable).assign(variable, value)

        return assign

    updates = [
        (variable, "assign", noting(variable, layer.momentum))
        for layer in batch_norm_layers(model)
        if layer.built and has_stock_arithmetic(layer)
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
    with shadowed(updates):
        yield decays
