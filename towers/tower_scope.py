"""What the layers of a tower read and assign while it is traced: tensors in place of the model's variables."""

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from towers.errors import UserError

_SEED_STATE = "seed_generator_state"


def is_seed(variable: keras.Variable) -> bool:
    """Whether it is the state of a random generator."""
    return variable.name == _SEED_STATE


def read_as(variable: keras.Variable, value: tf.Tensor) -> None:
    """Makes reads of a parameter give this value, from now to the end of the current scope."""
    keras.StatelessScope.add_update(get_stateless_scope(), (variable, value))


class TowerScope(keras.StatelessScope):
    """A StatelessScope that refuses assignments which would give other numbers than Keras's variables, or be lost.

    An assignment lasts until the end of the scope. So an assignment in the body of a loop, which is traced once,
    would be the same in each iteration; one in a condition is unknown outside of it; one to a parameter, or to a
    variable that is not the model's, would be lost. As with Keras's variables, no gradient passes through an
    assignment.
    """

    def __init__(self, state_mapping, model: keras.Model):
        """Args:
        state_mapping: pairs (variable, tensor).
        model: the model whose layers are called.
        """
        super().__init__(state_mapping, collect_losses=True)
        self._graph = tf.compat.v1.get_default_graph()
        # A layer's metrics are not reported, so assignments to their variables may be lost.
        metrics = [metric for layer in model._flatten_layers() for metric in layer.metrics]
        self._of_metrics = {id(variable) for metric in metrics for variable in metric.variables}

    def add_update(self, update) -> None:
        """Notes an assignment: a pair (variable, value).

        Raises:
          UserError: the assignment is to a parameter, to a variable that is not the model's, or in a loop.
        """
        variable, value = update
        if id(variable) not in self.state_mapping and id(variable) not in self._of_metrics:
            raise UserError(_not_of_the_model(variable))
        if variable.trainable and id(variable) in self.state_mapping:
            raise UserError(
                f"{variable.path} is assigned in its layer's call, but it is trainable, and the update rule alone "
                "changes trainable weights: use add_weight(..., trainable=False), or compute with the changed "
                "value and assign nothing"
            )
        if any(isinstance(graph, WhileBodyFuncGraph) for graph in self._inner_graphs()):
            if is_seed(variable):
                raise UserError(
                    f"{variable.path}: its layer draws random numbers in a loop, where all iterations would get "
                    "the same ones; use RNN(..., unroll=True) or the argument dropout of Keras's own cells, or "
                    "call the layer outside of the loop"
                )
            raise UserError(
                f"{variable.path} is assigned in a loop, which towers can't do: use RNN(..., unroll=True), call "
                "its layer with training=False, or call it outside of the loop"
            )
        super().add_update((variable, tf.stop_gradient(value) if value.dtype.is_floating else value))

    def get_current_value(self, variable: keras.Variable):
        """The tensor that stands for a variable now.

        Raises:
          UserError: the variable was assigned in a condition, a loop or a tf.function that has ended.
        """
        value = super().get_current_value(variable)
        graph = getattr(value, "graph", None)
        if graph is None or graph is self._graph or graph in self._inner_graphs():
            return value
        raise UserError(
            f"{variable.path} is assigned in a condition, a loop or a tf.function, and read outside of it: call "
            "its layer outside, and choose between the results"
        )

    def _inner_graphs(self) -> list[tf.Graph]:
        """The graphs of conditions, loops and functions that the current operations are in."""
        found, graph = [], tf.compat.v1.get_default_graph()
        while graph is not self._graph and isinstance(graph, FuncGraph):
            found.append(graph)
            graph = graph.outer_graph
        return found


def _not_of_the_model(variable: keras.Variable) -> str:
    """The error text for an assignment to a variable that is not the model's."""
    if is_seed(variable):
        return (
            f"{variable.path}: a layer draws random numbers from a generator that belongs to no layer, so each "
            "step would draw the same ones: let the layer make a keras.random.SeedGenerator(0) in its __init__, "
            "keep it as an attribute, and pass it as seed"
        )
    return (
        f"{variable.path} is assigned in a layer's call, but it is no weight of the model, so the next step would "
        "not see it: omit stateful=True of a recurrent layer; make other variables with add_weight(..., "
        "trainable=False)"
    )
