"""How many steps a worker of TensorFlow's engine computes for each call from the chief."""

import types

import pytest

from strategies.distribute.coordinated_carrier import CoordinatedCarrier


def scheduled(until: int, *, has_collectives: bool = False, rate: float = 0.0, **options) -> list[int]:
    """The number of steps in each closure, if steps 0 .. until - 1 may be scheduled at once."""
    connection = types.SimpleNamespace(workers=range(2))
    graph = types.SimpleNamespace(has_collectives=has_collectives)
    named = {"schedule": float, "rule": None, "free_bytes": {}, "stops_if_bad": True, "lazily": False}
    carrier = CoordinatedCarrier(connection, graph, None, **named, **options)
    carrier._rate = rate
    found: list[range] = []
    carrier._schedule_closure = found.append
    carrier._fill(until)
    assert [step for steps in found for step in steps] == list(range(sum(map(len, found))))
    return [len(steps) for steps in found]


@pytest.mark.parametrize(
    "until, options, expected",
    [
        (10, {"steps_per_closure": 4}, [4, 4, 1, 1]),
        (10, {"steps_per_closure": 1, "rate": 1000.0}, [1] * 10),
        (10, {}, [1] * 4),
        (10, {"rate": 1000.0}, [8, 1, 1]),
        (10, {"steps_per_closure": 4, "has_collectives": True}, [1] * 4),
    ],
    ids=["as asked", "one by one", "slow steps", "fast steps", "collectives"],
)
def test_steps_of_each_closure(until, options, expected):
    assert scheduled(until, **options) == expected
