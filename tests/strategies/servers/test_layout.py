"""The parameters as one vector: cut into pieces of nearly the same size, between rows, nothing lost."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.networks.alexnet import alexnet
from models.networks.vgg import vgg16
from strategies.servers.layout import Layout, row_width

shapes = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=8)


def layout(of_shapes, num_servers: int) -> Layout:
    return Layout(shapes={f"p{n}": shape for n, shape in enumerate(of_shapes)}, num_servers=num_servers)


layouts = st.builds(layout, shapes, st.integers(1, 9))


@pytest.fixture(scope="module")
def parameters():
    """The parameters of two networks, by the network's name; AlexNet's largest matrix is half of it."""
    return {make.__name__: make().trainable_variables for make in (alexnet, vgg16)}


@pytest.mark.parametrize("num_servers", range(1, 9))
@pytest.mark.parametrize("network", ["alexnet", "vgg16"])
def test_the_fullest_server_of_a_network(parameters, network, num_servers):
    shapes = {variable.path: tuple(variable.shape) for variable in parameters[network]}
    found = Layout(shapes=shapes, num_servers=num_servers)
    sizes = np.diff(found.cuts)
    assert len(sizes) == num_servers
    assert sizes.sum() == sum(math.prod(variable.shape) for variable in parameters[network])
    assert sizes.max() <= 1.1 * sizes.mean()


class TestCuts:
    @given(layouts)
    def test_every_element_is_in_one_piece(self, layout):
        pieces = [layout.piece(server) for server in range(layout.num_servers)]
        found = [position for piece in pieces for position in range(piece.start, piece.stop)]
        assert found == list(range(layout.length))

    @given(layouts)
    def test_no_row_is_divided(self, layout):
        for cut in layout.cuts:
            for begin, shape in zip(layout.offsets, layout.shapes.values(), strict=False):
                if begin <= cut < begin + math.prod(shape) and len(shape) > 1:
                    assert (cut - begin) % math.prod(shape[1:]) == 0

    @given(layouts)
    def test_each_cut_lies_within_half_a_row_of_equal_pieces(self, layout):
        widest = max(row_width(shape) for shape in layout.shapes.values())
        for server, cut in enumerate(layout.cuts):
            assert abs(cut - layout.length * server / layout.num_servers) <= widest / 2

    @given(layouts)
    def test_each_cut_is_an_int_that_a_message_can_hold(self, layout):
        assert {type(cut) for cut in layout.cuts} == {int}

    def test_an_example_by_hand(self):
        """Thirds of 30 are at 10 and 20; the ends of rows next to them are 9 and 21."""
        found = layout([(4, 3), (3,), (5, 3)], num_servers=3)
        assert found.offsets == [0, 12, 15, 30]
        assert found.cuts == [0, 9, 21, 30]

    def test_a_model_of_tables_alone_has_empty_pieces(self):
        assert Layout(shapes={}, num_servers=3).cuts == [0, 0, 0, 0]

    def test_a_very_long_row_is_divided(self):
        found = layout([(2, 100_000)], num_servers=4)
        assert found.cuts == [0, 50_000, 100_000, 150_000, 200_000]


@given(layouts)
def test_a_vector_has_each_value_at_its_offset(layout):
    values = [
        np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + index
        for index, shape in enumerate(layout.shapes.values())
    ]
    vector = layout.joined(values)
    assert vector.shape == (layout.length,)
    for value, (begin, end) in zip(values, itertools.pairwise(layout.offsets), strict=True):
        np.testing.assert_array_equal(vector[begin:end], value.ravel(), strict=True)
