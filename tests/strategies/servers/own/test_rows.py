"""Gradients of embeddings, cut for servers and rebuilt there, equal the dense gradient."""

import itertools
import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies.servers.layout import Layout, row_width
from strategies.servers.own.rows import Rows, SplitGradient

matrices = st.tuples(st.integers(1, 12), st.integers(1, 5))
shapes = st.lists(st.one_of(matrices, st.lists(st.integers(0, 5), max_size=3).map(tuple)), min_size=1, max_size=6)


@st.composite
def gradients(draw) -> tuple[Layout, SplitGradient, np.ndarray]:
    """A gradient of any model, with some of its matrices as rows, and the same gradient as a dense vector."""
    described = {f"p{index}": shape for index, shape in enumerate(draw(shapes))}
    layout = Layout(shapes=described, num_servers=draw(st.integers(1, 7)))
    vector = np.random.default_rng(draw(st.integers(0, 9))).normal(size=layout.length).astype(np.float32)
    dense, rows = [np.zeros(0, np.float32)], []
    for shape, (begin, end) in zip(described.values(), itertools.pairwise(layout.offsets), strict=True):
        values = vector[begin:end].reshape(shape)
        if len(shape) == 2 and row_width(shape) == shape[1] and draw(st.booleans()):
            touched = draw(st.lists(st.integers(0, shape[0] - 1), unique=True) if shape[0] else st.just([]))
            indices = np.array(touched, np.int64)
            values[np.setdiff1d(np.arange(shape[0]), indices)] = 0
            rows.append(Rows(begin, *shape, indices, values[indices]))
        else:
            dense.append(values.ravel())
    return layout, SplitGradient(np.concatenate(dense), rows), vector


def pieces(layout: Layout, gradient: SplitGradient) -> list[SplitGradient]:
    return [gradient.within(layout.piece(server)) for server in range(layout.num_servers)]


def sent(gradient: SplitGradient) -> SplitGradient:
    """The gradient as a server unpacks it."""
    extents, arrays = gradient.packed()
    return SplitGradient.unpacked(json.loads(json.dumps(extents)), arrays)


@given(gradients())
def test_the_pieces_form_the_dense_gradient(drawn):
    layout, gradient, vector = drawn
    found = [sent(piece).whole(np.float32) for piece in pieces(layout, gradient)]
    assert [len(one) for one in found] == np.diff(layout.cuts).tolist()
    np.testing.assert_array_equal(np.concatenate(found), vector, strict=True)


@given(gradients())
def test_the_uncut_gradient_is_the_dense_one(drawn):
    _, gradient, vector = drawn
    np.testing.assert_array_equal(sent(gradient).whole(np.float32), vector, strict=True)


@given(gradients())
def test_each_number_is_sent_once_and_unused_rows_are_not_sent(drawn):
    layout, gradient, _ = drawn
    found = pieces(layout, gradient)
    assert sum(len(piece.dense) for piece in found) == len(gradient.dense)
    for before in gradient.rows:
        of_matrix = [
            rows.values.size
            for server, piece in enumerate(found)
            for rows in piece.rows
            if before.begin <= rows.begin + layout.cuts[server] < before.end
        ]
        assert sum(of_matrix) == before.values.size


def test_an_example_by_hand():
    """A bias of 2, an embedding of 4 rows of 3 that uses rows 3 and 0, a bias of 1; the cut is after row 0."""
    rows = Rows(2, 4, 3, np.array([3, 0]), np.array([[7, 8, 9], [1, 2, 3]], np.float32))
    gradient = SplitGradient(np.array([10, 20, 30], np.float32), [rows])
    first, second = gradient.within(slice(0, 5)), gradient.within(slice(5, 15))
    assert [(one.begin, one.height, one.indices.tolist()) for one in first.rows] == [(2, 1, [0])]
    assert first.whole(np.float32).tolist() == [10, 20, 1, 2, 3]
    assert [(one.begin, one.height, one.indices.tolist()) for one in second.rows] == [(0, 3, [2])]
    assert second.whole(np.float32).tolist() == [0, 0, 0, 0, 0, 0, 7, 8, 9, 30]


def test_a_server_rebuilds_the_gradient_in_its_own_precision():
    rows = Rows(1, 2, 2, np.array([1]), np.array([[0.5, 0.25]], np.float16))
    for gradient in (SplitGradient(np.ones(5, np.float16)), SplitGradient(np.ones(1, np.float16), [rows])):
        found = gradient.whole(np.dtype(np.float64))
        assert (found.dtype, len(found)) == (np.float64, 5)
    assert found.tolist() == [1, 0, 0, 0.5, 0.25]


def test_a_matrix_outside_a_piece_is_not_in_it():
    rows = Rows(4, 2, 3, np.array([0]), np.ones((1, 3)))
    gradient = SplitGradient(np.ones(8), [rows])
    assert [len(gradient.within(piece).rows) for piece in (slice(0, 4), slice(4, 10), slice(10, 14))] == [0, 1, 0]
    assert math.prod(rows.values.shape) == 3
