"""Python functions of one process that graphs of another process call by name.

TensorFlow's PyFunc operation calls a Python function of the process that runs it. So a graph that the chief builds
and a worker or a server runs can call that process's own Python, for its next batch, or to count a step. Thus
Python generators work, which `create_per_worker_dataset` refuses.

Where order matters, use `PyFuncStateless` with control inputs: `PyFunc` is stateful, but TensorFlow does not order
stateful operations without a resource, so several steps of a closure would read their batches in any order.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import script_ops

from towers.errors import UserError


class HostFunctions:
    """The functions that this process offers; other processes can call them while this object lives."""

    def __init__(self, functions: dict[str, Callable]):
        """Args:
        functions: functions by name; each takes NumPy values, and returns one or a tuple of several.
        """
        # TensorFlow's registry refers to the functions weakly.
        self._functions = {_token(name): _without_causes(function) for name, function in functions.items()}
        # tf.numpy_function chooses random names in each process; here both sides know the name.
        script_ops._py_funcs._funcs.update(self._functions)

    def withdraw(self) -> None:
        """Makes the functions unavailable to other processes."""
        for token in self._functions:
            script_ops._py_funcs.remove(token)


def call(name: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Calls a function, in a graph or eagerly, in the process that the current device belongs to.

    In a graph it is called as soon as its inputs and control inputs are computed. A call without inputs, or two
    calls with the same inputs, may run only once.

    Args:
      name: name of the function in its process.
      inputs: its arguments.
      outputs: specs of its results; the shapes are not checked.
    """
    found = tf.raw_ops.PyFuncStateless(input=inputs, token=_token(name), Tout=[output.dtype for output in outputs])
    for tensor, output in zip(found, outputs, strict=True):
        if not tf.executing_eagerly():
            tensor.set_shape(output.shape)
    return list(found)


def _without_causes(function: Callable) -> Callable:
    """The function with its UserErrors' causes removed: other processes get each error with its traceback.

    With TensorFlow's tracebacks an error would be longer than 3 KiB, and gRPC would then print it dozens of times.
    """

    @functools.wraps(function)
    def called(*values):
        try:
            return function(*values)
        except UserError as error:
            raise UserError(str(error)) from None

    return called


def _token(name: str) -> str:
    return f"towers.{name}"
