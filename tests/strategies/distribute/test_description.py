"""How a process describes itself when the chief asks."""

import json
import threading
import time

from strategies.distribute.description import Answer
from tests.towers.user_errors import refused
from towers.errors import UserError

LIMIT_SECONDS = 20


def answered(answer: Answer) -> dict:
    """The first answer that is not empty."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := json.loads(answer.text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_it_is_computed_once_and_only_if_somebody_asks():
    calls = []
    answer = Answer(3, lambda: calls.append(1) or {"settings": 7})
    assert not calls
    assert answered(answer) == answered(answer) == {"settings": 7, "run": 3}
    assert calls == [1]


def test_it_keeps_nobody_waiting():
    may_end = threading.Event()
    answer = Answer(1, lambda: may_end.wait(LIMIT_SECONDS) and {"settings": 7})
    assert [answer.text() for _ in range(3)] == [b"{}"] * 3
    may_end.set()
    assert answered(answer) == {"settings": 7, "run": 1}


def test_an_error_goes_to_whoever_asks():
    def fails():
        raise UserError("the data can't be read")

    answer = Answer(1, fails)
    for _ in range(2):
        with refused("the data can't be read"):
            answered(answer)
