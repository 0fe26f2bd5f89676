"""Tables on servers: every row on one server, dealt out in turn; ids and gradients find their rows."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from strategies.servers.tables import ParameterLayout, TableLayout
from towers.updates.rules import everything, matrices_only


def layout(num_servers: int, *heights: int) -> TableLayout:
    named = {f"table_{index}": height for index, height in enumerate(heights)}
    return TableLayout(heights=named, width=2, decays=True, num_servers=num_servers)


layouts = st.builds(layout, st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))


@given(layouts)
def test_all_rows_are_on_the_servers(layout):
    matrix = np.arange(2 * layout.height).reshape(layout.height, 2)
    dealt = layout.dealt(matrix)
    assert len({part.shape for part in dealt}) == 1, "the servers hold equal numbers of rows"
    for row in range(layout.height):
        np.testing.assert_array_equal(dealt[row % layout.num_servers][row // layout.num_servers], matrix[row])


def test_the_most_frequent_ids_are_on_all_servers():
    """Ids by a power law, as `--task=clicks` draws them."""
    table = layout(2, 1000)
    ids = np.minimum(np.random.default_rng(0).zipf(1.3, 10_000) - 1, 999)
    share = np.mean(table.wanted({"table_0": tf.constant(ids)}).numpy() % 2 == 0)
    assert 0.4 < share < 0.6


def test_wanted_rows_and_their_tables():
    table = layout(2, 10, 5)
    rows = table.wanted({"table_0": tf.constant([7, 3, 7], tf.int64), "table_1": tf.constant([0, 4], tf.int64)})
    assert rows.numpy().tolist() == [3, 7, 10, 14]


@pytest.mark.parametrize("bad", [10, -3])
def test_an_id_outside_its_table(bad):
    table = layout(1, 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"UserError: table_0: id {bad} is not in the table"):
        tf.function(table.wanted)({"table_0": tf.constant([1, bad], tf.int64)})


def test_each_parameter_is_where_the_layout_says():
    shapes = {"kernel": (3, 2), "words": (5, 2), "bias": (2,), "tags": (4, 2), "pairs": (3, 6)}
    tables = {name: shapes[name][0] for name in ("words", "tags", "pairs")}
    found = ParameterLayout.of(shapes, tables, decays=matrices_only, num_servers=2)
    assert [list(table.heights) for table in found.tables] == [["words", "tags"], ["pairs"]]
    values = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    stored = found.stored(values)
    assert len(stored.vector) == 8
    for name, value in values.items():
        if (in_table := found.table_of(name)) is not None:
            index, begin = in_table
            np.testing.assert_array_equal(stored.tables[index][begin : begin + len(value)], value)
        else:
            begin = found.begin_of(name)
            np.testing.assert_array_equal(stored.vector[begin : begin + value.size], value.ravel())


def test_a_model_of_tables_alone():
    found = ParameterLayout.of({"words": (5, 2)}, {"words": 5}, decays=everything, num_servers=3)
    stored = found.stored({"words": np.ones((5, 2), np.float32)})
    assert stored.vector.shape == (0,) and stored.vector.dtype == np.float32
    assert [table.shape for table in stored.tables] == [(5, 2)]
