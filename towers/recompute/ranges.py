"""The operations of a traced graph that belong to segments of the model.

A segment names its ends by the numbers of their calls, and the chain numbers only the calls that functional models
make. While the model runs, another layer (such as TimeDistributed) or a call() of the user's model may call the
same layer. Such a call has no number.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.layers.shadowing import shadowed
from towers.recompute.chain import functional_form
from towers.recompute.segments import Segment

# The current caller: a call() outside all functional models, a functional model, or a layer that one of these
# called.
_OUTSIDE, _MODEL, _LAYER = range(3)


@dataclasses.dataclass(frozen=True)
class Range:
    """A segment's operations in a graph.

    Attributes:
      begin, end: the range is the graph's operations begin to end - 1, in the order of creation.
      outputs: outputs of the segment's last call.
    """

    begin: int
    end: int
    outputs: tuple[tf.Tensor, ...]


class RangeRecorder:
    """Notes where segments begin and end while the model is called in a graph.

    Attributes:
      ranges: the range of each segment that ran, in order.
    """

    def __init__(self, segments: Sequence[Segment], model: keras.Model):
        """Args:
        segments: the model's segments.
        model: the model that is called during recording.
        """
        self.ranges: list[Range] = []
        self._segments = segments
        self._model = model
        self._caller = _OUTSIDE if functional_form(model) is None else _MODEL
        self._graph = tf.compat.v1.get_default_graph()
        self._begins: dict[Segment, int] = {}
        self._counts: dict[int, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: records calls of the segments' first and last operations."""
        ends = [one for segment in self._segments for one in (segment.first, segment.last)]
        callers = [layer for layer in _layers_of(self._model) if _layers_of(layer)] if ends else []
        operations = {id(one): one for one in (*ends, *callers)}
        with shadowed([(one, "call", self._noted(one, one.call)) for one in operations.values()]):
            yield

    def _noted(self, operation, call):
        def noted(*arguments, **options):
            # The body of a loop or a condition is a separate graph.
            if tf.compat.v1.get_default_graph() is not self._graph:
                return call(*arguments, **options)
            number = self._number(operation)
            for segment in self._segments:
                # A layer may be in two segments, or call another segment's layer: overlapping copies would clash.
                if not self._begins and segment.first is operation and segment.first_number in (None, number):
                    self._begins[segment] = self._num_operations()
            with self._calling(operation):
                outputs = call(*arguments, **options)
            for segment in self._segments:
                if segment.last is operation and segment.last_number in (None, number) and segment in self._begins:
                    self._end(segment, outputs)
            return outputs

        return noted

    def _number(self, operation) -> int:
        """How many calls of the operation come before this one; -1 if this one has no number."""
        if self._caller != _MODEL:
            return -1
        number = self._counts.get(id(operation), 0)
        self._counts[id(operation)] = number + 1
        return number

    @contextlib.contextmanager
    def _calling(self, operation) -> Iterator[None]:
        """Context manager: the operation is the caller."""
        before = self._caller
        if functional_form(operation) is not None:
            self._caller = max(before, _MODEL)
        elif before == _MODEL:
            self._caller = _LAYER
        yield
        self._caller = before

    def _end(self, segment: Segment, outputs: Any) -> None:
        tensors = tuple(value for value in tf.nest.flatten(outputs) if isinstance(value, tf.Tensor))
        self.ranges.append(Range(self._begins.pop(segment), self._num_operations(), tensors))

    def _num_operations(self) -> int:
        return len(self._graph.get_operations())


def _layers_of(layer) -> list[keras.layers.Layer]:
    """The layers within a layer, at any depth."""
    return list(layer._flatten_layers(include_self=False))
