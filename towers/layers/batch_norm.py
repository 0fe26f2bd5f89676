"""Batch normalisation inside a tower: Keras's layer on TensorFlow's fused kernel.

`keras.layers.BatchNormalization` consists of small operations, which on a CPU cost a ResNet a quarter of its
speed. While a tower is traced, a call on `FusedBatchNormV3` replaces the layer's own. The model, the names of its
weights and its exported file do not change.

With a `TowerExchange` the statistics are those of the whole batch instead of the tower's part.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.exchange import TowerExchange

# cuDNN refuses a smaller epsilon; below it the layer keeps its own arithmetic.
_SMALLEST_FUSED_EPSILON = 1.001e-5


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Every BatchNormalization layer of the model, at any depth."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def num_fused(model: keras.Model) -> int:
    """Number of the model's batch norms that run on the fused kernel inside a tower without an exchange."""
    return sum(_has_stock_call(layer) and _gets_fused(layer) for layer in batch_norm_layers(model))


def check_synchronized(model: keras.Model, *, batch_stats: str, num_towers: int) -> None:
    """Raises UserError if a layer asks for the statistics of the whole batch, and towers would use their parts'.

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
    model: keras.Model, exchange: TowerExchange | None, weight: tf.Tensor | None = None
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, attribute, function) for each of the model's batch norms that gets another call.

    Args:
      model: any model.
      exchange: sums statistics over the towers; None for statistics of the tower's own examples.
      weight: float32 scalar; 0 excludes this tower's examples from exchanged statistics.

    Raises:
      UserError: statistics are exchanged, and a layer's own arithmetic (renorm, a subclass) does not allow it.
    """
    calls = []
    for layer in batch_norm_layers(model):
        if _has_stock_call(layer):
            calls.append((layer, "call", functools.partial(_call, layer, exchange, weight)))
        elif exchange is not None:
            raise UserError(
                f"batch_stats='synced': layer {layer.name!r} has batch-norm arithmetic of its own (a subclass, "
                "renorm or a small epsilon), which towers cannot exchange; use batch_stats='average'"
            )
    return calls


def _has_stock_call(layer) -> bool:
    stock = type(layer).call is keras.layers.BatchNormalization.call
    return stock and not layer.renorm and layer.epsilon >= _SMALLEST_FUSED_EPSILON and "call" not in layer.__dict__


def _gets_fused(layer) -> bool:
    """Whether the inputs that the layer was built with suit the fused kernel, as `_call` decides at each call."""
    # A layer that the model does not call is not built.
    if not layer.built or layer.compute_dtype == "float64":
        return False
    rank = layer.input_spec.ndim
    if layer.axis % rank != rank - 1:
        return False
    inputs = [tensor for node in layer._inbound_nodes for tensor in node.input_tensors]
    return not any(getattr(tensor, "_keras_mask", None) is not None for tensor in inputs)


def _call(layer, exchange, weight, inputs, training=None, mask=None):
    axis = layer.axis % inputs.shape.rank
    if mask is not None or axis != inputs.shape.rank - 1 or inputs.dtype == tf.float64:
        if exchange is not None and training and layer.trainable and mask is not None:
            raise UserError(
                f"batch_stats='synced': layer {layer.name!r} gets a mask, and towers cannot exchange masked "
                "statistics; use batch_stats='average'"
            )
        if exchange is None or not (training and layer.trainable):
            return type(layer).call(layer, inputs, training=training, mask=mask)
    moving_mean, moving_variance = layer.moving_mean.value, layer.moving_variance.value
    ones = tf.ones_like(moving_mean)
    gamma = layer.gamma.value if layer.scale else ones
    beta = layer.beta.value if layer.center else tf.zeros_like(ones)
    if not (training and layer.trainable):
        return _fused_inference(inputs, gamma, beta, moving_mean, moving_variance, layer.epsilon)
    if exchange is None:
        outputs, mean, variance = _fused_training(inputs, gamma, beta, layer.epsilon)
    else:
        outputs, mean, variance = _exchanged(inputs, gamma, beta, axis, layer.epsilon, exchange, weight)
    momentum = layer.momentum
    layer.moving_mean.assign(moving_mean * momentum + mean * (1.0 - momentum))
    layer.moving_variance.assign(moving_variance * momentum + variance * (1.0 - momentum))
    return outputs


def _as_image(inputs: tf.Tensor) -> tf.Tensor:
    """[N, ..., C] as [N, H, W, C], the only shape that the fused kernel takes."""
    if inputs.shape.rank == 4:
        return inputs
    return tf.reshape(inputs, [tf.shape(inputs)[0], -1, 1, inputs.shape[-1]])


def _fused_training(inputs, gamma, beta, epsilon):
    """The outputs in the inputs' dtype, and the inputs' mean and biased variance, float32 [C]."""
    image = _as_image(inputs)
    outputs, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
        x=image, scale=gamma, offset=beta, mean=[], variance=[], epsilon=epsilon, is_training=True
    )
    # The kernel returns variance * n / (n - 1); Keras's moving variance averages the biased one.
    count = tf.cast(tf.size(image) // image.shape[-1], tf.float32)
    variance = unbiased * (tf.maximum(count - 1.0, 1.0) / count)
    return tf.reshape(outputs, tf.shape(inputs)), tf.stop_gradient(mean), tf.stop_gradient(variance)


def _fused_inference(inputs, gamma, beta, mean, variance, epsilon):
    outputs, *_ = tf.raw_ops.FusedBatchNormV3(
        x=_as_image(inputs),
        scale=gamma,
        offset=beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        is_training=False,
    )
    return tf.reshape(outputs, tf.shape(inputs))


def _exchanged(inputs, gamma, beta, axis, epsilon, exchange, weight):
    """The results of `_fused_training` with the moments of all towers' examples; channels at dimension `axis`.

    Two passes (first the mean, then squared distances from it) lose no digits where the mean is large. The
    gradient is that of batch norm over the whole batch (Ioffe and Szegedy 2015, section 3); its two sums are
    exchanged like the moments. A tower of weight 0 adds nothing to any sum.
    """
    axes = [dim for dim in range(inputs.shape.rank) if dim != axis]
    shape = [1 if dim != axis else inputs.shape[axis] for dim in range(inputs.shape.rank)]
    weight = tf.constant(1.0) if weight is None else tf.sign(weight)
    compute = tf.float64 if inputs.dtype == tf.float64 else tf.float32
    weight = tf.cast(weight, compute)

    @tf.custom_gradient
    def normalize(inputs, gamma, beta):
        values = tf.cast(inputs, compute)
        own_count = weight * tf.cast(tf.size(inputs) // inputs.shape[axis], compute)
        first = exchange.sum(tf.concat([[own_count], weight * tf.reduce_sum(values, axes)], 0))
        # In a microbatch all towers may be idle.
        count = tf.maximum(first[0], 1)
        mean = first[1:] / count
        centred = values - tf.reshape(mean, shape)
        variance = exchange.sum(weight * tf.reduce_sum(tf.square(centred), axes)) / count
        inverse = tf.math.rsqrt(variance + epsilon)
        normalized = centred * tf.reshape(inverse, shape)
        outputs = normalized * tf.reshape(gamma, shape) + tf.reshape(beta, shape)

        def gradient(upstream, *_):
            upstream = tf.cast(upstream, compute)
            beta_gradient = tf.reduce_sum(upstream, axes)
            gamma_gradient = tf.reduce_sum(upstream * normalized, axes)
            # Examples that are not in the moments get no gradient through them.
            sums = weight * exchange.sum(tf.stack([beta_gradient, gamma_gradient])) / count
            inner = upstream - tf.reshape(sums[0], shape) - normalized * tf.reshape(sums[1], shape)
            inputs_gradient = inner * tf.reshape(gamma * inverse, shape)
            return tf.cast(inputs_gradient, inputs.dtype), gamma_gradient, beta_gradient

        return (tf.cast(outputs, inputs.dtype), mean, variance), gradient

    outputs, mean, variance = normalize(inputs, gamma, beta)
    return outputs, tf.stop_gradient(mean), tf.stop_gradient(variance)
