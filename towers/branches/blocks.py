"""Blocks of a functional model whose branches don't depend on each other.

    x -+- 1x1 -----------------+                  ids 0 -- table 0 -+- join
       +- 1x1 reduce -- 3x3 ---+- join            ids 1 -- table 1 -+
       +-----------------------+                  dense -- MLP -----+-------- join of the next block

A block is what lies between a fork (a node or an input) and the first node that is on all paths from it; a skip
connection is not one of its branches. A block may also be all nodes that lead to one node only, if parts of it
don't read each other: inputs with layers of their own, heads of a model. (Forks alone would miss the tables of a
DLRM, whose dense input also reaches a later join.) Of nested blocks the one that finishes earlier is divided.

Branches that share variables count as one. A branch that shares variables with the rest of the model stays on the
first device, and so does a branch without parameters.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import keras

from towers.branches.graph_order import GraphOrder
from towers.stages.model_stages import variables_of


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A branch of a block.

    Attributes:
      nodes: Keras's nodes, in order.
      moves: whether it may be on any device: it has parameters, and no other branch uses their layers.
      blocks: the blocks inside it.
    """

    nodes: tuple
    moves: bool
    blocks: tuple["Block", ...] = ()

    @property
    def name(self) -> str:
        """The name of its first operation with parameters, or else of its first operation."""
        named = next((node for node in self.nodes if _has_parameters(node)), self.nodes[0])
        return named.operation.name


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Branches that the same node joins; at least two of them may move.

    Attributes:
      join: name of the operation that joins them, or 'the outputs'.
      branches: the branches.
    """

    join: str
    branches: tuple[Branch, ...]

    @property
    def num_moving(self) -> int:
        """Number of branches that may be on any device."""
        return sum(branch.moves for branch in self.branches)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A block as a set of vertices for each branch, and whether that branch moves."""

    join: int
    branches: tuple[tuple[int, bool], ...]

    @property
    def region(self) -> int:
        return sum(vertices for vertices, _ in self.branches)


def blocks_of(functional: keras.Model) -> list[Block]:
    """The blocks of a functional model in order; those inside branches are in `Branch.blocks`.

    Args:
      functional: as `towers.stages.model_stages.functional_of` returns it. Models inside it are not opened.
    """
    order = GraphOrder(functional)
    users = _users(order)
    found = []
    for join, region in _regions(order):
        branches = _branches(order, users, region)
        if sum(moves for _, moves in branches) > 1:
            found.append(_Found(join, branches))
    largest_first = sorted(found, key=lambda one: -one.region.bit_count())
    return _nested(order, largest_first, None)


def _regions(order: GraphOrder) -> Iterator[tuple[int, int]]:
    """A join and the set of vertices before it, for all forks and all joins."""
    meetings = order.meetings()
    for fork in range(1, order.end):
        if len(order.readers[fork]) > 1:
            yield meetings[fork], order.after[fork] & order.before[meetings[fork]]
    # For each vertex the set of vertices that lead only to it, itself included.
    leading = [1 << vertex for vertex in range(order.end + 1)]
    parts = collections.defaultdict(list)
    for vertex in range(order.end):
        leading[meetings[vertex]] |= leading[vertex]
        parts[meetings[vertex]].append(vertex)
    for join, own in parts.items():
        last = [one for one in own if not any(order.after[one] & leading[other] for other in own if other != one)]
        yield join, _union([leading[one] for one in last])


def _users(order: GraphOrder) -> dict[int, int]:
    """By id of each variable, the set of the vertices that use it."""
    found: dict[int, int] = collections.defaultdict(int)
    for index, node in enumerate(order.nodes):
        for variable in variables_of(node.operation):
            found[id(variable)] |= 1 << order.vertex(index)
    return found


def _branches(order: GraphOrder, users: dict[int, int], region: int) -> tuple[tuple[int, bool], ...]:
    """The branches of a region as sets of vertices, and whether each moves."""
    found: list[int] = []
    for vertex in _vertices(region):
        node = order.node(vertex)
        if node is None:
            continue
        linked = 1 << vertex
        for source in order.reads[vertex]:
            linked |= 1 << source if order.node(source) else 0
        for variable in variables_of(node.operation):
            linked |= users[id(variable)]
        linked &= region
        joined = [one for one in found if one & linked]
        found = [one for one in found if not one & linked] + [_union([*joined, linked])]
    return tuple((one, _moves(order, users, one)) for one in sorted(found, key=lambda one: one & -one))


def _moves(order: GraphOrder, users: dict[int, int], branch: int) -> bool:
    nodes = [order.node(vertex) for vertex in _vertices(branch)]
    own = [variable for node in nodes for variable in variables_of(node.operation)]
    return any(map(_has_parameters, nodes)) and not any(users[id(variable)] & ~branch for variable in own)


def _nested(order: GraphOrder, found: Sequence[_Found], within: int | None) -> list[Block]:
    """The blocks inside a branch, or of the model; `found` with the largest first.

    Of two blocks that overlap, but are not nested, the smaller one is left out.
    """
    taken, blocks = 0, []
    for one in found:
        if (within is not None and one.region & ~within) or one.region & taken:
            continue
        taken |= one.region
        branches = tuple(
            Branch(
                tuple(order.node(vertex) for vertex in _vertices(vertices)),
                moves,
                tuple(_nested(order, [other for other in found if other.region != one.region], vertices)),
            )
            for vertices, moves in one.branches
        )
        join = order.node(one.join)
        blocks.append((one.region & -one.region, Block(join.operation.name if join else "the outputs", branches)))
    return [block for _, block in sorted(blocks, key=lambda pair: pair[0])]


def _has_parameters(node) -> bool:
    return any(variable.trainable for variable in variables_of(node.operation))


def _union(sets: Sequence[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _vertices(found: int) -> list[int]:
    return [index for index in range(found.bit_length()) if found >> index & 1]
