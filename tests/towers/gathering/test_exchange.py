"""The order of calls between processes, as data."""

from towers.gathering.exchange import Call, Gradient, calls_of
from towers.gathering.units import Use, units_of

# Three layers of 100 bytes: forward at levels 0, 2, 4, backward at 6, 7; gradients of layers 2, 1, 0 at 5, 7, 8.
UNITS = [
    [Use(0, 0, "forward_0", 0)],
    [Use(2, 1, "forward_1", 0)],
    [Use(4, 2, "forward_2", 0)],
    [Use(6, 2, "backward_2", 0)],
    [Use(7, 1, "backward_1", 0)],
]
GRADIENTS = [Gradient(8, 0), Gradient(7, 1), Gradient(5, 2)]
SIZES = [100, 100, 100]


def test_gradients_leave_between_the_gathers_as_they_become_ready():
    assert calls_of(UNITS, GRADIENTS, SIZES, bytes_per_call=100) == [
        Call(0, (0,)),
        Call(1, (1,)),
        Call(2, (2,)),  # after level 0
        Call(3, (2,)),  # after level 2
        Call(4, (1,)),  # after level 4
        Call(None, (2,)),
        Call(None, (1,)),
        Call(None, (0,)),
    ]


def test_small_gradients_leave_together():
    assert calls_of(UNITS, GRADIENTS, SIZES, bytes_per_call=250)[-2:] == [Call(None, (2, 1)), Call(None, (0,))]


def test_a_gather_of_the_same_level_goes_first():
    """The gather waits for no gradient of its level, but gradients may depend on the gather."""
    calls = calls_of(UNITS, [Gradient(4, 2)], SIZES, bytes_per_call=100)
    assert calls.index(Call(4, (1,))) < calls.index(Call(None, (2,)))


def test_without_gradients_units_alone_are_gathered():
    assert [call.unit for call in calls_of(UNITS[:3], [], SIZES, bytes_per_call=100)] == [0, 1, 2]


def test_small_parameters_are_gathered_together():
    uses = [use for unit in UNITS for use in unit]
    assert [len(unit) for unit in units_of(uses, SIZES)] == [1, 1, 2, 1], "backward 2 follows forward 2"
    assert [len(unit) for unit in units_of(uses, SIZES, small_bytes=200)] == [2, 3]


def test_all_parameters_of_an_operation_are_gathered_together():
    """A gather waits for the unit before the last, which must not contain the operation that needs the gather."""
    loop = [Use(1, parameter, "loop", parameter) for parameter in range(3)]
    uses = [Use(0, 0, "before", 0), *loop, Use(2, 1, "after", 0)]
    assert units_of(uses, SIZES) == [[uses[0]], loop, [uses[-1]]]
