"""Updates that wait for server 0's decision: applied once, in its order, or dropped."""

import pytest

from strategies.servers.own.steps.decisions import DecisionLog, Decisions
from strategies.servers.own.steps.staged_updates import StagedUpdates
from strategies.servers.wire import Refused


def staged(*leases: int) -> StagedUpdates:
    found = StagedUpdates()
    for lease in leases:
        found.stage(lease, lease)
    return found


def decisions(first: int, *leases: int, open_from: int = 0) -> Decisions:
    rates = [lease / 8 for lease in leases]
    return Decisions(first=first, leases=leases, rates=rates, open_from=open_from)


def settled(found: StagedUpdates, first: int, *leases: int, open_from: int = 0) -> list:
    """The updates that are applied."""
    applied = []
    found.settle(decisions(first, *leases, open_from=open_from), lambda *update: applied.append(update))
    assert all(rate == lease / 8 for lease, rate in applied)
    return [lease for lease, _ in applied]


def test_updates_are_applied_once_in_the_order_of_the_decisions():
    found = staged(1, 2, 3, 4)
    assert settled(found, 7, 3, 1) == [3, 1]
    assert settled(found, 7, 3) == [], "an earlier message that comes late"
    assert settled(found, 8, 1, 4) == [4]


def test_what_will_not_be_decided_is_dropped():
    found = staged(1, 2)
    assert settled(found, 0, 2, open_from=3) == [2]
    found.stage(1, 1)
    found.stage(3, 3)
    with pytest.raises(Refused, match="lease 1"):
        settled(found, 1, 1)
    assert settled(found, 1, 3) == [3]


def test_an_update_that_fails_is_applied_later():
    found = staged(1, 2)

    def fail(gradient, rate):
        raise OSError

    with pytest.raises(OSError):
        found.settle(decisions(0, 1), fail)
    assert settled(found, 0, 1, 2) == [1, 2]


def test_missing_decisions_are_refused():
    found = staged(1, 2)
    settled(found, 0, 1)
    with pytest.raises(Refused, match="decision 1 is missing"):
        settled(found, 2, 2)


def test_the_log_repeats_a_decision_until_it_is_settled():
    log = DecisionLog()
    for lease in (5, 3, 9):
        log.add(lease, lease / 8)
    assert log.decisions(10) == Decisions(first=0, leases=(5, 3, 9), rates=(5 / 8, 3 / 8, 9 / 8), open_from=10)
    log.settled(2)
    log.settled(1)
    assert log.decisions(10) == Decisions(first=2, leases=(9,), rates=(9 / 8,), open_from=10)
    assert log.decisions(10).end == 3
    log.restart()
    assert log.decisions(11) == Decisions(first=3, leases=(), rates=(), open_from=11)
