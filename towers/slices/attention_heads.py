"""Attention whose heads are divided over devices: each computes its heads and its part of the projection."""

import itertools
from collections.abc import Callable

import tensorflow as tf
from keras import layers

from towers.layers.products import multiplied, with_bias
from towers.layers.shadowing import shadowed
from towers.slices.divided_tensors import DividedTensors
from towers.slices.layout import LayerSplit
from towers.slices.on_device import on_device
from towers.slices.sliced_values import SlicedValues
from towers.slices.splits import projections

_OUTPUT = "_output_dense"


def heads_call(split: LayerSplit, values: SlicedValues, divided: DividedTensors) -> Callable:
    """The call of a MultiHeadAttention split by heads; each device runs Keras's own formula on its heads."""
    layer: layers.MultiHeadAttention = split.layer

    def call(query, value, key=None, *, return_attention_scores=False, **options):
        key = value if key is None else key
        mask_of_query = getattr(query, "_keras_mask", None)
        found, begins = [], [0, *itertools.accumulate(split.lengths)]
        of_slices = zip(values.devices, _weights_of_slices(layer, values), itertools.pairwise(begins), strict=True)
        for device, weights, heads in of_slices:
            own = {**options, "attention_mask": _mask_of(options.get("attention_mask"), query, *heads)}
            of_heads = _of_heads(layer, tuple(weights), mask_of_query, return_attention_scores, own)
            found.append(on_device(device, of_heads, [query, value, key, *weights.values()]))
        outputs = [parts[0] for parts in found] if return_attention_scores else found
        total = tf.add_n(outputs)
        output = layer._output_dense
        total = total if output.bias is None else with_bias(total, output.bias)
        # As in Keras's call, where only the outputs have a mask afterwards.
        for tensor in (query, value, key):
            tensor._keras_mask = None
        total._keras_mask = mask_of_query
        return (total, tf.concat([parts[1] for parts in found], 1)) if return_attention_scores else total

    return call


def _mask_of(mask, query, begin: int, end: int):
    """Of a mask [N, heads, T, S] the part for heads begin to end - 1; other masks apply to all heads."""
    if mask is None or (len(query.shape), len(mask.shape)) != (3, 4) or mask.shape[1] == 1:
        return mask
    return mask[:, begin:end]


def _weights_of_slices(layer, values: SlicedValues) -> list[dict[tuple[str, str], tf.Tensor]]:
    """For each slice its weights, by the layer's attribute and by 'kernel' or 'bias'."""
    variables = {}
    for name, of_head in projections(layer).items():
        variables[name, "kernel"] = of_head.kernel
        if of_head.bias is not None:
            variables[name, "bias"] = of_head.bias
    variables[_OUTPUT, "kernel"] = layer._output_dense.kernel
    parts = {named: values.parts(variable) for named, variable in variables.items()}
    return [
        {named: of_slices[index] for named, of_slices in parts.items()} for index in range(len(values.devices))
    ]


def _of_heads(layer, names, mask_of_query, return_scores: bool, options):
    """A function of query, value, key and weights (in the order of `names`) that computes some of the heads."""

    def of_heads(query, value, key, *weights):
        # Keras's call reads the masks of values and keys from its arguments, that of the query from the tensor.
        query._keras_mask = mask_of_query
        cast = [tf.cast(weight, layer.compute_dtype) for weight in weights]
        given = dict(zip(names, cast, strict=True))
        replaced = [
            (layer, name, _projection(getattr(layer, name), given[name, "kernel"], given.get((name, "bias"))))
            for name in (*projections(layer), _OUTPUT)
        ]
        with shadowed(replaced):
            found = type(layer).call(layer, query, value, key, return_attention_scores=return_scores, **options)
        return list(found) if return_scores else found

    return of_heads


def _projection(dense: layers.EinsumDense, kernel, bias):
    def project(inputs):
        outputs = multiplied(dense, inputs, kernel)
        outputs = outputs if bias is None else with_bias(outputs, bias)
        return outputs if dense.activation is None else dense.activation(outputs)

    return project
