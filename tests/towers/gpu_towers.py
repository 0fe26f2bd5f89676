"""What the host waits for in the graph of a tower on a GPU: traced and optimized without one."""

import tensorflow as tf

from tests.towers.gpu_kernels import waits_in
from towers.input.wide_integers import widened_spec
from towers.layers.kernels import LayerKernels
from towers.task import InputShard, Task, as_batch
from towers.tower import TowerFunction
from towers.tracing import graph_optimizer

AS_ON_GPUS = LayerKernels(wide_ids=True, values_on_host=True)


def waits_of_tower(task: Task, kernels: LayerKernels = AS_ON_GPUS) -> list[str]:
    """The waits of a training pass, as `waits_in` gives them.

    Args:
      task: what is trained.
      kernels: of the tower.
    """
    spec = as_batch(task.dataset("train", InputShard()).element_spec)
    spec = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), spec)
    tower = TowerFunction(task, task.build_model(), kernels=kernels, batch_spec=spec)
    parameters, state = (
        [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        for variables in (tower.variables.parameters, tower.variables.state)
    )
    scalars = tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.float32)
    traced = tf.function(tower._train, autograph=False)
    concrete = traced.get_concrete_function(parameters, state, widened_spec(spec), *scalars)
    with tf.Graph().as_default() as graph:
        described = graph_optimizer.optimized_graph(concrete, concrete.graph.as_graph_def(add_shapes=True))
        results = tf.graph_util.import_graph_def(described, return_elements=[one.name for one in concrete.outputs])
    return waits_in(graph, results)
