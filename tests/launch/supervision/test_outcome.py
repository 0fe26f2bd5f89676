"""Who is to blame, what the launcher's exit code is, and whether another start may help."""

import signal

import pytest

from launch.supervision.outcome import Outcome, described
from launch.supervision.processes import End

TERM, KILL = signal.SIGTERM, signal.SIGKILL
FIRST = End(name="worker:0", code=0)


def ended(code, **how) -> End:
    return End(name="worker:1", code=code, **how)


LOST = End(name="worker:2", code=5)
# What ended, in order; whether a signal was passed on; who is to blame; the exit code; whether to start again.
CASES = {
    "all well": ([FIRST, ended(0)], False, None, 0, False),
    "all well after a signal": ([FIRST, ended(75)], True, None, 75, False),
    "well, but after a signal": ([FIRST, ended(0)], True, None, 75, False),
    "interrupted from elsewhere": ([FIRST, ended(75)], False, None, 75, False),
    "a failure": ([FIRST, ended(1)], False, "worker:1", 1, True),
    "a failure after its peer's": ([LOST, ended(1)], False, "worker:1", 1, True),
    "a signal": ([LOST, ended(-11)], False, "worker:1", 139, True),
    "two failures": ([End(name="worker:0", code=7), ended(1)], False, "worker:0", 7, True),
    "only a lost peer": ([FIRST, LOST], False, "worker:2", 5, True),
    "a lost peer after a signal": ([ended(75), LOST], True, "worker:2", 5, False),
    "a user's error": ([ended(2)], False, "worker:1", 2, False),
    "numbers that differ": ([ended(3)], False, "worker:1", 3, False),
    "not finite": ([ended(4)], False, "worker:1", 4, False),
    "ended by the launcher": ([FIRST, ended(-15, sent=TERM, asked=True)], False, None, 0, False),
    "ended by the launcher, with a code": ([FIRST, ended(1, sent=TERM, asked=True)], False, None, 0, False),
    "killed, when asking did not help": ([FIRST, ended(-9, sent=KILL, asked=True)], False, None, 0, False),
    "not obeyed": ([FIRST, ended(-9, sent=KILL)], True, "worker:1", 137, False),
    "stood still": ([LOST, ended(-9, sent=KILL, asked=True, stood_still=True)], False, "worker:1", 137, True),
    "a failure beside one that stood still": (
        [End(name="worker:0", code=1), ended(-9, sent=KILL, asked=True, stood_still=True)],
        False,
        "worker:0",
        1,
        True,
    ),
}


@pytest.mark.parametrize("ends, interrupted, blamed, code, again", CASES.values(), ids=CASES)
def test_outcome(ends, interrupted, blamed, code, again):
    outcome = Outcome(ends=tuple(ends), interrupted=interrupted)
    assert (outcome.cause.name if outcome.cause else None) == blamed
    assert outcome.code == code
    assert outcome.can_be_mended == again


@pytest.mark.parametrize(
    "end, text",
    [
        (ended(1), "exit code 1"),
        (ended(5), "exit code 5 (a peer was lost)"),
        (ended(-6), "killed by SIGABRT"),
        (ended(-15, sent=TERM, asked=True), "killed by SIGTERM, after SIGTERM from the launcher"),
    ],
)
def test_described(end, text):
    assert described(end) == text
