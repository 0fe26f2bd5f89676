"""Server 0's answers to requests of several processes that arrive at the same moment."""

import threading
import time

import numpy as np
import pytest

from strategies.servers.own import coordination
from strategies.servers.own.handlers import KEY
from tests.strategies.servers.at_once import LIMIT_SECONDS, TOO_LONG, Started
from tests.strategies.servers.lone_coordination import lone_coordination

FIGURES = {"examples": 8, "busy_seconds": 0.0, "input_seconds": 0.0, "sums": {}, "norm": 1.0}
SHORT_SECONDS = 0.2


def test_no_step_begins_after_a_bad_one_that_ends_while_the_chief_allows_more():
    found = lone_coordination()
    found.start({"step": 0}, [np.zeros(0), np.zeros(0, bool)])
    found.run_to({"until": 5, "wanted": 0}, ())
    begin = {"worker": 0, "stop_asked": False, "settled": 0}
    granted, _ = found.begin(begin, ())
    bad = {"worker": 0, "key": KEY, "rate": 0.1, "rows": [], "aware": False, "finite": False, "weight": 8.0}
    bad |= {name: granted[name] for name in ("step", "done", "lease")} | {"figures": FIGURES}
    allow, ends, has_ended = found._steps.admission.run_to, [], threading.Event()

    def finish():
        found.finish(bad, [np.zeros(0), np.zeros(2, np.float32)])
        has_ended.set()

    def run_to(target):
        if target:
            ends.append(Started(finish))
            has_ended.wait(SHORT_SECONDS)
        allow(target)

    found._steps.admission.run_to = run_to
    found.run_to({"until": 5, "wanted": 0}, ())
    ends[0].result()
    assert has_ended.wait(LIMIT_SECONDS)
    assert found.run_to({"until": 5, "wanted": 0}, ())[0]["bad_step"] == 0
    assert found._steps.admission.begin(1, 0) is None


@pytest.mark.parametrize("staleness", ["async", "sync"])
def test_a_worker_that_waits_while_the_chief_restores_asks_again(monkeypatch, staleness):
    monkeypatch.setattr(coordination, "PATIENCE_SECONDS", TOO_LONG)
    found = lone_coordination(staleness=staleness)
    values = [np.zeros(0), np.zeros(0, bool)]
    found.start({"step": 0}, values)
    waiting = Started(lambda: found.begin({"worker": 0, "stop_asked": False, "settled": 0}, ()))
    time.sleep(SHORT_SECONDS)
    assert waiting.is_running
    found.start({"step": 10}, values)
    assert waiting.result()[0] == {"again": True}
