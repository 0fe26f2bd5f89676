"""Recomputation in stages: their backward passes compute activations again.

stage 0    forward   x --> A --> B --> y            x is kept for each microbatch that is alive, A and B are not
           backward  x --> A' -> B' --> gradients
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.pipeline.action import Kind
from towers.recompute.recomputation import TracedPass
from towers.stages.places import Place


def recomputed_in_stages(
    graph: tf.Graph, traced: TracedPass, places: Mapping[str, Place]
) -> tuple[tf.Graph, dict[str, Place]]:
    """The graph with second computations, and the places of its operations: copies belong to the backward pass.

    A segment that lies in several stages is not recomputed: a copy in one stage would wait for copies in the stage
    before, whose backward pass comes later.

    Args:
      graph: the traced function's.
      traced: what to compute again in it.
      places: as `towers.stages.places.places_of` returns them.
    """
    operations = graph.get_operations()
    inside = [one for one in traced.ranges if len(_stages_of(operations[one.of.begin : one.of.end], places)) == 1]
    if not inside:
        return graph, dict(places)
    graph_def = graph.as_graph_def(add_shapes=True)
    copies = traced.compute_again(graph, graph_def, inside)
    found = tf.Graph()
    with found.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    again = {copy: Place(places[name].stage, Kind.BACKWARD) for copy, name in copies.items() if name in places}
    return found, {**places, **again}


def _stages_of(operations: Sequence[tf.Operation], places: Mapping[str, Place]) -> set[int]:
    return {places[operation.name].stage for operation in operations if operation.name in places}
