"""Which process the supervisor ends or replaces, and when: real processes without a cluster."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator

import psutil
import pytest

from launch import binary
from launch.supervision.group_guard import GroupGuard
from launch.supervision.line_relay import LineRelay
from launch.supervision.outcome import Outcome
from launch.supervision.processes import Exit, Process
from launch.supervision.screen import PlainScreen
from launch.supervision.signals import ForwardedSignals
from launch.supervision.supervisor import Replacement, Supervisor
from tests.launch.clusters import wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def start() -> Iterator:
    """A function that starts a shell command as a process of a cluster; at the end none is left."""
    with GroupGuard() as guard, contextlib.ExitStack() as stack:
        yield lambda name, command: stack.enter_context(
            contextlib.closing(Process(name, ["sh", "-c", command], os.environ, guard))
        )


def supervised(*processes: Process, **options) -> Outcome:
    """The outcome of processes under a supervisor."""
    seconds = {"seconds_to_notice": 1, "seconds_to_save": 1}
    none = {"awaited": {}, "replaceable": ()}
    return Supervisor(
        processes, LineRelay(PlainScreen()), ForwardedSignals(), **{**seconds, **none, **options}
    ).run()


def test_a_worker_that_fails_when_nobody_needs_it_is_not_replaced(start):
    """The chief has succeeded, and the worker failed at the same moment."""
    replaced = []
    processes = [start("chief:0", f"exit {binary.DONE}"), start("worker:0", f"exit {binary.PEER_LOST}")]
    for process in processes:
        wait_until(lambda pid=process.pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    outcome = supervised(
        *processes, awaited={"worker:0": ("chief:0",)}, replacement=replaced.append, replaceable=("worker:0",)
    )
    assert not replaced
    assert outcome.code == binary.DONE
    assert [lost.name for lost in outcome.lost] == ["worker:0"]


class Pause:
    """Replaces a process after a pause. The other processes see when the pause has begun.

    Attributes:
      others: a shell command that ends once the pause has begun; its exit code must be appended.
      started: the processes that were started after the pause.
    """

    def __init__(self, start, name: str, begun: pathlib.Path, *, seconds: float):
        self._start, self._name, self._begun, self._seconds = start, name, begun, seconds
        self.others = f"until test -e {begun}; do sleep 0.05; done; exit "
        self.started: list[Process] = []

    def __call__(self, failed: Exit) -> Replacement | None:
        if failed.name != self._name:
            return None
        self._begun.touch()

        def started() -> Process:
            self.started.append(self._start(failed.name, "exit 0"))
            return self.started[-1]

        return Replacement(name=failed.name, at=time.monotonic() + self._seconds, start=started)


@pytest.mark.parametrize("code", [binary.DONE, 1], ids=["the chief ends", "the chief fails"])
def test_a_worker_that_nobody_needs_after_the_pause_is_not_started(start, tmp_path, code):
    pause = Pause(start, "worker:0", tmp_path / "begun", seconds=600)
    outcome = supervised(
        start("chief:0", f"{pause.others} {code}"),
        start("worker:0", "exit 1"),
        start("ps:0", "sleep 600"),
        awaited={"worker:0": ("chief:0",), "ps:0": ("chief:0", "worker:0")},
        replaceable=("worker:0",),
        replacement=pause,
    )
    assert not pause.started
    assert (outcome.code, [lost.name for lost in outcome.lost]) == (code, [])
    assert [replaced.name for replaced in outcome.replaced] == ["worker:0"]


def test_servers_are_needed_while_their_only_worker_is_to_be_replaced(start, tmp_path):
    pause = Pause(start, "worker:0", tmp_path / "begun", seconds=0.5)
    outcome = supervised(
        start("worker:0", "exit 1"),
        start("ps:0", "sleep 600"),
        awaited={"ps:0": ("worker:0",)},
        replacement=pause,
    )
    assert [process.name for process in pause.started] == ["worker:0"]
    assert [(each.name, each.was_asked) for each in outcome.exits] == [("worker:0", False), ("ps:0", True)]
    assert outcome.code == binary.DONE


def test_an_evaluator_is_replaced_although_training_ends_during_the_pause(start, tmp_path):
    """The evaluator still has to evaluate the last checkpoint."""
    pause = Pause(start, "evaluator:0", tmp_path / "begun", seconds=0.5)
    outcome = supervised(
        start("worker:0", f"{pause.others} 0"),
        start("evaluator:0", "exit 1"),
        followed={"evaluator:0": ("worker:0",)},
        replacement=pause,
    )
    assert [process.name for process in pause.started] == ["evaluator:0"]
    assert outcome.code == binary.DONE


def test_an_evaluator_ends_at_once_when_those_that_it_follows_have_failed(start):
    """The evaluator does not notice by itself, and a restart would wait for it."""
    outcome = supervised(
        start("chief:0", f"exit {binary.PEER_LOST}"),
        start("evaluator:0", "exec sleep 600"),
        followed={"evaluator:0": ("chief:0",)},
        replacement=lambda failed: None,
        seconds_to_notice=600,
    )
    assert [(each.name, each.was_asked) for each in outcome.exits] == [("chief:0", False), ("evaluator:0", True)]
    assert outcome.code == binary.PEER_LOST
