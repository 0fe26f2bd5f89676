"""The doctor's self-test: measures the speed of an all-reduce between two processes of this machine."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence

from launch.binary import PEER_LOST
from launch.health.section import Section
from launch.membership.free_ports import LOOPBACK
from launch.membership.roles import Roles
from launch.membership.tf_config import tf_config_text
from launch.networks.held_network import private_network
from launch.supervision.group_guard import GroupGuard
from launch.supervision.own_program import own_program
from launch.supervision.processes import Process
from strategies.cluster import Cluster

_COMMAND, _VARIABLES = own_program("launch.health.selftest_worker")
# Time for TensorFlow to start and for the measurement itself, on a slow machine.
_OTHER_SECONDS = 90.0
_POLL_SECONDS = 0.05


def selftest(environment: Mapping[str, str], *, timeout_seconds: float) -> Section:
    """Starts two workers, each on one CPU thread, and waits until both have ended.

    They run in a private network where the system permits one: TensorFlow's server listens on every interface.

    Args:
      environment: this process's environment; the workers get it with their own TF_CONFIG and without GPUs.
      timeout_seconds: seconds that each worker waits for the other one to start.
    """
    with private_network() as network, GroupGuard() as guard, contextlib.ExitStack() as running:
        command = (*network.inside, *_COMMAND, str(timeout_seconds))
        workers = [
            running.enter_context(contextlib.closing(_started(command, environment, cluster, guard)))
            for cluster in Roles(workers=2).clusters()
        ]
        _wait(workers, timeout_seconds + _OTHER_SECONDS)
        problem = _what_is_wrong(workers, timeout_seconds)
        if problem:
            return Section(facts={"ring of 2": "failed"}, problems=(f"self-test: {problem}",))
        measured = json.loads(workers[0].outputs[0].read())
    facts = {f"{precision} {mib} MiB": _speed(mib, seconds) for precision, mib, seconds in measured}
    return Section(facts=facts | ({"private network": network.problem} if network.problem else {}))


def _started(
    command: Sequence[str], environment: Mapping[str, str], cluster: Cluster, guard: GroupGuard
) -> Process:
    own = {"TF_CONFIG": tf_config_text(cluster), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return Process(cluster.this.name, command, {**environment, **_VARIABLES, **own}, guard)


def _wait(workers: Sequence[Process], limit_seconds: float) -> None:
    """Waits until all workers have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        for worker in workers:
            worker.poll()
        ends = [worker.exit for worker in workers]
        if None not in ends or any(end is not None and end.code for end in ends):
            return
        time.sleep(_POLL_SECONDS)


def _what_is_wrong(workers: Sequence[Process], timeout_seconds: float) -> str | None:
    failed = [worker for worker in workers if worker.exit is not None and worker.exit.code]
    for worker in failed:
        if worker.exit.code != PEER_LOST:
            last = worker.outputs[1].read().decode(errors="replace").strip().splitlines()[-1:]
            return f"{worker.name} ended with exit code {worker.exit.code}: {' '.join(last) or 'no message'}"
    if failed:
        return (
            f"two processes of this machine could not connect on {LOOPBACK} within "
            f"--selftest_timeout_seconds={timeout_seconds:g}; check its firewall, "
            "or raise the timeout if the machine is busy"
        )
    if any(worker.exit is None for worker in workers):
        seconds = timeout_seconds + _OTHER_SECONDS
        return f"it did not end within {seconds:g} seconds; raise --selftest_timeout_seconds={timeout_seconds:g}"
    return None


def _speed(size_mib: int, seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms, {size_mib / 1024 / seconds:.2f} GiB/s"
