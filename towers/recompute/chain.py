"""A functional model as a chain of links. Between two links a single tensor connects what is before and after.

    x -> conv -> norm -> relu -> conv -> (+ x) -> relu -> dense     links: [conv norm relu conv +] [relu] [dense]
      \\_______________________________/

The order is that in which Keras calls the model's operations. A model input does not count as a connection,
because it is kept anyway: a second input may enter anywhere.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.ops.operation import Operation


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of an operation while the model runs.

    Attributes:
      operation: a layer, a model within the model, or another operation of Keras.
      number: how many calls of the same operation come before it in a run of the model.
      node: its node in Keras's graph.
      inner: the calls that it makes, if it is a functional model; otherwise empty.
    """

    operation: Operation
    number: int
    node: Any
    inner: tuple["Call", ...] = ()

    @property
    def kind(self) -> tuple:
        """A key that is equal for calls of the same structure."""
        return (type(self.operation).__name__, *(call.kind for call in self.inner))

    @property
    def num_outputs(self) -> int:
        """Number of elements that it computes for one example, those of its inner calls included."""
        own = sum(math.prod(size or 1 for size in tensor.shape) for tensor in self.node.outputs)
        return sum(call.num_outputs for call in self.inner) or own


# Calls in the order in which they run.
Link = tuple[Call, ...]


def functional_form(model: Operation) -> Functional | None:
    """The functional model that runs when `model` is called; None if it runs a call() of its own."""
    form = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    return form if isinstance(form, Functional) and type(form).call is Functional.call else None


def links_of(model: Functional) -> list[Link]:
    """The finest chain of the model's own calls: inner models are not opened."""
    return _links(_calls(model, collections.Counter()), model.outputs)


def opened(link: Link) -> list[Link]:
    """The inner links, if the link is one call of a functional model; otherwise the link itself."""
    if len(link) != 1 or not link[0].inner:
        return [link]
    model = functional_form(link[0].operation)
    return _links(link[0].inner, model.outputs, model.inputs)


def finest(links: Sequence[Link]) -> list[Link]:
    """The chain with all inner models opened."""
    found = []
    for link in links:
        parts = opened(link)
        found += parts if parts == [link] else finest(parts)
    return found


def _calls(model: Functional, numbers: collections.Counter) -> tuple[Call, ...]:
    found = []
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                number = numbers[node.operation]
                numbers[node.operation] += 1
                inner = functional_form(node.operation)
                found.append(Call(node.operation, number, node, _calls(inner, numbers) if inner else ()))
    return tuple(found)


def _links(calls: Sequence[Call], outputs: Sequence[keras.KerasTensor], inputs=()) -> list[Link]:
    """The links of these calls; `inputs` are tensors that are computed before them."""
    last_use = {id(tensor): index for index, call in enumerate(calls) for tensor in call.node.input_tensors}
    last_use |= {id(tensor): len(calls) for tensor in outputs}
    found, begin, alive = [], 0, {id(tensor) for tensor in inputs}
    for index, call in enumerate(calls):
        own = {id(tensor) for tensor in call.node.outputs}
        alive = {tensor for tensor in alive | own if last_use.get(tensor, -1) > index}
        if len(alive) == 1 and alive <= own:
            found.append(tuple(calls[begin : index + 1]))
            begin = index + 1
    # A model with several outputs has more than one tensor alive after its last call.
    return found + ([tuple(calls[begin:])] if begin < len(calls) else [])
