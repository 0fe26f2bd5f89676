"""Which of a model's layers use other kernels than Keras's inside a tower, with the same results.

The model, the names of its weights and its exported file do not change: a layer's attribute is shadowed while the
tower is traced.
"""

import contextlib
import dataclasses

import keras
import tensorflow as tf

from towers.exchange import TowerExchange
from towers.layers import compiled_activations
from towers.layers.batch_norm.calls import batch_norm_layers, fused_calls, num_compiled, num_fused
from towers.layers.compiled_relu import relus_to_compile, relus_to_join
from towers.layers.convolutions import examples_as_channels as as_channels
from towers.layers.convolutions import winograd
from towers.layers.convolutions.replaced import Convolution, replaced_convolutions
from towers.layers.convolutions.winograd_loops import CompiledCall
from towers.layers.forward_mode import unless_forward
from towers.layers.host_values import place_host_values
from towers.layers.products import layers_with_products, replaced_calls
from towers.layers.shadowing import shadowed
from towers.layers.wide_ids import lookups_of_wide_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """Which replacements are enabled.

    Attributes:
      fused_batch_norm: BatchNormalization runs on TensorFlow's fused kernel.
      compiled_batch_norm: BatchNormalization, with a ReLU that follows, runs on compiled loops where towers
        exchange statistics, and everywhere without `fused_batch_norm`, for CPUs on which the fused kernel is slow.
      compiled_activations: GELU and SiLU are compiled.
      compiled_relu: ReLUs in bfloat16 and float16 are compiled, together with an addition before them.
      examples_as_channels: gradients of convolution kernels are convolutions whose channels are the examples, in
        bfloat16, and in float32 over the smallest images.
      amx: the CPU multiplies bfloat16 in its matrix units; fewer gradients gain from `examples_as_channels` there.
      num_threads: number of threads of a tower, by which kernels are chosen that gain on one thread only; 0 if it
        is not known.
      winograd_channels: fewest input and output channels of 3x3 convolutions that are computed in float32 by
        Winograd's method; 0 disables it.
      num_examples: number of examples of a tower's usual call; None if it is not known. Kernels that need many
        examples are chosen by it, and smaller calls of Winograd's method are padded to it.
      float32_products: convolutions and dense layers of bfloat16 or float16 multiply in float32, for CPUs that
        are no faster in the shorter format.
      exact_bias_gradients: gradients of biases in bfloat16 are summed in float32; TensorFlow on CPUs sums in
        bfloat16.
      wide_ids: Embedding layers look ids up as int64, which stay on a GPU, unlike int32.
      values_on_host: the host computes shapes and seeds that GPU kernels read in its memory, after `place_values`.
      deterministic: BatchNormalization runs on TensorFlow's fused kernel only with the moments of its own inputs.
        With moving moments, or those of all towers, the kernel has no deterministic gradient on GPUs.
    """

    fused_batch_norm: bool = True
    compiled_batch_norm: bool = False
    compiled_activations: bool = False
    compiled_relu: bool = False
    examples_as_channels: bool = False
    amx: bool = False
    num_threads: int = 0
    winograd_channels: int = 0
    num_examples: int | None = None
    float32_products: bool = False
    exact_bias_gradients: bool = False
    wide_ids: bool = False
    values_on_host: bool = False
    deterministic: bool = False

    @contextlib.contextmanager
    def in_place(self, model: keras.Model, exchange: TowerExchange | None = None, weight: tf.Tensor | None = None):
        """Context manager: the model's layers use these kernels.

        Args:
          model: the template.
          exchange, weight: as for `fused_calls`.
        """
        replacements = []
        if self.fused_batch_norm or self.compiled_batch_norm or exchange is not None:
            # With an exchange Keras's own operations are the last choice.
            fused = self.fused_batch_norm or not self.compiled_batch_norm
            replacements += fused_calls(
                model,
                exchange,
                weight,
                fused=fused,
                fused_by_given=not self.deterministic,
                compiled=self.compiled_batch_norm,
            )
        if self.compiled_activations:
            replacements += compiled_activations.activations_to_compile(model)
        if self._compiles_norms(exchange is not None):
            replacements += relus_to_join(model)
        if self.compiled_relu:
            replacements += relus_to_compile(model)
        if convolutions := self._convolutions:
            replacements += replaced_convolutions(model, convolutions)
        replacements += replaced_calls(
            model, float32_products=self.float32_products, exact_bias_gradients=self.exact_bias_gradients
        )
        if self.wide_ids:
            replacements += lookups_of_wide_ids(model)
        # The layers' own calls would use the statistics of the tower's own examples.
        with shadowed(replacements if exchange is not None else unless_forward(replacements)):
            yield

    def place_values(self) -> None:
        """Chooses the device of shapes and seeds. Call it at the end of a pass that is being traced."""
        if self.values_on_host:
            place_host_values(tf.compat.v1.get_default_graph())

    @property
    def _convolutions(self) -> list[Convolution]:
        kernels = (
            (self.as_channels_gate.convolve, self.examples_as_channels),
            (self.winograd_gate.convolve, self.winograd_channels),
        )
        return [kernel for kernel, is_on in kernels if is_on]

    def compiled_calls(self, model: keras.Model, num_examples: int) -> list[CompiledCall]:
        """The functions of a tower's training pass that XLA takes longest to compile (0.5 to 1 s each).

        Args:
          model: the template.
          num_examples: number of examples that the tower computes at once.
        """
        if not self.winograd_channels:
            return []
        return self.winograd_gate.compiled_calls(model, num_examples, float32_products=self.float32_products)

    @property
    def as_channels_gate(self) -> as_channels.Gate:
        """Which gradients of convolution kernels have the examples as channels, where that is enabled."""
        return as_channels.Gate(amx=self.amx, num_threads=self.num_threads, num_examples=self.num_examples)

    @property
    def winograd_gate(self) -> winograd.Gate:
        """Which convolutions are computed by Winograd's method, where that is enabled."""
        return winograd.Gate(self.winograd_channels, self.num_examples, self.num_threads)

    def _num_winograd(self, model: keras.Model) -> int:
        return self.winograd_gate.num_replaced(model, float32_products=self.float32_products)

    def notices(self, model: keras.Model, *, exchanges: bool = False) -> list[str]:
        """One line for each kind of replacement that the model's layers get, for the user.

        Args:
          model: the template.
          exchanges: whether towers exchange batch statistics, for which compiled loops may replace the fused
            kernel.
        """
        lines = self._batch_norm_notices(model, exchanges)
        if self.compiled_activations and (count := len(compiled_activations.activations_to_compile(model))):
            layers = _layers(count, "GELU and SiLU")
            lines.append(f"{layers} compiled for the CPU (tuned_for_cpu=False disables this)")
        if self.compiled_relu and (count := len(relus_to_compile(model))):
            lines.append(f"{_layers(count, 'ReLU')} compiled for the CPU (tuned_for_cpu=False disables this)")
        if self.winograd_channels and (count := self._num_winograd(model)):
            lines.append(f"{_layers(count, 'Conv2D')} by Winograd's method (tuned_for_cpu=False disables this)")
        if self.float32_products and (count := len(layers_with_products(model))):
            lines.append(
                f"{_layers(count, 'Conv and Dense')} multiplying in float32: this CPU is no faster in "
                "the shorter format (tuned_for_cpu=False disables this)"
            )
        return lines

    def _compiles_norms(self, exchanges: bool) -> bool:
        return self.compiled_batch_norm and (exchanges or not self.fused_batch_norm)

    def _batch_norm_notices(self, model: keras.Model, exchanges: bool) -> list[str]:
        compiled = 0
        if self._compiles_norms(exchanges):
            compiled = num_compiled(model, beside_fused=self.fused_batch_norm)
        if exchanges and (count := len(batch_norm_layers(model))):
            line = f"{_layers(count, 'BatchNormalization')} with the statistics of the whole batch"
            if not compiled:
                return [line]
            those = "all" if compiled == count else compiled
            return [f"{line}, {those} compiled for the CPU (tuned_for_cpu=False disables this)"]
        if self.fused_batch_norm and (count := num_fused(model)):
            layers = _layers(count, "BatchNormalization")
            return [f"{layers} on TensorFlow's fused kernel (fused_batch_norm=False disables this)"]
        if compiled:
            layers = _layers(compiled, "BatchNormalization")
            return [f"{layers} compiled for the CPU (tuned_for_cpu=False disables this)"]
        return []


def _layers(count: int, kind: str) -> str:
    return f"{count} {kind} {'layers' if count > 1 else 'layer'}"


DEFAULT_KERNELS = LayerKernels()
