"""Embedding tables on servers: tables of equal width form a matrix, whose rows go to the servers in turn.

    table "a"  rows 0 to 4     matrix rows 0 to 4     server 0:  rows 0, 2, 4, 6, 8
    table "b"  rows 0 to 3     matrix rows 5 to 8     server 1:  rows 1, 3, 5, 7

Ids are often sorted by frequency. With rows in turn, each server gets about the same number of reads; with
contiguous parts on two servers, 84% of the reads of randomly drawn clicks would go to the first one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from strategies.servers.layout import Layout
from towers.layers.table_rows import TableRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLayout:
    """Tables of one width.

    Attributes:
      heights: number of rows of each table, by canonical name, in the matrix's order.
      width: number of elements of a row.
      decays: whether weight decay applies to them.
      num_servers: number of servers.
    """

    heights: Mapping[str, int]
    width: int
    decays: bool
    num_servers: int

    @property
    def height(self) -> int:
        """Number of rows of the matrix."""
        return sum(self.heights.values())

    @property
    def name(self) -> str:
        """A name for the matrix, different for each matrix of a run."""
        return f"tables_of_width_{self.width}" + ("" if self.decays else "_without_decay")

    @property
    def begins(self) -> list[int]:
        """The matrix row at which each table begins, and the matrix's height."""
        return [0, *np.cumsum(list(self.heights.values()), dtype=np.int64).tolist()]

    def joined(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The matrix, from the values of all parameters."""
        return np.concatenate([values[name] for name in self.heights])

    def part(self, server: int) -> slice:
        """The matrix rows of a server."""
        return slice(server, None, self.num_servers)

    def dealt_range(self, server: int, begin: int, end: int) -> tuple[int, int, slice]:
        """A server's share of the matrix rows `begin` to `end`: its own rows' begin and end, and a slice.

        The slice selects the server's rows from the rows [0, end - begin).
        """
        first, last = (-((server - row) // self.num_servers) for row in (begin, end))
        return first, last, slice(first * self.num_servers + server - begin, None, self.num_servers)

    def dealt(self, matrix: np.ndarray) -> list[np.ndarray]:
        """The rows of each server, padded with zeros to equal numbers."""
        length = -(-self.height // self.num_servers)
        parts = [matrix[self.part(server)] for server in range(self.num_servers)]
        return [np.pad(part, [(0, length - len(part)), (0, 0)]) for part in parts]

    def wanted(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The matrix rows of the ids of lookups: int64 [n], ascending, each once. For graphs.

        An id outside its table makes the graph fail with a text that begins with 'UserError: '.
        """
        rows = []
        for begin, (name, height) in zip(self.begins, self.heights.items(), strict=False):
            inside = tf.logical_and(ids[name] >= 0, ids[name] < height)
            outside = tf.concat([[0], tf.where(inside, tf.constant(0, tf.int64), ids[name])], 0)
            text = f"UserError: {name}: id {{}} is not in the table: it has {height} rows, ids 0 to {height - 1}"
            worst = tf.gather(outside, tf.argmax(tf.abs(outside)))
            check = tf.Assert(tf.reduce_all(inside), [tf.strings.format(text, worst)])
            with tf.control_dependencies([check]):
                rows.append(ids[name] + begin)
        return tf.unique(tf.sort(tf.concat(rows, 0)))[0]

    def by_table(self, rows: TableRows) -> dict[str, TableRows]:
        """The rows of the matrix as rows of each table, by name. For graphs."""
        begins = self.begins
        cuts = tf.searchsorted(rows.ids, tf.constant(begins, tf.int64))
        return {
            name: TableRows(
                rows.ids[cuts[index] : cuts[index + 1]] - begins[index], rows.values[cuts[index] : cuts[index + 1]]
            )
            for index, name in enumerate(self.heights)
        }

    def of_matrix(self, gradients: Mapping[str, tf.IndexedSlices]) -> TableRows:
        """The rows of the matrix from rows of all tables, each at most once. For graphs."""
        ids = [
            tf.cast(gradients[name].indices, tf.int64) + begin
            for begin, name in zip(self.begins, self.heights, strict=False)
        ]
        return TableRows(tf.concat(ids, 0), tf.concat([gradients[name].values for name in self.heights], 0))


def of_server(rows: np.ndarray, server: int, num_servers: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of some matrix rows are on a server, bool [n], and their ids there, int64."""
    here = rows % num_servers == server
    return here, rows[here] // num_servers


class Stored(NamedTuple):
    """Values of all parameters in the servers' layout.

    Attributes:
      vector: [n], the parameters that are not tables.
      tables: one matrix for each `TableLayout`.
    """

    vector: np.ndarray
    tables: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """Where each parameter is on the servers.

    Attributes:
      names: canonical names of all parameters, in the model's order.
      vector: the parameters that are not tables.
      tables: the matrices of tables.
    """

    names: Sequence[str]
    vector: Layout
    tables: Sequence[TableLayout]

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        tables: Mapping[str, int],
        *,
        decays: Callable[[str, tf.TensorShape], bool],
        num_servers: int,
    ) -> "ParameterLayout":
        """Args:
        shapes: shapes of all parameters, by canonical name, in the model's order.
        tables: the parameters that workers pull by rows, and their heights.
        decays: whether weight decay applies to a parameter.
        num_servers: number of servers.
        """
        kinds: dict[tuple[int, bool], dict[str, int]] = {}
        for name, height in tables.items():
            decayed = bool(decays(name, tf.TensorShape(shapes[name])))
            kinds.setdefault((shapes[name][1], decayed), {})[name] = height
        return cls(
            names=list(shapes),
            vector=Layout(
                shapes={name: shape for name, shape in shapes.items() if name not in tables},
                num_servers=num_servers,
            ),
            tables=[
                TableLayout(heights=heights, width=width, decays=decayed, num_servers=num_servers)
                for (width, decayed), heights in kinds.items()
            ],
        )

    def table_of(self, name: str) -> tuple[int, int] | None:
        """Index of the matrix that a parameter is in, and its first row there; None if it is in the vector."""
        for index, table in enumerate(self.tables):
            if name in table.heights:
                return index, table.begins[list(table.heights).index(name)]
        return None

    def begin_of(self, name: str) -> int:
        """The position in the vector at which a parameter begins."""
        return self.vector.offsets[list(self.vector.shapes).index(name)]

    def stored(self, values: Mapping[str, np.ndarray]) -> Stored:
        """The values in the servers' layout, from values by name."""
        found = [values[name] for name in self.vector.shapes]
        vector = self.vector.joined(found) if found else np.zeros(0, values[self.names[0]].dtype)
        return Stored(vector, [table.joined(values) for table in self.tables])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters by name, in the model's order."""
        of_tables = {
            name: (height, table.width) for table in self.tables for name, height in table.heights.items()
        }
        found = {**self.vector.shapes, **of_tables}
        return {name: tuple(found[name]) for name in self.names}

    @property
    def num_tables(self) -> int:
        return sum(len(table.heights) for table in self.tables)
