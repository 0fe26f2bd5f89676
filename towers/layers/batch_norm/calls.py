"""Batch normalisation inside a tower: Keras's layer on TensorFlow's fused kernel.

`keras.layers.BatchNormalization` consists of small operations, which on a CPU cost a ResNet a quarter of its
speed. While a tower is traced, a call on `FusedBatchNormV3` or on compiled loops replaces the layer's own. The
model, the names of its weights and its exported file do not change.

With a `TowerExchange` the statistics are those of the whole batch instead of the tower's part.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.exchange import TowerExchange
from towers.layers.batch_norm.compiled import CompiledKernel, takes_compiled
from towers.layers.batch_norm.kernels import FusedKernel, Moments, PlainOperations, takes_fused
from towers.layers.batch_norm.synced import synced_batch_norm
from towers.precision import SHORT_PRECISIONS

# cuDNN refuses a smaller epsilon; below it the layer keeps its own arithmetic.
_SMALLEST_FUSED_EPSILON = 1.001e-5


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Every BatchNormalization layer of the model, at any depth."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def num_fused(model: keras.Model) -> int:
    """Number of the model's batch norms that run on the fused kernel inside a tower without an exchange."""
    return sum(_has_stock_call(layer) and _gets_fused(layer) for layer in batch_norm_layers(model))


def num_compiled(model: keras.Model, *, beside_fused: bool) -> int:
    """Number of the model's batch norms that run on the compiled kernel inside a tower, if that kernel is enabled.

    Args:
      model: any model.
      beside_fused: whether the fused kernel is enabled too, with an exchange, and runs the other layers.
    """
    layers = batch_norm_layers(model)
    return sum(_has_stock_call(layer) and _gets_compiled(layer, beside_fused) for layer in layers)


def check_synchronized(model: keras.Model, *, batch_stats: str, num_towers: int) -> None:
    """Raises UserError if a layer asks for the statistics of the whole batch but each tower would use its part's.

    Args:
      model: any model.
      batch_stats: one of `towers.batch_stats.POLICIES`.
      num_towers: number of towers that divide a batch, over all processes.
    """
    asking = [layer.name for layer in batch_norm_layers(model) if layer.synchronized]
    if asking and batch_stats != "synced" and num_towers > 1:
        raise UserError(
            f"layer {asking[0]!r} has synchronized=True, but with batch_stats={batch_stats!r} each of "
            f"{num_towers} towers uses the statistics of its own part; use batch_stats='synced', or "
            "synchronized=False"
        )


def fused_calls(
    model: keras.Model,
    exchange: TowerExchange | None,
    weight: tf.Tensor | None = None,
    *,
    fused: bool = True,
    fused_by_given: bool = True,
    compiled: bool = False,
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, replacement) for each of the model's batch norms whose call is replaced.

    Args:
      model: any model.
      exchange: sums statistics over the towers; None for statistics of the tower's own examples.
      weight: float32 scalar; 0 excludes this tower's examples from exchanged statistics.
      fused: use TensorFlow's fused kernel.
      fused_by_given: use the fused kernel also with moments that are not the inputs' own.
      compiled: use the compiled kernel where it pays: with an exchange, or in place of the fused one.

    Raises:
      UserError: statistics are exchanged, but a layer does not allow it: renorm, a subclass, or weights in 16
        bits.
    """
    exchanges = exchange is not None
    kernel_of = functools.partial(
        _kernel, exchanges=exchanges, fused=fused, fused_by_given=fused_by_given, compiled=compiled
    )
    calls = []
    for layer in batch_norm_layers(model):
        if _has_stock_call(layer):
            calls.append((layer, "call", functools.partial(_call, layer, exchange, weight, kernel_of)))
        elif exchange is not None:
            raise UserError(
                f"batch_stats='synced': layer {layer.name!r} has batch-norm arithmetic of its own (a subclass, "
                "renorm, a small epsilon or weights in 16 bits), which towers cannot exchange; use "
                "batch_stats='average'"
            )
    return calls


def has_stock_arithmetic(layer: keras.layers.BatchNormalization) -> bool:
    """Whether the layer computes what Keras's does, without renorm. Ask before `fused_calls` are in place."""
    stock = type(layer).call is keras.layers.BatchNormalization.call
    return stock and not layer.renorm and "call" not in layer.__dict__


def _has_stock_call(layer) -> bool:
    # The kernels' statistics have 32 bits or more.
    has_short_weights = layer.variable_dtype in SHORT_PRECISIONS
    return has_stock_arithmetic(layer) and layer.epsilon >= _SMALLEST_FUSED_EPSILON and not has_short_weights


def _gets_fused(layer) -> bool:
    """Whether the fused kernel takes inputs like those of the layer's build; `_kernel` decides at each call."""
    # A layer that the model does not call is not built.
    if not layer.built or layer.compute_dtype == "float64":
        return False
    rank = layer.input_spec.ndim
    if layer.axis % rank != rank - 1:
        return False
    return not any(getattr(tensor, "_keras_mask", None) is not None for tensor in _inputs(layer))


def _gets_compiled(layer, beside_fused) -> bool:
    shapes = [tensor.shape for tensor in _inputs(layer)]
    return _gets_fused(layer) and all(
        takes_compiled(shape, layer.compute_dtype, layer.axis % len(shape), beside_fused=beside_fused)
        for shape in shapes
    )


def _inputs(layer) -> list:
    return [tensor for node in layer._inbound_nodes for tensor in node.input_tensors]


def _kernel(
    layer, inputs, axis, trains, *, exchanges, fused, fused_by_given, compiled
) -> FusedKernel | PlainOperations:
    """The fastest of the kernels that are enabled, for inputs with channels at dimension `axis`.

    Without an exchange the fused kernel is the fastest where it is enabled. Where towers exchange moments and
    sums, it can't be split in two, so it runs twice, forward and backward.
    """
    may_compile = compiled and (exchanges or not fused)
    if may_compile and takes_compiled(inputs.shape, inputs.dtype, axis, beside_fused=fused):
        return CompiledKernel(layer.epsilon)
    own_moments = trains and not exchanges
    if fused and (own_moments or fused_by_given) and takes_fused(inputs, axis):
        return FusedKernel(layer.epsilon)
    return PlainOperations(layer.epsilon, axis, inputs.shape.rank)


def _call(layer, exchange, weight, kernel_of, inputs, training=None, mask=None):
    """The layer's call. Features may be integers; without autocast, inputs may have any precision."""
    if inputs.dtype != layer.compute_dtype:
        # As Keras, which casts all inputs.
        inputs = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
    outputs = _normalized(layer, exchange, weight, kernel_of, inputs, training, mask)
    return tf.cast(outputs, layer.compute_dtype)


def _normalized(layer, exchange, weight, kernel_of, inputs, training, mask):
    axis = layer.axis % inputs.shape.rank
    trains = training and layer.trainable
    if mask is not None and exchange is not None and trains:
        raise UserError(
            f"batch_stats='synced': layer {layer.name!r} gets a mask, and towers cannot exchange masked "
            "statistics; use batch_stats='average'"
        )
    kernel = kernel_of(layer, inputs, axis, trains)
    if (mask is not None or isinstance(kernel, PlainOperations)) and (exchange is None or not trains):
        return type(layer).call(layer, inputs, training=training, mask=mask)
    moving = Moments(layer.moving_mean.value, layer.moving_variance.value)
    ones = tf.ones_like(moving.mean)
    gamma = tf.convert_to_tensor(layer.gamma.value) if layer.scale else ones
    beta = tf.convert_to_tensor(layer.beta.value) if layer.center else tf.zeros_like(ones)
    if not trains:
        return kernel.normalized(inputs, moving, gamma, beta)
    if exchange is None:
        outputs, found = kernel.trained(inputs, gamma, beta)
    else:
        outputs, found = synced_batch_norm(
            inputs, gamma, beta, axis=axis, kernel=kernel, exchange=exchange, weight=weight
        )
    momentum = layer.momentum
    layer.moving_mean.assign(moving.mean * momentum + found.mean * (1.0 - momentum))
    layer.moving_variance.assign(moving.variance * momentum + found.variance * (1.0 - momentum))
    return outputs
