"""Which of a model's layers compute by other means inside a tower than Keras has them, to the same result.

The model, the names of its weights and its exported file stay as they are: a layer's attribute is shadowed while
the tower is traced.
"""

import contextlib
import dataclasses

import keras
import tensorflow as tf

from towers.exchange import TowerExchange
from towers.layers import batch_norm, compiled_activations, narrow_maps
from towers.layers.shadowing import shadowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """The kinds of replacement in use.

    Attributes:
      fused_batch_norm: Keras's BatchNormalization on TensorFlow's fused kernel.
      tuned_for_cpu: GELU and SiLU compiled, kernels' gradients over small images laid out for the matrix unit.
    """

    fused_batch_norm: bool = True
    tuned_for_cpu: bool = False

    @contextlib.contextmanager
    def in_place(self, model: keras.Model, exchange: TowerExchange | None = None, weight: tf.Tensor | None = None):
        """Within, the model's layers compute so; `exchange` and `weight` as for `batch_norm.fused_calls`."""
        replacements = []
        if self.fused_batch_norm or exchange is not None:
            replacements += batch_norm.fused_calls(model, exchange, weight)
        if self.tuned_for_cpu:
            replacements += compiled_activations.activations_to_compile(model)
            replacements += narrow_maps.narrow_convolutions(model)
        with shadowed(replacements):
            yield

    def notices(self, model: keras.Model) -> list[str]:
        """What a user is told of it, a line each."""
        said = []
        if self.fused_batch_norm and (count := batch_norm.num_fused(model)):
            said.append(
                f"{_layers(count, 'BatchNormalization')} on TensorFlow's fused kernel (off: --nofused_batch_norm)"
            )
        if self.tuned_for_cpu and (count := len(compiled_activations.activations_to_compile(model))):
            said.append(f"{_layers(count, 'GELU and SiLU')} compiled for the CPU (off: --notuned_for_cpu)")
        return said


def _layers(count: int, kind: str) -> str:
    return f"{count} {kind} {'layers' if count > 1 else 'layer'}"


DEFAULT_KERNELS = LayerKernels()
