"""Calls of run_steps: none passes a step at which something is due, and the last one ends at the last step."""

from hypothesis import given
from hypothesis import strategies as st

from strategies.training.cadence import CALL_SECONDS, MOST_STEPS_A_CALL, Cadence, due, steps_of_a_call

steps = st.integers(1, 200)
cadences = st.builds(
    Cadence,
    last_step=steps,
    periods=st.lists(steps, max_size=4).map(tuple),
    boundaries=st.lists(st.integers(0, 250), max_size=4).map(tuple),
)


def calls_of(cadence: Cadence, first: int, wanted) -> list[tuple[int, int]]:
    """(begin, end) of the calls from step `first` to the last; `wanted` iterates over their wanted lengths."""
    calls, step = [], first
    while step < cadence.last_step:
        length = cadence.call_length(step, next(wanted))
        assert length > 0, "a call that does nothing never ends"
        calls.append((step, step + length))
        step += length
    return calls


@given(cadence=cadences, first=st.integers(0, 199), data=st.data())
def test_no_call_passes_a_step_at_which_something_is_due(cadence, first, data):
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    calls = calls_of(cadence, first, (lengths[index % len(lengths)] for index in range(10**6)))
    assert not calls or (calls[0][0], calls[-1][1]) == (first, cadence.last_step)
    for begin, end in calls:
        for passed in range(begin + 1, end):
            assert not due(begin, passed, *cadence.periods)
            assert passed not in cadence.boundaries


@given(cadence=cadences, step=st.integers(0, 199), wanted=st.integers(1, 50))
def test_a_call_is_no_longer_than_wanted(cadence, step, wanted):
    if step < cadence.last_step:
        assert 1 <= cadence.call_length(step, wanted) <= wanted


def test_the_example_of_the_docstring():
    cadence = Cadence(last_step=10, periods=(4,), boundaries=(7,))
    calls = calls_of(cadence, 0, iter([100] * 10))
    assert calls == [(0, 4), (4, 7), (7, 8), (8, 10)]


@given(st.floats(0, 1e6))
def test_a_call_takes_at_most_call_seconds(seconds):
    count = steps_of_a_call(seconds)
    assert 1 <= count <= MOST_STEPS_A_CALL
    assert count == 1 or count * seconds <= CALL_SECONDS * 1.001


def test_due_at_multiples_of_a_period():
    assert due(5, 6, 4, 3)
    assert not due(6, 7, 4, 3)
    assert due(5, 6, None, 3)
    assert not due(5, 6, None)
    assert not due(5, 6)


def test_due_where_a_multiple_was_passed():
    assert due(5, 7, 4, 3)
    assert due(0, 100, 7)
    assert not due(6, 8, 3)
