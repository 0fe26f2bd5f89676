"""A failed parameter-server worker is replaced; the failure of any other process restarts the whole cluster."""

import pytest

from tests.launch.clusters import launched, run_cluster
from tests.tiers import first_quick

pytestmark = pytest.mark.timeout(120)

# The process `fails` fails in its first `times` starts. The others wait until it works. All wait until the others
# have counted their starts: the launcher may end a slowly starting process once a process that needs it has ended.
PROGRAM = """
fails, times = "{fails}", {times}

def num_starts(name):
    path = here / f"starts of {{name}}"
    return len(path.read_text()) if path.exists() else 0

(here / f"starts of {{name}}").write_text("x" * (num_starts(name) + 1))
others = [other for other in {names} if other not in (name, fails)]
if name == fails and num_starts(name) <= times:
    until(lambda: all(num_starts(other) for other in others))
    sys.exit({code})
mark(f"{{name}} works")
until_marked(f"{{fails}} works")
if name != fails:
    until(lambda: all(num_starts(other) >= num_starts(name) for other in others))
"""


def starts_of(folder) -> dict[str, int]:
    return {path.name.removeprefix("starts of "): len(path.read_text()) for path in folder.glob("starts of *")}


def run(folder, *flags, fails, times, code=1):
    names = ["worker:0", "worker:1", *(["chief:0", "ps:0"] if "--ps=1" in flags else [])]
    program = PROGRAM.format(fails=fails, times=times, code=code, names=names)
    return run_cluster(folder, program, "--workers=2", *flags)


# The second replacement waits two seconds, as the second restart of a whole cluster does in test_local.py.
@pytest.mark.parametrize("times", first_quick([1, 2]))
def test_a_parameter_server_worker_is_replaced_alone(tmp_path, times):
    done = run(tmp_path, "--ps=1", "--chief", "--max_restarts=2", fails="worker:1", times=times)
    assert done.code == 0, done.err
    assert starts_of(tmp_path) == {"chief:0": 1, "worker:0": 1, "worker:1": 1 + times, "ps:0": 1}
    assert "restart 1 of 2: worker:1 failed: exit code 1" in done.out
    assert ("restart 2 of 2 in 2 s: worker:1 failed: exit code 1" in done.out) is (times == 2)


STOPS_ON_A_SIGNAL = """
(here / f"starts of {name}").open("a").write("x")
if name == "worker:1":
    until_marked("worker:0 handles signals", "chief:0 handles signals")
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
mark(f"{name} handles signals")
time.sleep(60)
"""


@pytest.mark.full
def test_a_signal_ends_the_pause_before_a_replacement(tmp_path):
    flags = ("--workers=2", "--ps=1", "--chief", "--max_restarts=9")
    with launched(tmp_path, STOPS_ON_A_SIGNAL, *flags) as cluster:
        announced = "restart 2 of 9 in 2 s: worker:1 failed"
        next(line for line in cluster.process.stdout if line.startswith(announced))
        cluster.process.terminate()
        done = cluster.ended()
    assert (done.code, done.err) == (75, "")
    assert starts_of(tmp_path)["worker:1"] == 2


@pytest.mark.full
def test_no_more_replacements_than_max_restarts(tmp_path):
    done = run(tmp_path, "--ps=1", "--chief", "--max_restarts=1", "--grace_seconds=1", fails="worker:1", times=9)
    assert done.code == 1
    assert starts_of(tmp_path)["worker:1"] == 2
    assert "worker:1 failed: exit code 1" in done.err


# One process is lost, the others go on for some time.
LOST = """
if name == "{lost}":
    mark("started")
    os.kill(os.getpid(), signal.SIGKILL)
until_marked("started")
time.sleep(2)
"""
LOST_WORKER, LOST_EVALUATOR = (LOST.format(lost=name) for name in ("worker:1", "evaluator:0"))
FAILED_WORKER = """
if name == "worker:1":
    sys.exit(2)
"""


@pytest.mark.full
def test_the_others_go_on_without_a_lost_worker_of_servers(tmp_path):
    """The launcher does not end them, and its exit code is that of a completed run, with a warning."""
    flags = ("--workers=2", "--ps=1", "--chief", "--grace_seconds=0.5")
    done = run_cluster(tmp_path, LOST_WORKER, *flags)
    assert done.code == 0, done.err
    [line] = done.err.splitlines()
    assert line.startswith(
        "warning: worker:1 was lost: killed by SIGKILL; the others continued without it; its log"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "later, code, last", [("", 0, "evaluator:0 was lost"), (FAILED_WORKER, 2, "worker:1 failed")]
)
def test_the_others_go_on_without_a_lost_evaluator(tmp_path, later, code, last):
    flags = ("--workers=2", "--evaluator", "--grace_seconds=0.5")
    done = run_cluster(tmp_path, LOST_EVALUATOR + later, *flags)
    assert done.code == code, done.err
    assert last in done.err.splitlines()[0]


REPLACED = """
(here / f"starts of {name}").open("a").write("x")
if name == "evaluator:0" and not (here / "killed").exists():
    mark("killed")
    os.kill(os.getpid(), signal.SIGKILL)
if name == "evaluator:0":
    mark("replaced")
until_marked("replaced")
"""


def test_a_lost_evaluator_is_replaced_alone(tmp_path):
    done = run_cluster(tmp_path, REPLACED, "--workers=2", "--evaluator", "--max_restarts=1")
    assert done.code == 0, done.err
    assert starts_of(tmp_path) == {"worker:0": 1, "worker:1": 1, "evaluator:0": 2}


@pytest.mark.full
def test_without_servers_a_lost_worker_ends_the_cluster(tmp_path):
    assert run_cluster(tmp_path, LOST_WORKER, "--workers=2", "--grace_seconds=0.5").code == 137


@pytest.mark.full
def test_no_replacement_after_a_user_error(tmp_path):
    done = run(
        tmp_path, "--ps=1", "--chief", "--max_restarts=1", "--grace_seconds=1", fails="worker:1", times=9, code=2
    )
    assert (done.code, starts_of(tmp_path)["worker:1"]) == (2, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "fails, flags", [("worker:1", ()), ("ps:0", ("--ps=1", "--chief"))], ids=["ring", "server"]
)
def test_the_whole_cluster_restarts_after_the_failure_of_a_needed_process(tmp_path, fails, flags):
    done = run(tmp_path, *flags, "--max_restarts=1", "--grace_seconds=1", fails=fails, times=1)
    assert done.code == 0, done.err
    assert set(starts_of(tmp_path).values()) == {2}
