"""Measures how long each operation of a model takes, forward and backward, for stages of equal time."""

import time

import keras
import numpy as np
import tensorflow as tf

from towers.errors import UserError
from towers.layers.kernels import LayerKernels
from towers.stages.model_stages import nodes_of, variables_of

_RUNS = 3


def operation_seconds(functional: keras.Model, num_examples: int, kernels: LayerKernels) -> list[float]:
    """[operations] seconds of the forward and the backward pass on the current device, the shortest of 3 runs.

    Operations with the same configuration and shapes are measured once.

    Args:
      functional: as `model_stages.functional_of` returns it.
      num_examples: examples of a microbatch.
      kernels: which layers use other kernels than Keras's.

    Raises:
      UserError: an operation's inputs have no fixed shape, or it fails on random inputs.
    """
    seconds: dict[str, float] = {}
    found = []
    with kernels.in_place(functional):
        for node in nodes_of(functional):
            key = _key(node)
            if key not in seconds:
                seconds[key] = _seconds_of(node, num_examples)
            found.append(seconds[key])
    return found


def _key(node) -> str:
    """A key that is equal for operations that take equally long."""
    operation = node.operation
    shapes = [(x.shape, x.dtype) for x in node.input_tensors]
    try:
        config = {name: value for name, value in operation.get_config().items() if name != "name"}
    except NotImplementedError:
        config = operation.name
    return repr((type(operation), shapes, config, [(v.shape, v.trainable) for v in variables_of(operation)]))


def _seconds_of(node, num_examples: int) -> float:
    inputs = [_drawn(node, x, num_examples) for x in node.input_tensors]
    parameters = [variable for variable in variables_of(node.operation) if variable.trainable]
    in_training = "training" in getattr(node.operation, "_call_context_args", {})

    @tf.function(autograph=False)
    def passes(*values):
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch([value for value in values if value.dtype.is_floating])
            args, kwargs = node.arguments.fill_in(
                {id(x): value for x, value in zip(node.input_tensors, values, strict=True)}
            )
            outputs = node.operation(*args, **{**kwargs, **({"training": True} if in_training else {})})
            floating = [x for x in tf.nest.flatten(outputs) if x.dtype.is_floating]
            total = tf.add_n([tf.zeros([]), *(tf.reduce_sum(tf.cast(x, tf.float32)) for x in floating)])
        sources = [*(x for x in values if x.dtype.is_floating), *(p.value for p in parameters)]
        return [total, *(x for x in tape.gradient(total, sources) if x is not None)] if sources else [total]

    try:
        passes(*inputs)
    except tf.errors.InvalidArgumentError:
        # For example a lookup that has no index for unknown values.
        raise UserError(
            f"balance='time': operation {node.operation.name!r} fails on the random values that measure its "
            "time: use balance='parameters'"
        ) from None
    taken = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        [value.numpy() for value in tf.nest.flatten(passes(*inputs)[:1])]
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _drawn(node, x: keras.KerasTensor, num_examples: int) -> tf.Tensor:
    shape = [num_examples if x.shape[0] is None else x.shape[0], *x.shape[1:]]
    if None in shape:
        raise UserError(
            f"balance='time': operation {node.operation.name!r} gets inputs of shape {tuple(x.shape)}, which is "
            "not fixed: use balance='parameters'"
        )
    dtype = tf.as_dtype(x.dtype)
    if dtype == tf.string:
        return tf.fill(shape, "")
    values = np.random.default_rng(0).normal(size=shape) if dtype.is_floating else np.ones(shape)
    return tf.cast(tf.constant(values), dtype)
