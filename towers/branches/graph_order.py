"""The graph of a functional model as numbers: what follows what, and where all paths meet again.

Vertices in order: 0, the begin, which all inputs read; the inputs; the nodes; last the end, which reads the
outputs. Sets of vertices are integers, of which bit i is vertex i.
"""

import keras

from towers.stages.model_stages import nodes_of


class GraphOrder:
    """The order of a model's nodes.

    Attributes:
      nodes: Keras's nodes that compute something, in order.
      num_inputs: number of model inputs.
      end: the last vertex.
      reads, readers: [vertices] the vertices that a vertex reads, and those that read it.
      after, before: [vertices] for each vertex the set of all that depend on it, and of all that it depends on.
    """

    def __init__(self, functional: keras.Model):
        """`functional` as `towers.stages.model_stages.functional_of` returns it."""
        self.nodes = nodes_of(functional)
        self.num_inputs = len(functional.inputs)
        self.end = 1 + self.num_inputs + len(self.nodes)
        made = {id(x): 1 + index for index, x in enumerate(functional.inputs)}
        made |= {id(x): self.vertex(index) for index, node in enumerate(self.nodes) for x in node.outputs}
        self.reads: list[set[int]] = [set() for _ in range(self.end + 1)]
        for index in range(self.num_inputs):
            self.reads[1 + index] = {0}
        for index, node in enumerate(self.nodes):
            self.reads[self.vertex(index)] = {made[id(x)] for x in node.input_tensors}
        self.reads[self.end] = {made[id(x)] for x in functional.outputs}
        self.readers: list[set[int]] = [set() for _ in self.reads]
        for vertex, read in enumerate(self.reads):
            for source in read:
                self.readers[source].add(vertex)
        self.before = [0] * (self.end + 1)
        for vertex in range(self.end + 1):
            for source in self.reads[vertex]:
                self.before[vertex] |= self.before[source] | 1 << source
        self.after = [0] * (self.end + 1)
        for vertex in reversed(range(self.end)):
            for reader in self.readers[vertex]:
                self.after[vertex] |= self.after[reader] | 1 << reader

    def vertex(self, index: int) -> int:
        """The vertex of a node by its index in `nodes`."""
        return 1 + self.num_inputs + index

    def node(self, vertex: int):
        """The node at a vertex; None for begin, inputs and end."""
        index = vertex - 1 - self.num_inputs
        return self.nodes[index] if 0 <= index < len(self.nodes) else None

    def meetings(self) -> list[int]:
        """[vertices] the first vertex after each one that is on all paths from it to the end.

        The immediate post-dominator (Cooper, Harvey and Kennedy 2001). Of the end, the end itself.
        """
        found = [self.end] * (self.end + 1)
        for vertex in reversed(range(self.end)):
            readers = sorted(self.readers[vertex]) or [self.end]
            meeting = readers[0]
            for other in readers[1:]:
                # Vertices that follow have higher numbers, so the lower of the two advances.
                while meeting != other:
                    meeting, other = max(meeting, other), found[min(meeting, other)]
            found[vertex] = meeting
        return found
