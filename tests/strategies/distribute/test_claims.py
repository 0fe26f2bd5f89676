"""The table of steps on server 0: each step is applied at most once and counted once."""

import concurrent.futures

import pytest

from strategies.distribute.claims import Claims
from tests.towers.user_errors import refused

FIGURES = {
    "started": 1.0,
    "examples": 4,
    "busy_seconds": 0.5,
    "input_seconds": 0.25,
    "norm": 1.0,
    "finite": True,
    "stop_asked": False,
    "others": [8.0, 4.0],
}


def begun(*, first=0, stops_if_bad=True) -> Claims:
    claims = Claims()
    claims.begin("run", "process 1 on a", first=first, updates=first, reported=["loss"], stops_if_bad=stops_if_bad)
    return claims


def updates_of(claims: Claims) -> int:
    """The number of updates so far, as the plan tells it to a step that begins now."""
    return claims.plan(0, 0)[0]


def step(claims: Claims, number: int, *, since: int, run="run", **figures) -> bool:
    """Claims and counts a step; returns whether its update is to be applied."""
    figures = {**FIGURES, **figures}
    applied, _ = claims.claim(run, number, since, figures["finite"])
    claims.count(run, number, "worker:0", figures)
    return applied


def test_a_step_that_runs_twice_is_applied_and_counted_once():
    claims = begun()
    assert step(claims, 0, since=0)
    assert not step(claims, 0, since=0)
    assert claims.done == 1
    report = claims.report()
    assert (report["num_steps"], report["examples"], report["sums"]) == (1, 4, {"loss": [8.0, 4.0]})


def test_a_step_whose_worker_died_between_claim_and_count_is_counted_by_the_next_try():
    """Whether its update was applied is unknown, so it is not applied again."""
    claims = begun()
    assert step(claims, 0, since=0)
    assert claims.claim("run", 1, 0, True)[0]
    assert claims.done == 1
    assert not step(claims, 1, since=1)
    assert claims.done == 2
    # The staleness is that of the claimed update.
    assert dict(claims.report()["staleness"]) == {0: 1, 1: 1}


def test_a_step_whose_worker_died_between_claim_and_count_uses_one_batch_and_is_reported(caplog):
    claims = Claims()
    more = {"updates": 0, "reported": ["loss"], "stops_if_bad": True, "num_workers": 2}
    claims.begin("run", "process 1 on a", first=0, **more)
    assert claims.claim("run", 0, 0, True, worker=1)[0]
    assert claims.plan(0, 1) == [1, 1, 1, 0, 3], "the next try has a batch, and does not use it"
    assert not claims.claim("run", 0, 1, True, worker=0)[0]
    claims.count("run", 0, "worker:0", FIGURES)
    claims.count("run", 0, "worker:1", FIGURES)
    assert claims.totals() == {
        "done": 1,
        "totals": {"steps": 1, "examples": 4, "skipped": 0},
        "positions": [0, 3],
    }
    workers = claims.report()["workers"]
    assert (workers["worker:0"]["steps"], workers["worker:0"]["taken_over"]) == (1, 1)
    assert [message.partition(":")[0] for message in caplog.messages] == ["step 0"]
    assert "some servers may miss" in caplog.text


def test_staleness_is_the_number_of_updates_between_pull_and_claim():
    claims = begun()
    since = updates_of(claims)
    assert [claims.claim("run", number, since, True) for number in range(3)] == [(True, 0), (True, 1), (True, 2)]
    for number in range(3):
        claims.count("run", number, "worker:0", FIGURES)
    assert dict(claims.report()["staleness"]) == {0: 1, 1: 1, 2: 1}


def test_rows_of_tables_are_counted_by_server():
    claims = begun()
    for number in range(2):
        step(claims, number, since=updates_of(claims), others=[32.0, 48.0, 8.0, 4.0])
    report = claims.report()
    assert dict(report["row_elements"]) == {0: 64, 1: 96}
    assert report["sums"] == {"loss": [16.0, 8.0]}


def test_steps_are_counted_in_any_order():
    claims = begun(first=5)
    for number in (7, 6, 9, 5, 8):
        assert step(claims, number, since=updates_of(claims))
    assert claims.done == 10
    totals = {"steps": 5, "examples": 20, "skipped": 0}
    assert claims.totals() == {"done": 10, "totals": totals, "positions": [10]}


def test_steps_of_another_run_are_refused():
    """Another chief's steps may still be running."""
    claims = begun()
    assert not step(claims, 0, since=0, run="earlier run")
    assert claims.done == 0


def test_a_second_chief_is_refused_by_name_and_changes_nothing():
    claims = begun()
    assert step(claims, 0, since=0)
    with refused("ps:0 serves another chief already (process 1 on a)", "servers of its own"):
        claims.begin("other run", "process 2 on b", first=0, updates=0, reported=[], stops_if_bad=True)
    assert step(claims, 1, since=1)
    assert claims.done == 2
    claims.begin("run", "process 1 on a", first=1, updates=1, reported=["loss"], stops_if_bad=True)
    assert claims.done == 1, "the same chief restores a checkpoint"


def test_a_step_that_is_not_finite_ends_the_run_unapplied():
    claims = begun()
    assert not step(claims, 0, since=0, finite=False)
    assert claims.progress()["bad_step"] == 0
    assert not step(claims, 1, since=0)
    assert claims.done == 1


def test_steps_that_are_not_finite_are_skipped_on_request():
    claims = begun(stops_if_bad=False)
    assert not step(claims, 0, since=0, finite=False)
    assert step(claims, 1, since=0)
    assert claims.progress() == {"done": 2, "bad_step": None, "stop_asked": False}
    assert claims.totals()["totals"] == {"steps": 2, "examples": 8, "skipped": 1}


def test_a_worker_that_started_again_was_lost():
    claims = begun()
    for number, started in enumerate([1.0, 1.0, 2.0, 2.0, 3.0]):
        step(claims, number, since=updates_of(claims), started=started)
    assert claims.report()["workers"]["worker:0"]["failures"] == 2


def test_a_worker_that_the_chief_misses_is_counted_as_lost_once():
    claims = begun()
    step(claims, 0, since=0, started=1.0)
    assert claims.lost(["worker:0", "worker:1"]) == ["worker:0", "worker:1"]
    assert claims.lost(["worker:0", "worker:1"]) == []
    step(claims, 1, since=1, started=2.0)
    assert {name: own["failures"] for name, own in claims.report()["workers"].items()} == {
        "worker:0": 1,
        "worker:1": 1,
    }
    assert claims.lost(["worker:0"]) == ["worker:0"], "it was back and is lost again"


def test_open_steps_are_those_that_are_not_counted():
    claims = begun(first=2)
    for number in (2, 4, 5):
        step(claims, number, since=updates_of(claims))
    found = claims.open_steps(7)
    assert found["open"] == [3, 6]
    assert set(found["quiet_seconds"]) == {"worker:0"}


def test_each_worker_is_told_its_next_batch():
    claims = Claims()
    more = {"updates": 4, "reported": ["loss"], "stops_if_bad": True, "num_workers": 2}
    claims.begin("run", "process 1 on a", first=4, positions=[8, 1], **more)
    assert claims.plan(4, 3) == [4, 1, 0, 8, 1]
    assert claims.claim("run", 4, 4, True, worker=1)[0]
    assert claims.plan(5, 1) == [5, 1, 0, 8, 3], "a worker that starts again does not repeat its batch"
    assert not claims.claim("run", 4, 4, True, worker=0)[0]
    assert claims.plan(4, 3) == [5, 1, 1, 8, 3], "a step that was claimed before uses no batch"
    assert claims.totals()["positions"] == [8, 3]


@pytest.mark.timeout(60)
def test_claims_of_many_threads():
    """Every step is claimed by four threads at once; one of them may apply it."""
    claims, num_steps = begun(), 200
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tries = [pool.submit(step, claims, number, since=0) for number in range(num_steps) for _ in range(4)]
        applied = [one.result() for one in tries]
    assert sum(applied) == num_steps == claims.done
    assert claims.report()["num_steps"] == num_steps
