"""Figures of server 0: sums restart with each report; totals and the workers' figures continue."""

import json

from strategies.servers.tally import Tally
from tests.strategies.servers.at_once import at_once

FIGURES = {"examples": 8, "busy_seconds": 0.5, "input_seconds": 0.25}


def test_without_steps():
    assert Tally().take() == {
        "num_steps": 0,
        "examples": 0,
        "skipped": 0,
        "sums": {},
        "norm": None,
        "staleness": [],
        "workers": {},
    }


def test_steps_are_added_up():
    tally = Tally()
    tally.add_part("worker:1", FIGURES, 3)
    tally.add_step({"loss": (6.0, 8.0), "accuracy": (3.0, 8.0)}, 2.0, finite=True)
    tally.add_part("worker:1", FIGURES, 0)
    tally.add_step({"loss": (2.0, 8.0), "accuracy": (5.0, 8.0)}, 1.5, finite=True)
    taken = tally.take()
    assert (taken["num_steps"], taken["examples"], taken["skipped"], taken["norm"]) == (2, 16, 0, 1.5)
    assert taken["sums"] == {"loss": [8, 16], "accuracy": [8, 16]}
    assert taken["staleness"] == [(0, 1), (3, 1)]


def test_a_step_that_is_not_finite_is_in_no_sum():
    tally = Tally()
    tally.add_part("worker:0", FIGURES)
    tally.add_step({"loss": (float("nan"), 8.0)}, float("nan"), finite=False)
    taken = tally.take()
    assert (taken["num_steps"], taken["skipped"], taken["sums"], taken["norm"]) == (1, 1, {}, None)
    assert taken["staleness"] == []
    assert tally.totals() == {"steps": 1, "examples": 8, "skipped": 1}


def test_sums_restart_and_the_rest_continues():
    tally = Tally()
    for staleness in (4, 1):
        tally.add_part("worker:0", FIGURES, staleness)
        tally.add_step({"loss": (6.0, 8.0)}, 2.0, finite=True)
        tally.add_failure("worker:2")
        taken = tally.take()
    assert (taken["num_steps"], taken["examples"], taken["sums"]) == (1, 8, {"loss": [6.0, 8.0]})
    assert taken["staleness"] == [(1, 1)]
    assert tally.totals() == {"steps": 2, "examples": 16, "skipped": 0}
    worked = {"steps": 2, "busy_seconds": 1.0, "input_seconds": 0.5, "staleness_sum": 5, "staleness_max": 4}
    worked["taken_over"] = 0
    assert taken["workers"] == {
        "worker:0": {**worked, "failures": 0},
        "worker:2": {**dict.fromkeys(worked, 0), "failures": 2},
    }
    json.dumps(taken)


def test_gradients_for_another_worker():
    tally = Tally()
    for is_taken_over in (False, True, True):
        tally.add_part("worker:0", FIGURES, is_taken_over=is_taken_over)
    found = tally.take()["workers"]["worker:0"]
    assert (found["steps"], found["taken_over"], found["failures"]) == (3, 2, 0)


def test_counting_from_several_threads():
    tally = Tally()

    def count():
        for _ in range(500):
            tally.add_part("worker:0", FIGURES, 1)
            tally.add_step({"loss": (1.0, 2.0)}, 1.0, finite=True)

    at_once(*[count] * 4)
    assert tally.totals() == {"steps": 2000, "examples": 16000, "skipped": 0}
    taken = tally.take()
    assert (taken["num_steps"], taken["examples"], taken["staleness"]) == (2000, 16000, [(1, 2000)])
    assert taken["sums"] == {"loss": [2000, 4000]}
