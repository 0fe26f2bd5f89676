"""A Keras model cut into stages: runs of its operations, in the order in which Keras computes them.

    image -> conv -> norm -> relu -> conv -> add -> dense         3 boundaries are possible below each other
             |------ stage 0 ------||---- stage 1 ------|

An operation is a call of a layer; a functional model inside the model is one operation. A tensor may skip stages:
it is sent from the stage that computes it to each one that reads it.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from towers.errors import UserError
from towers.pipeline.cut import balanced_boundaries, sized_boundaries


@dataclasses.dataclass(frozen=True)
class ModelStages:
    """The stages of a model.

    Attributes:
      functional: the functional model whose operations are cut: the model itself, or the one inside a
        `Sequential`.
      nodes: [stages] Keras's nodes of each stage, in order. A node is one call of an operation.
    """

    functional: keras.Model
    nodes: tuple[tuple, ...]

    @property
    def num_stages(self) -> int:
        return len(self.nodes)

    def stages_of(self, variable: keras.Variable) -> list[int]:
        """The ascending indices of the stages with an operation that has the variable; [0] if none has it."""
        found = [
            stage
            for stage, nodes in enumerate(self.nodes)
            if any(variable is own for node in nodes for own in variables_of(node.operation))
        ]
        return found or [0]


def cut_by_parameters(model: keras.Model, num_stages: int) -> ModelStages:
    """Cuts a model into stages with about equally many parameters: minimizes those of the largest stage.

    Raises:
      UserError: the model is not functional, or has fewer operations than there are stages.
    """
    functional = functional_of(model)
    nodes = nodes_of(functional)
    seen: set[int] = set()
    costs = []
    for node in nodes:
        # A shared variable counts in the stage that reads it first, because it lives there.
        new = {id(v): v for v in variables_of(node.operation) if v.trainable and id(v) not in seen}
        seen.update(new)
        costs.append(sum(math.prod(v.shape) for v in new.values()))
    return cut_by_costs(functional, costs, num_stages)


def cut_by_costs(functional: keras.Model, costs: Sequence[float], num_stages: int) -> ModelStages:
    """Cuts a model into stages so that the cost of the largest stage is minimal.

    Args:
      functional: as `functional_of` returns it.
      costs: the cost of each node of `nodes_of(functional)`.
      num_stages: number of stages.

    Raises:
      UserError: there are fewer operations than stages.
    """
    return _cut(functional, balanced_boundaries(costs, num_stages))


def cut_by_sizes(model: keras.Model, sizes: Sequence[int]) -> ModelStages:
    """Stages with these numbers of operations.

    Raises:
      UserError: the model is not functional, or the sizes do not add up to the number of its operations.
    """
    functional = functional_of(model)
    return _cut(functional, sized_boundaries(sizes, len(nodes_of(functional))))


def functional_of(model: keras.Model, done: str = "cut into stages") -> keras.Model:
    """The functional model that computes `model`.

    Args:
      model: any model.
      done: what the caller wants to do with its graph, for the message.

    Raises:
      UserError: the model's own code decides what it computes, so there is no graph to cut.
    """
    found = model
    if isinstance(model, keras.Sequential):
        found = getattr(model, "_functional", None)
    is_functional = hasattr(found, "_run_through_graph") and type(found).call is Functional.call
    if not is_functional or type(model).call not in (Functional.call, keras.Sequential.call):
        raise UserError(
            f"model {model.name!r} of class {type(model).__name__} can't be {done}, because its own "
            "call() decides what it computes: build it as keras.Model(inputs, outputs) or keras.Sequential with "
            "an Input, or use strategy='towers'"
        )
    return found


def nodes_of(functional: keras.Model) -> list:
    """The nodes of a functional model that compute something, in the order in which Keras computes them."""
    by_depth = functional._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def variables_of(operation) -> list[keras.Variable]:
    """The variables of an operation; empty if it is not a layer."""
    return list(operation.variables) if isinstance(operation, keras.layers.Layer) else []


def _cut(functional: keras.Model, boundaries: Sequence[int]) -> ModelStages:
    nodes = nodes_of(functional)
    return ModelStages(functional, tuple(tuple(nodes[a:b]) for a, b in itertools.pairwise(boundaries)))


def parameter_bytes(stages: ModelStages) -> list[int]:
    """[stages] bytes of each stage's parameters; a shared one belongs to the first stage that reads it."""
    found = [0] * stages.num_stages
    for variable in stages.functional.trainable_variables:
        size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        found[stages.stages_of(variable)[0]] += size
    return found
