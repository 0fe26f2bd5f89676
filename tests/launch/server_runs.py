"""Runs of slow_input_program.py on parameter servers: their signals, and the checks of how they ended."""

import json
import pathlib
import signal
import time

from launch.binary import DONE, INTERRUPTED, USER_ERROR
from launch.membership.free_ports import free_addresses
from tests.launch.programs import ROOT, Ended, checkpoint_values, errors
from tests.launch.server_groups import ServerGroup

LIMIT_SECONDS = 60
# Limit from the loss of a process to the exits of the others.
END_SECONDS = 20
STEPS = 60
EXAMPLES_A_STEP = 24
# For runs that end by a signal.
LONG = "--steps=100000"
# `variables` of a group whose input takes no time.
QUICK_INPUT = dict.fromkeys(("chief:0", "worker:0", "worker:1"), {"SECONDS_PER_BATCH": "0"})
PROGRAM = (
    str(ROOT / "tests" / "launch" / "slow_input_program.py"),
    "--strategy=ps",
    "--num_towers=1",
    f"--steps={STEPS}",
    "--checkpoint_every_steps=10",
    "--evaluate_every_epochs=100",
    "--learning_rate=0.1",
    "--directory=run",
)


def check_second_chief(group: ServerGroup, cwd: pathlib.Path) -> None:
    """Asserts that a second chief is refused by the first one's name, and that the run is not disturbed.

    The group needs the flag LONG, so that the run still goes on when the second chief has started.
    """
    wait_for_step(group, cwd, 10)
    start_second_chief(group)
    refused = group.end("second chief", LIMIT_SECONDS)
    first = group.processes["chief:0"].pid
    assert refused.code == USER_ERROR, refused.err
    (line,) = errors(refused)
    assert f"ps:0 serves another chief already (process {first} on " in line
    del group.processes["second chief"]
    checkpoints = (cwd / "run" / "checkpoints").glob("step-*.index")
    reached = max(int(path.stem.partition("-")[2]) for path in checkpoints)
    wait_for_step(group, cwd, reached + 20)
    group.processes["chief:0"].send_signal(signal.SIGTERM)
    all_end(group, INTERRUPTED)
    steps = summary(cwd)["steps"]
    assert steps >= reached + 20
    check_counts(cwd, steps=steps, outcome="interrupted")


def wait_for_step(group: ServerGroup, cwd: pathlib.Path, step: int) -> None:
    """Waits until the step is saved."""
    path = cwd / "run" / "checkpoints" / f"step-{step}.index"
    deadline = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not exist after {LIMIT_SECONDS} seconds"
        assert group.processes["chief:0"].poll() is None, group.written("chief:0", "err")
        time.sleep(0.005)


def signalled(group: ServerGroup, cwd: pathlib.Path, number: int, *names: str, step: int = 10) -> None:
    """Sends a signal to some processes after a step is saved."""
    wait_for_step(group, cwd, step)
    for name in names:
        group.processes[name].send_signal(number)


def start_second_chief(group: ServerGroup) -> None:
    """Starts another chief of the same servers and workers, as from another machine."""
    (address,) = free_addresses(1)
    task = {"cluster": group.cluster | {"chief": [address]}, "task": {"type": "chief", "index": 0}}
    group.start("chief:0", as_name="second chief", TF_CONFIG=json.dumps(task))


def all_end(group: ServerGroup, code: int = DONE, limit_seconds: float = LIMIT_SECONDS) -> dict[str, Ended]:
    """Waits until all processes have ended, all with the same exit code."""
    ends = group.ends(limit_seconds)
    assert {name: ended.code for name, ended in ends.items()} == dict.fromkeys(ends, code), outputs(ends)
    return ends


def outputs(ends: dict[str, Ended]) -> str:
    """The output of all processes, for the message of a failed test."""
    return "\n".join(
        f"{name} ({ended.code}): {ended.out[-500:]} {ended.err[-1000:]}" for name, ended in ends.items()
    )


def summary(cwd: pathlib.Path) -> dict:
    return json.loads((cwd / "run" / "summary.json").read_text())


def check_counts(
    cwd: pathlib.Path,
    *,
    since: int = 0,
    is_sync: bool = False,
    steps: int = STEPS,
    outcome: str = "completed",
) -> dict:
    """Asserts that no step is missing or counted twice; returns the cluster's section of the summary.

    Args:
      since: the step at which the last start resumed.
      is_sync: whether each of the two workers takes part in every step.
      steps: number of steps of the whole run.
      outcome: how the run ended.
    """
    found = summary(cwd)
    assert found["outcome"] == outcome
    assert found["steps"] == steps
    assert found["examples"] == EXAMPLES_A_STEP * steps
    saved = checkpoint_values(cwd / "run", steps)
    assert saved["counters/step/.ATTRIBUTES/VARIABLE_VALUE"] == steps
    assert saved["counters/updates/.ATTRIBUTES/VARIABLE_VALUE"] == steps
    group = found["parameter_servers"]
    done = sum(worker["steps"] for worker in group["workers"].values())
    assert done == (steps - since) * (2 if is_sync else 1)
    if not is_sync:
        assert sum(group["staleness"]["histogram"].values()) == steps - since
    return group


def resumed_to_the_end(group: ServerGroup, cwd: pathlib.Path, **counts) -> int:
    """Runs the same command again; returns the step at which it resumed."""
    with group as processes:
        chief = all_end(processes)["chief:0"]
    (line,) = (line for line in chief.out.splitlines() if "resumed at step" in line)
    since = int(line.split("resumed at step ")[1].split()[0])
    check_counts(cwd, since=since, **counts)
    return since
