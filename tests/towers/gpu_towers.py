"""What the host waits for in the graph of a pass on a GPU; the graph is traced and optimized without a GPU."""

import tensorflow as tf

from tests.towers.gpu_kernels import waits_in
from towers.input.wide_integers import widened_spec
from towers.layers.kernels import LayerKernels
from towers.task import Batch, InputShard, Task, as_batch
from towers.tower import EvaluationFunction, ModelVariables, TowerFunction
from towers.tracing import graph_optimizer

AS_ON_GPUS = LayerKernels(wide_ids=True, values_on_host=True)


def waits_of_tower(task: Task, kernels: LayerKernels = AS_ON_GPUS) -> list[str]:
    """The waits of a training pass, as `waits_in` gives them.

    Args:
      task: the task.
      kernels: kernels of the tower.
    """
    spec = _spec(task, "train")
    tower = TowerFunction(task, task.build_model(), kernels=kernels, batch_spec=spec)
    return _waits_of(tower._train, tower.variables, widened_spec(spec), tf.TensorSpec([2], tf.int32))


def waits_of_evaluation(task: Task, kernels: LayerKernels = AS_ON_GPUS) -> list[str]:
    """As `waits_of_tower`, for an evaluation pass."""
    model = task.build_model()
    evaluation = EvaluationFunction(task, model, kernels=kernels)
    return _waits_of(evaluation._evaluate, ModelVariables.of(model), _spec(task, "eval"))


def _spec(task: Task, split: str) -> Batch:
    spec = as_batch(task.dataset(split, InputShard()).element_spec)
    return tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), spec)


def _waits_of(one_pass, variables: ModelVariables, *given) -> list[str]:
    """The waits of a pass; `given` are the specs of its arguments between the state and the gain."""
    parameters, state = (
        [tf.TensorSpec(variable.shape, variable.dtype) for variable in of_kind]
        for of_kind in (variables.parameters, variables.state)
    )
    traced = tf.function(one_pass, autograph=False)
    concrete = traced.get_concrete_function(parameters, state, *given, tf.TensorSpec([], tf.float32))
    with tf.Graph().as_default() as graph:
        described = graph_optimizer.optimized_graph(concrete, concrete.graph.as_graph_def(add_shapes=True))
        results = tf.graph_util.import_graph_def(described, return_elements=[one.name for one in concrete.outputs])
    return waits_in(graph, results)
