"""The chief names workers that are lost or stand still, and counts each loss once."""

import contextlib
import socket
import time

from strategies.cluster import Member
from strategies.distribute.claims import Claims
from strategies.distribute.worker_watch import WorkerWatch
from tests.strategies.distribute.test_claims import step

PATIENCE = 0.05


@contextlib.contextmanager
def workers():
    """Context manager: two workers that listen, and a function by which the second one is lost."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
        yield [Member("worker", index, address) for index, address in enumerate(addresses)], second.close


def watched(members):
    claims = Claims()
    claims.begin("run", "process 1 on a", 0, 0, reported=["loss"], stops_if_bad=True, num_workers=2)
    watch = WorkerWatch(members, PATIENCE, open_steps=claims.open_steps, count_lost=claims.lost)
    return claims, watch


def failures(claims):
    return {name: figures["failures"] for name, figures in claims.report()["workers"].items()}


def test_a_worker_that_stands_still_is_named_and_its_step_is_late(caplog):
    with workers() as (members, _):
        claims, watch = watched(members)
        found = []
        assert step(claims, 0, since=0)
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            step(claims, claims.done + 1, since=0)
            found = watch.late_steps(claims.done + 2, at_once=2)
        assert found[:1] == [1]
        assert "worker:1 gave no gradient within worker_timeout_seconds=0.05 at step 1: " in caplog.text
        assert failures(claims) == {"worker:0": 0, "worker:1": 1}


def test_a_worker_that_is_lost_is_named_and_counted_once(caplog):
    with workers() as (members, lose_second):
        claims, watch = watched(members)
        assert watch.absent(0) == []
        lose_second()
        assert watch.absent(3) == watch.absent(4) == [1]
        assert caplog.messages == ["worker:1 was lost at step 3: other workers compute its steps"]
        assert failures(claims) == {"worker:1": 1}
