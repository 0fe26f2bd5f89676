"""Replaces the `call` of a model's split layers, so that each slice is computed on its device."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from towers.layers.products import multiplied, with_bias
from towers.layers.table_rows import row_ids
from towers.slices.attention_heads import heads_call
from towers.slices.divided_tensors import DividedTensors
from towers.slices.elementwise import is_elementwise, is_elementwise_layer
from towers.slices.layout import LayerSplit, Layout
from towers.slices.on_device import on_device
from towers.slices.sliced_values import SlicedValues
from towers.slices.splits import COLUMNS, HEADS, INPUT_CHANNELS, OUTPUT_CHANNELS, ROWS, VOCABULARY


def sliced_calls(
    model: keras.Model, layout: Layout, values: SlicedValues
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """(layer, 'call', function) for `shadowed`, for split layers and element-wise layers."""
    divided = DividedTensors()
    found = [
        (split.layer, "call", _usable(split.layer, values, _CALLS[split.split](split, values, divided)))
        for split in layout.layers
        if split.cut
    ]
    found += [
        (layer, "call", _usable(layer, values, _elementwise(layer, values, divided)))
        for layer in model._flatten_layers()
        if is_elementwise_layer(layer)
    ]
    return found


def _usable(layer, values: SlicedValues, call: Callable) -> Callable:
    """`call`, or the layer's own where slices can't be used: in the body of a loop, or on a sparse tensor."""

    def usable(*given, **named):
        inputs = given[0] if given else next(iter(named.values()))
        here = tf.compat.v1.get_default_graph() is values.graph
        if here and isinstance(inputs, tf.Tensor):
            return call(*given, **named)
        return type(layer).call(layer, *given, **named)

    return usable


def _elementwise(layer, values: SlicedValues, divided: DividedTensors):
    def call(inputs):
        parts = divided.known_parts(inputs)
        if parts is None:
            return type(layer).call(layer, inputs)
        computed = [
            on_device(device, lambda part: type(layer).call(layer, part), [part])
            for device, part in zip(values.devices, parts, strict=True)
        ]
        return divided.join(computed)

    return call


def _output_split(split: LayerSplit, values: SlicedValues, divided: DividedTensors) -> Callable:
    """The call of a layer whose kernel is cut along its outputs: each device gets all inputs."""
    layer, has_bias = split.layer, getattr(split.layer, "bias", None) is not None
    # Checked before a compiled activation replaces it. Other activations, like softmax, need all outputs at once.
    alone = is_elementwise(layer.activation)

    def slice_of(inputs, kernel, bias=None):
        outputs = multiplied(layer, inputs, tf.cast(kernel, layer.compute_dtype))
        if bias is not None:
            outputs = with_bias(outputs, bias)
        return _activated(layer, outputs) if alone else outputs

    def call(inputs, training=None):
        weights = zip(*(values.parts(own) for own in (layer.kernel, *([layer.bias] * has_bias))), strict=True)
        parts = [
            on_device(device, slice_of, [inputs, *own])
            for device, own in zip(values.devices, weights, strict=True)
        ]
        outputs = divided.join(parts)
        return outputs if alone else _activated(layer, outputs)

    return call


def _input_split(split: LayerSplit, values: SlicedValues, divided: DividedTensors) -> Callable:
    """The call of a layer whose kernel is cut along its inputs: each device gets its part of the inputs."""
    layer, has_bias = split.layer, getattr(split.layer, "bias", None) is not None

    def slice_of(inputs, kernel):
        return multiplied(layer, inputs, tf.cast(kernel, layer.compute_dtype))

    def call(inputs, training=None):
        parts = [
            on_device(device, slice_of, own)
            for device, *own in zip(
                values.devices, divided.parts(inputs, split.lengths), values.parts(layer.kernel), strict=True
            )
        ]
        outputs = tf.add_n(parts)
        return _activated(layer, with_bias(outputs, layer.bias) if has_bias else outputs)

    return call


def _activated(layer, outputs):
    return outputs if layer.activation is None else layer.activation(outputs)


def _vocabulary_call(split: LayerSplit, values: SlicedValues, divided: DividedTensors) -> Callable:
    """The call of an Embedding whose rows are divided, and of a ReversibleEmbedding in both directions."""
    layer = split.layer

    def call(inputs, reverse=False):
        return _projected(layer, inputs, values, divided) if reverse else _looked_up(split, inputs, values)

    return call


def _looked_up(split: LayerSplit, inputs: tf.Tensor, values: SlicedValues) -> tf.Tensor:
    """The sum over the slices: an id's row from the slice that has it, zeros from the others."""
    ids, found, begin = row_ids(split.layer, inputs), [], 0
    for index, rows in enumerate(values.parts(split.layer.embeddings)):
        end = begin + split.lengths[index]
        # The first and last slice take all ids on their side, so that an id out of range fails as in Keras's
        # layer.
        above, below = index == 0 or ids >= begin, index == len(split.lengths) - 1 or ids < end
        here = tf.logical_and(above, below)
        local = tf.where(here, ids - begin, 0)

        def slice_of(rows, here=here, local=local):
            own = tf.cast(tf.gather(rows, local), split.layer.compute_dtype)
            return tf.where(here[..., None], own, tf.zeros_like(own))

        found.append(on_device(values.devices[index], slice_of, [rows]))
        begin = end
    return tf.add_n(found)


def _projected(layer, inputs, values: SlicedValues, divided: DividedTensors) -> tf.Tensor:
    """The logits of a ReversibleEmbedding: each device computes those of its own ids."""
    dtype = layer.reverse_dtype or layer.compute_dtype

    def slice_of(inputs, kernel):
        kernel = tf.cast(tf.cast(kernel, layer.compute_dtype), dtype)
        return ops.matmul(tf.cast(inputs, dtype), tf.transpose(kernel) if layer.tie_weights else kernel)

    kernels = values.parts(layer.embeddings if layer.tie_weights else layer.reverse_embeddings)
    parts = [
        on_device(device, slice_of, [inputs, kernel])
        for device, kernel in zip(values.devices, kernels, strict=True)
    ]
    logits = divided.join(parts)
    cap = layer.logit_soft_cap
    return logits if cap is None else ops.tanh(logits / cap) * cap


_CALLS = {
    COLUMNS: _output_split,
    ROWS: _input_split,
    OUTPUT_CHANNELS: _output_split,
    INPUT_CHANNELS: _input_split,
    VOCABULARY: _vocabulary_call,
    HEADS: heads_call,
}
