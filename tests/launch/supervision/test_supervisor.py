"""Which process must end, and which is replaced: real processes without a cluster."""

import os

import psutil

from launch import binary
from launch.supervision.group_guard import GroupGuard
from launch.supervision.line_relay import LineRelay
from launch.supervision.processes import Process
from launch.supervision.screen import PlainScreen
from launch.supervision.signals import ForwardedSignals
from launch.supervision.supervisor import Supervisor
from tests.launch.clusters import wait_until


def test_a_worker_that_fails_when_nobody_needs_it_is_not_replaced():
    """The chief has ended well, and the worker was killed at the same moment."""
    replaced = []
    with GroupGuard() as guard:
        processes = [
            Process(name, ["sh", "-c", f"exit {code}"], os.environ, guard)
            for name, code in (("chief:0", binary.DONE), ("worker:0", binary.PEER_LOST))
        ]
        for process in processes:
            wait_until(lambda pid=process.pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        outcome = Supervisor(
            processes,
            LineRelay(PlainScreen()),
            ForwardedSignals(),
            awaited={"worker:0": ("chief:0",)},
            replacement=replaced.append,
            replaceable=("worker:0",),
            seconds_to_notice=1,
            seconds_to_save=1,
        ).run()
        for process in processes:
            process.close()
    assert not replaced
    assert outcome.code == binary.DONE
    assert [lost.name for lost in outcome.lost] == ["worker:0"]
