"""Which process caused a failure, what the launcher's exit code is, and whether a restart may succeed."""

import signal

import pytest

from launch.supervision.outcome import Outcome, described, failure_report
from launch.supervision.processes import Exit

TERM, KILL = signal.SIGTERM, signal.SIGKILL
FIRST = Exit(name="worker:0", code=0)


def exited(code, **how) -> Exit:
    return Exit(name="worker:1", code=code, **how)


LOST, FAILED = Exit(name="worker:2", code=5), Exit(name="worker:0", code=1)
# By case: the exits in order; whether a signal was forwarded; the cause; the exit code; whether to restart.
CASES = {
    "success": ([FIRST, exited(0)], False, None, 0, False),
    "interrupted after a signal": ([FIRST, exited(75)], True, None, 75, False),
    "success after a signal": ([FIRST, exited(0)], True, None, 75, False),
    "interrupted from elsewhere": ([FIRST, exited(75)], False, None, 75, False),
    "a failure": ([FIRST, exited(1)], False, "worker:1", 1, True),
    "a failure after its peer's": ([LOST, exited(1)], False, "worker:1", 1, True),
    "a signal": ([LOST, exited(-11)], False, "worker:1", 139, True),
    "two failures": ([Exit(name="worker:0", code=7), exited(1)], False, "worker:0", 7, True),
    "only a lost peer": ([FIRST, LOST], False, "worker:2", 5, True),
    "one process alone was told to stop": ([exited(75), FIRST, LOST], False, None, 75, False),
    "one was told to stop, another failed": ([LOST, exited(75), FAILED], False, "worker:0", 1, True),
    "a lost peer after a signal": ([exited(75), LOST], True, "worker:2", 5, False),
    "a user's error": ([exited(2)], False, "worker:1", 2, False),
    "numbers that differ": ([exited(3)], False, "worker:1", 3, False),
    "not finite": ([exited(4)], False, "worker:1", 4, False),
    "ended by the launcher": ([FIRST, exited(-15, sent=TERM, was_asked=True)], False, None, 0, False),
    "ended by the launcher, with a code": ([FIRST, exited(1, sent=TERM, was_asked=True)], False, None, 0, False),
    "killed after it ignored SIGTERM": ([FIRST, exited(-9, sent=KILL, was_asked=True)], False, None, 0, False),
    "a signal while it starts": ([exited(-15, was_interrupted=True), exited(75)], True, None, 75, False),
    "not ended after a signal": ([FIRST, exited(-9, sent=KILL)], True, "worker:1", 137, False),
    "stopped": ([LOST, exited(-9, sent=KILL, was_asked=True, was_stopped=True)], False, "worker:1", 137, True),
    "a failure and a stopped process": (
        [Exit(name="worker:0", code=1), exited(-9, sent=KILL, was_asked=True, was_stopped=True)],
        False,
        "worker:0",
        1,
        True,
    ),
}


@pytest.mark.parametrize("exits, interrupted, cause, code, restart", CASES.values(), ids=CASES)
def test_outcome(exits, interrupted, cause, code, restart):
    outcome = Outcome(exits=tuple(exits), interrupted=interrupted)
    assert (outcome.cause.name if outcome.cause else None) == cause
    assert outcome.code == code
    assert outcome.may_be_restarted == restart


@pytest.mark.parametrize(
    "tail, expected",
    [
        (["the reason"], ["worker:0 failed: exit code 1; last lines of w.log:", "    the reason"]),
        ([], ["worker:0 failed: exit code 1; it printed nothing to w.log"]),
    ],
    ids=["said why", "said nothing"],
)
def test_the_report_of_a_failure(tail, expected):
    report = failure_report(Outcome(exits=(FAILED,), interrupted=False), {"worker:0": tail}, {"worker:0": "w.log"})
    assert report == expected


CHIEF, SERVER = Exit(name="chief:0", code=0), Exit(name="ps:0", code=-15, sent=TERM, was_asked=True)
STOPPED = exited(-9, sent=KILL, was_asked=True, was_stopped=True)
AWAITED = {
    "ps:0": ("chief:0", "worker:0", "worker:1"),
    **dict.fromkeys(("worker:0", "worker:1"), ("chief:0",)),
}
# Cases of a cluster with servers: the exits in order; the cause; the losses; the exit code.
WITH_SERVERS = {
    "a killed worker": ([exited(-9), CHIEF, FIRST, SERVER], None, ["worker:1"], 0),
    "a stopped worker": ([CHIEF, FIRST, STOPPED, SERVER], None, ["worker:1"], 0),
    "a worker's error": ([exited(1), CHIEF, FIRST, SERVER], None, ["worker:1"], 0),
    "an interrupted run": ([exited(-9), Exit(name="chief:0", code=75), FIRST, SERVER], None, ["worker:1"], 75),
    "a chief that gave up": ([exited(-9), Exit(name="chief:0", code=5), SERVER], "worker:1", [], 137),
    "a chief that was ended": (
        [exited(-9), Exit(name="chief:0", code=0, sent=TERM, was_asked=True)],
        "worker:1",
        [],
        137,
    ),
    "a killed chief": ([Exit(name="chief:0", code=-9), exited(5), LOST], "chief:0", [], 137),
    "a chief that alone was told to stop": (
        [Exit(name="chief:0", code=75), exited(5), Exit(name="ps:0", code=5)],
        None,
        [],
        75,
    ),
}


@pytest.mark.parametrize("exits, cause, lost, code", WITH_SERVERS.values(), ids=WITH_SERVERS)
def test_a_worker_of_servers_may_be_lost(exits, cause, lost, code):
    outcome = Outcome(exits=tuple(exits), interrupted=False, awaited=AWAITED)
    assert (outcome.cause.name if outcome.cause else None) == cause
    assert [each.name for each in outcome.lost] == lost
    assert outcome.code == code


LOST_EVALUATOR = Exit(name="evaluator:0", code=-9)
# Cases of a ring with an evaluator: the exits in order; the cause; the losses; the exit code.
WITH_EVALUATOR = {
    "it is killed": ([LOST_EVALUATOR, FIRST, exited(0)], None, ["evaluator:0"], 0),
    "it is killed, later a worker fails": ([LOST_EVALUATOR, FIRST, exited(2)], "worker:1", [], 2),
    "it fails": ([Exit(name="evaluator:0", code=2), FIRST, exited(0)], "evaluator:0", [], 2),
}


@pytest.mark.parametrize("exits, cause, lost, code", WITH_EVALUATOR.values(), ids=WITH_EVALUATOR)
def test_an_evaluator_may_be_lost(exits, cause, lost, code):
    followed = {"evaluator:0": ("worker:0", "worker:1")}
    outcome = Outcome(exits=tuple(exits), interrupted=False, followed=followed)
    assert (outcome.cause.name if outcome.cause else None) == cause
    assert [each.name for each in outcome.lost] == lost
    assert outcome.code == code


@pytest.mark.parametrize(
    "found, text",
    [
        (exited(1), "exit code 1"),
        (exited(5), "exit code 5 (a peer was lost)"),
        (exited(-6), "killed by SIGABRT"),
        (exited(-15, sent=TERM, was_asked=True), "killed by SIGTERM, after SIGTERM from the launcher"),
        (exited(-9, sent=KILL, was_stopped=True), "stopped by a signal, hung until the launcher killed it"),
    ],
)
def test_described(found, text):
    assert described(found) == text
