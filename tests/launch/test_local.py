"""`python -m launch.local` as a process, with small programs for a training: starts, lines, ends, restarts."""

import json
import re
import signal
import sys
import time

import pytest

from tests.launch.clusters import launched, run_cluster, wait_until
from tests.launch.programs import run_many

pytestmark = pytest.mark.timeout(300)

OBEDIENT = """
def stop(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
mark(name)
time.sleep(60)
"""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


def last_block(err: str) -> list[str]:
    """The lines of the launcher's own that end its stderr."""
    lines = err.splitlines()
    [first] = [place for place, line in enumerate(lines) if " failed: " in line]
    return lines[first:]


class TestStart:
    @pytest.fixture(scope="class")
    def told(self, tmp_path_factory):
        """What each process of a cluster of every role found, by its name."""
        program = """
found = {"config": config, "environment": dict(os.environ), "session": os.getsid(0) == os.getpid()}
print(json.dumps({**found, "input": sys.stdin.read(), "here": os.getcwd()}))
mark(name)
until_marked("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0")
"""
        folder = tmp_path_factory.mktemp("start")
        done = run_cluster(folder, program, "--workers=2", "--ps=1", "--chief", "--evaluator")
        assert (done.code, done.err) == (0, "")
        lines = [re.fullmatch(r"\[(\S+)\] (.*)", line).groups() for line in done.out.splitlines()]
        return {name: json.loads(text) for name, text in lines}

    def test_one_process_a_role_and_rank(self, told):
        assert sorted(told) == ["chief:0", "evaluator:0", "ps:0", "worker:0", "worker:1"]
        tasks = {name: found["config"]["task"] for name, found in told.items()}
        assert tasks == {
            name: {"type": name.partition(":")[0], "index": int(name.partition(":")[2])} for name in told
        }

    def test_all_know_the_same_cluster(self, told):
        clusters = [found["config"]["cluster"] for found in told.values()]
        assert all(cluster == clusters[0] for cluster in clusters)
        assert {role: len(addresses) for role, addresses in clusters[0].items()} == {
            "chief": 1,
            "worker": 2,
            "ps": 1,
        }, "an evaluator is no member"
        addresses = [address for of_role in clusters[0].values() for address in of_role]
        assert len(set(addresses)) == 4
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)

    def test_environment(self, told):
        for found in told.values():
            environment = found["environment"]
            assert environment["TOWERS_PROCESSES_HERE"] == "4", "parameter servers don't compute"
            assert environment["PYTHONUNBUFFERED"] == "1"
            assert re.fullmatch(
                re.escape(found["here"]) + r"/runs/\d{8}-\d{6}-\d+", environment["TOWERS_RUN_DIRECTORY"]
            )
            assert "TOWERS_FAULT" not in environment

    def test_apart_from_the_terminal(self, told):
        assert all(found["session"] for found in told.values())
        assert all(found["input"] == "" for found in told.values())


def test_a_given_directory_is_the_runs(tmp_path):
    program = "print(os.environ['TOWERS_RUN_DIRECTORY'], sys.argv[1:])"
    command = ("python", "program.py", "--directory=mine", "--", "more")
    done = run_cluster(tmp_path, program, "--workers=1", command=command)
    assert done.out == f"[worker:0] {tmp_path}/mine ['--directory=mine', '--', 'more']\n"
    assert (tmp_path / "mine" / "logs" / "worker-0.log").exists()


class TestLines:
    PROGRAM = r"""
if index == 0:
    os.write(1, b"out \xff\n\nlong" + b"x" * 100000 + b"\nno end")
else:
    os.write(2, b"err\n[not markup]\n")
"""

    def test_prefixed_to_the_launcher_and_bare_in_the_logs(self, tmp_path):
        with launched(tmp_path, self.PROGRAM, "--workers=2") as cluster:
            process = cluster.process
            process.stdout.reconfigure(errors="surrogateescape")
            done = cluster.ended()
        assert done.code == 0
        lines = done.out.splitlines()
        assert [lines[0], lines[1], lines[-1]] == ["[worker:0] out \udcff", "[worker:0] ", "[worker:0] no end"]
        pieces = [line.removeprefix("[worker:0] ") for line in lines[2:-1]]
        assert "".join(pieces) == "long" + "x" * 100000
        assert done.err == "[worker:1] err\n[worker:1] [not markup]\n"
        assert cluster.log("worker:1") == "err\n[not markup]\n"
        [log] = tmp_path.glob("runs/*/logs/worker-0.log")
        assert log.read_bytes().startswith(b"out \xff\n\nlongxx")

    def test_each_line_as_it_comes(self, tmp_path):
        with launched(tmp_path, "print('now'); until_marked('seen')", "--workers=1") as cluster:
            assert cluster.process.stdout.readline() == "[worker:0] now\n"
            (tmp_path / "seen").touch()
            assert cluster.ended().code == 0

    def test_nobody_reads_them(self, tmp_path):
        """As when Ctrl-C ended the `tee` behind it: the processes go on."""
        program = "mark(name); until_marked('gone'); [print(i) for i in range(1000)]; print('last')"
        with launched(tmp_path, program, "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            cluster.process.stdout.close()
            (tmp_path / "gone").touch()
            assert cluster.process.wait(60) == 0
            assert cluster.process.stderr.read() == ""
        assert cluster.log("worker:0").endswith("999\nlast\n")

    def test_output_that_somebody_else_holds_open(self, tmp_path):
        """What left the session is out of reach: it may say something yet, and must not keep anybody waiting."""
        program = "subprocess.Popen(['sh', '-c', 'sleep 0.3; echo late; sleep 5'], start_new_session=True)"
        with launched(tmp_path, program, "--workers=1") as cluster:
            assert cluster.process.stdout.readline() == "[worker:0] late\n"
            begin = time.monotonic()
            assert cluster.process.wait(60) == 0
            assert time.monotonic() - begin < 4


class TestSignals:
    @SIGNALS
    def test_they_are_passed_on(self, tmp_path, number):
        with launched(tmp_path, OBEDIENT, "--workers=2", "--chief", "--evaluator") as cluster:
            names = ("chief:0", "worker:0", "worker:1", "evaluator:0")
            cluster.wait_for(*names)
            cluster.process.send_signal(number)
            done = cluster.ended()
        assert (done.code, done.err) == (75, "")
        assert sorted(done.out.splitlines()) == sorted(f"[{name}] heard {number.name}" for name in names)

    def test_a_second_one_too(self, tmp_path):
        program = """
heard = []
signal.signal(signal.SIGINT, lambda *_: (heard.append(1), mark(f"{name} {len(heard)}")))
mark(name)
until(lambda: len(heard) == 2)
"""
        with launched(tmp_path, program, "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            cluster.process.send_signal(signal.SIGINT)
            cluster.wait_for("worker:0 1", "worker:1 1")
            cluster.process.send_signal(signal.SIGINT)
            assert cluster.ended().code == 75, "they ended with 0, after a signal"

    def test_who_does_not_obey_is_killed(self, tmp_path):
        program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmark(name)\n" + (
            "sys.exit(75) if index == 0 else time.sleep(60)"
        )
        with launched(tmp_path, program, "--workers=2", "--grace_seconds=0.5") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            cluster.process.send_signal(signal.SIGTERM)
            done = cluster.ended()
        assert done.code == 128 + signal.SIGKILL
        assert last_block(done.err)[0].startswith("worker:1 failed: killed by SIGKILL")

    def test_who_serves_is_needed_until_the_others_have_saved(self, tmp_path):
        program = """
def stop(number, frame):
    if role != "chief":
        mark(f"{name} stopped")
        sys.exit(0)
    time.sleep(0.5)
    print("served", not any((here / f"{server} stopped").exists() for server in ("ps:0", "worker:0")))
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
mark(name)
time.sleep(60)
"""
        with launched(tmp_path, program, "--workers=1", "--ps=1", "--chief") as cluster:
            cluster.wait_for("chief:0", "worker:0", "ps:0")
            cluster.process.send_signal(signal.SIGTERM)
            done = cluster.ended()
        assert (done.code, done.out) == (75, "[chief:0] served True\n")
        assert (tmp_path / "ps:0 stopped").exists()
        assert (tmp_path / "worker:0 stopped").exists()

    def test_a_script_and_what_it_started(self, tmp_path):
        """The signal reaches a whole group, as a terminal's does."""
        command = ("sh", "-c", f"{sys.executable} program.py; true")
        with launched(tmp_path, OBEDIENT, "--workers=1", command=command) as cluster:
            cluster.wait_for("worker:0")
            cluster.process.send_signal(signal.SIGINT)
            done = cluster.ended()
        assert "[worker:0] heard SIGINT" in done.out


class TestFailure:
    def test_the_cause_comes_first(self, tmp_path):
        """worker:0 notices before the launcher can: it is not to blame."""
        program = """
if name == "worker:0":
    mark("lost")
    sys.exit(5)
if name == "worker:2":
    sys.exit(0)
until_marked("lost")
time.sleep(0.5)
for number in range(40):
    print("line", number)
print("the reason", file=sys.stderr)
sys.exit(7)
"""
        done = run_cluster(tmp_path, program, "--workers=3")
        assert done.code == 7
        [first, *rest] = last_block(done.err)
        assert re.fullmatch(r"worker:1 failed: exit code 7; its last lines, of \S+/logs/worker-1\.log:", first)
        lines, others = rest[:15], rest[15:]
        assert lines[-1] == "    line 39" or lines[-1] == "    the reason"
        assert "    the reason" in lines and "    line 38" in lines and "    line 20" not in lines
        assert sorted(others) == ["worker:0: exit code 5 (a peer was lost)", "worker:2: exit code 0"]

    def test_a_death_by_signal(self, tmp_path):
        program = "os.kill(os.getpid(), signal.SIGSEGV) if index else (until_marked('x') or sys.exit(5))"
        with launched(tmp_path, program, "--workers=2") as cluster:
            time.sleep(0.5)
            (tmp_path / "x").touch()
            done = cluster.ended()
        assert done.code == 128 + signal.SIGSEGV
        assert last_block(done.err)[0].startswith("worker:1 failed: killed by SIGSEGV;")

    def test_only_peers_were_lost(self, tmp_path):
        done = run_cluster(tmp_path, "time.sleep(index / 2); sys.exit(5)", "--workers=2")
        assert done.code == 5
        assert last_block(done.err)[0].startswith("worker:0 failed: exit code 5 (a peer was lost);")

    def test_the_others_have_time_to_end_by_themselves(self, tmp_path):
        program = OBEDIENT.replace("time.sleep(60)", "time.sleep(1)") + "print('in time')"
        program = f"if index == 1: sys.exit(3)\n{program}"
        done = run_cluster(tmp_path, program, "--workers=2")
        assert (done.code, done.out) == (3, "[worker:0] in time\n")

    def test_then_they_are_asked_and_then_killed(self, tmp_path):
        program = """
if index == 0:
    until_marked("worker:1", "worker:2")
    sys.exit(1)
def stop(number, frame):
    print("asked")
    if index == 1:
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
mark(name)
while True:
    time.sleep(60)
"""
        done = run_cluster(tmp_path, program, "--workers=3", "--grace_seconds=0.5")
        assert done.code == 1
        assert sorted(done.out.splitlines()) == ["[worker:1] asked", "[worker:2] asked"]
        assert last_block(done.err)[-2:] == [
            "worker:1: exit code 75 (interrupted, everything saved), after SIGTERM from the launcher",
            "worker:2: killed by SIGKILL, after SIGKILL from the launcher",
        ]

    def test_one_that_stands_still_is_to_blame(self, tmp_path):
        """Its peer gave up on it. SIGTERM would not wake it, and there is nothing to wait for."""
        program = """
if index == 1:
    mark("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
until_marked("stopped")
time.sleep(0.5)
sys.exit(5)
"""
        begin = time.monotonic()
        done = run_cluster(tmp_path, program, "--workers=2")
        assert time.monotonic() - begin < 25, "less than the grace"
        assert done.code == 128 + signal.SIGKILL
        block = last_block(done.err)
        assert block[0].startswith("worker:1 failed: it was stopped by a signal and stood still")
        assert block[-1] == "worker:0: exit code 5 (a peer was lost)"

    def test_all_were_interrupted_from_elsewhere(self, tmp_path):
        """As when a scheduler sent SIGTERM to the processes themselves: everything is saved, nothing failed."""
        done = run_cluster(tmp_path, "sys.exit(75)", "--workers=2", "--max_restarts=1")
        assert (done.code, done.out, done.err) == (75, "", "")

    def test_a_program_that_is_none(self, tmp_path):
        (tmp_path / "no-program").write_text("")
        (tmp_path / "no-program").chmod(0o755)
        done = run_cluster(tmp_path, "", "--workers=1", command=("./no-program",))
        assert done.code == 126
        assert "[worker:0] ./no-program: Exec format error\n" in done.err


class TestServers:
    PROGRAM = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
mark(name)
if role in SERVING:
    time.sleep(60)
until_marked(*NAMES)
print("done")
"""

    def run(self, tmp_path, serving, names, *flags):
        program = f"SERVING, NAMES = {serving!r}, {names!r}\n{self.PROGRAM}"
        return run_cluster(tmp_path, program, *flags)

    def test_they_are_ended_when_the_workers_have(self, tmp_path):
        done = self.run(tmp_path, ["ps"], ["ps:0", "ps:1"], "--workers=2", "--ps=2")
        assert (done.code, done.err) == (0, "")
        assert sorted(done.out.splitlines()) == ["[worker:0] done", "[worker:1] done"]

    def test_a_chief_ends_the_workers_too(self, tmp_path):
        names = ["worker:0", "worker:1", "ps:0"]
        done = self.run(tmp_path, ["ps", "worker"], names, "--workers=2", "--ps=1", "--chief")
        assert (done.code, done.out, done.err) == (0, "[chief:0] done\n", "")

    def test_they_wait_for_the_evaluator(self, tmp_path):
        program = """
if role == "worker":
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: (mark("ended"), sys.exit(0)))
if role == "ps":
    mark("serves")
    time.sleep(60)
until_marked("serves")
time.sleep(1)
print("alone" if (here / "ended").exists() else "served")
"""
        done = run_cluster(tmp_path, program, "--workers=1", "--ps=1", "--evaluator")
        assert (done.code, done.out) == (0, "[evaluator:0] served\n")
        assert (tmp_path / "ended").exists()

    def test_in_a_ring_a_chief_ends_nobody(self, tmp_path):
        program = "role == 'worker' and time.sleep(1); print('done')"
        done = run_cluster(tmp_path, program, "--workers=1", "--chief")
        assert (done.code, done.out) == (0, "[chief:0] done\n[worker:0] done\n")

    def test_one_that_does_not_listen(self, tmp_path):
        program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark(name)\n" + (
            "time.sleep(60) if role == 'ps' else until_marked('ps:0')"
        )
        done = run_cluster(tmp_path, program, "--workers=1", "--ps=1", "--grace_seconds=0.5")
        assert (done.code, done.err) == (0, "")

    def test_one_that_fails(self, tmp_path):
        program = "role == 'ps' and sys.exit(4); time.sleep(60)"
        done = run_cluster(tmp_path, program, "--workers=1", "--ps=1", "--grace_seconds=0.5")
        assert done.code == 4
        assert last_block(done.err)[0].startswith("ps:0 failed: exit code 4 (not finite);")


class TestRestarts:
    PROGRAM = """
starts = here / f"{name} starts"
with starts.open("a") as file:
    file.write(json.dumps(config["cluster"]) + "\\n")
start = len(starts.read_text().splitlines())
print("start", start)
"""

    def test_until_it_completes(self, tmp_path):
        program = self.PROGRAM + "sys.exit(1 if index == 1 and start < 3 else 0)"
        with launched(tmp_path, program, "--workers=2", "--max_restarts=5") as cluster:
            done = cluster.ended()
        assert (done.code, done.err) == (0, "")
        [directory] = (tmp_path / "runs").iterdir()
        told = [line for line in done.out.splitlines() if line.startswith("restart")]
        where = f"its last lines stand in {directory}/logs/worker-1.log"
        assert told == [f"restart {n} of 5: worker:1 failed: exit code 1; {where}" for n in (1, 2)]
        clusters = {(tmp_path / f"worker:{n} starts").read_text() for n in (0, 1)}
        [lines] = [text.splitlines() for text in clusters]
        assert len(set(lines)) == 3, "new ports at each start"
        assert re.fullmatch(
            r"start 1\n--- start 2, .{19} ---\nstart 2\n--- start 3, .{19} ---\nstart 3\n", cluster.log("worker:1")
        )

    def test_no_more_often_than_allowed(self, tmp_path):
        program = self.PROGRAM + "sys.exit(10 + start)"
        done = run_cluster(tmp_path, program, "--workers=1", "--max_restarts=2")
        assert done.code == 13
        block = last_block(done.err)
        assert block[0].startswith("worker:0 failed: exit code 13;")
        assert block[1:] == ["    start 3"], "the last start's lines alone"

    @pytest.mark.parametrize("code", [2, 3, 4])
    def test_not_where_it_would_be_the_same_again(self, tmp_path, code):
        done = run_cluster(tmp_path, self.PROGRAM + f"sys.exit({code})", "--workers=1", "--max_restarts=2")
        assert (done.code, done.out) == (code, "[worker:0] start 1\n")

    def test_not_after_a_signal(self, tmp_path):
        program = self.PROGRAM + OBEDIENT.replace("sys.exit(75)", "sys.exit(1)")
        with launched(tmp_path, program, "--workers=1", "--max_restarts=2") as cluster:
            cluster.wait_for("worker:0")
            cluster.process.send_signal(signal.SIGTERM)
            done = cluster.ended()
        assert (done.code, done.out) == (1, "[worker:0] start 1\n[worker:0] heard SIGTERM\n")


class TestFaults:
    """With programs that carry out what TOWERS_FAULT orders as launch/supervision/fault.py does."""

    PROGRAM = """
kind, _, step = os.environ.get("TOWERS_FAULT", "").partition("@")
if kind and int(step) < 50:
    mark("fault")
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
if not (here / "again").exists() and EXPECTED:
    until_marked("fault")
    time.sleep(0.5)
    mark("again")
    sys.exit(5)
"""

    @pytest.mark.parametrize("kind, done", [("kill", "killed"), ("stop", "stopped")], ids=["kill", "stop"])
    def test_recovered(self, tmp_path, kind, done):
        program = f"EXPECTED = True\n{self.PROGRAM}"
        found = run_cluster(tmp_path, program, "--workers=2", f"--{kind}=worker:1@step20", "--max_restarts=1")
        assert found.code == 0, found.err
        first, last = found.out.splitlines()
        assert first.startswith("restart 1 of 1: worker:1 failed: ")
        assert last == f"recovered: worker:1 was {done} at step 20, restart 1 completed"

    def test_it_did_not_happen(self, tmp_path):
        program = f"EXPECTED = False\n{self.PROGRAM}"
        done = run_cluster(tmp_path, program, "--workers=2", "--kill=worker:1@step50", "--max_restarts=1")
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            "local: error: --kill=worker:1@step50: it did not happen, worker:1 began no step 50; "
            "name a step that it takes in its first start\n"
        )

    @pytest.mark.parametrize("flag", ["--kill=worker:1@step20", "--stop=worker:0@step20"])
    def test_something_else_happened(self, tmp_path, flag):
        """A restart that another failure brought about is no recovery from the fault."""
        program = """
if not (here / "again").exists():
    until_marked("ready") if index == 1 else mark("ready")
    mark("again") if index == 1 else time.sleep(60)
    sys.exit(1)
"""
        done = run_cluster(tmp_path, program, "--workers=2", flag, "--max_restarts=1", "--grace_seconds=0.5")
        assert done.code == 2, done.out
        assert f"{flag}: it did not happen" in done.err

    def test_it_did_not_recover(self, tmp_path):
        program = f"EXPECTED = False\n{self.PROGRAM}\nsys.exit(6 if (here / 'fault').exists() else 0)"
        done = run_cluster(tmp_path, program, "--workers=1", "--kill=worker:0@step20", "--max_restarts=1")
        assert done.code == 6
        assert "recovered" not in done.out


class TestNothingIsLeft:
    """Each of these ends as every test here does: `launched` looks for what still runs."""

    FAMILY = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
mark(name)
"""
    # As where it has a fault of its own: it raises in the middle.
    BROKEN = """
import os, sys
from launch import local
from launch.supervision import supervisor

def broken(self):
    if {"worker:0", "worker:1"} <= set(os.listdir()):
        raise RuntimeError("a fault of the launcher")

supervisor.Supervisor._look = broken
sys.argv = ["local.py", "--workers=2", "--", "python", "program.py"]
local.cli()
"""

    def test_after_the_launcher_was_killed(self, tmp_path):
        program = self.FAMILY + "time.sleep(60)"
        with launched(tmp_path, program, "--workers=2", "--ps=1") as cluster:
            cluster.wait_for("worker:0", "worker:1", "ps:0")
            assert len(cluster.left()) == 8, "launcher, guard, three processes with a child each"
            cluster.process.kill()

    def test_after_the_guard_was_killed_too(self, tmp_path):
        """No guard is needed for the processes themselves: the kernel ends them with the launcher."""
        with launched(tmp_path, "mark(name); time.sleep(600)", "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            [guard] = [process for process in cluster.left() if "group_guard.py" in " ".join(process.cmdline())]
            guard.kill()
            cluster.process.kill()

    def test_after_a_process_has_ended(self, tmp_path):
        program = self.FAMILY + "until_marked('end' if index == 0 else 'seen')"
        with launched(tmp_path, program, "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            assert len(cluster.left()) == 6, "launcher, guard, two processes with a child each"
            (tmp_path / "end").touch()
            wait_until(lambda: len(cluster.left()) == 4, seconds=20)
            (tmp_path / "seen").touch()
            assert cluster.ended().code == 0

    def test_after_a_fault_of_the_launcher(self, tmp_path):
        (tmp_path / "broken.py").write_text(self.BROKEN)
        program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + self.FAMILY + "time.sleep(60)"
        with launched(tmp_path, program, "--workers=1", command=("python", "broken.py")) as cluster:
            done = cluster.ended()
        assert done.code == 1
        assert "RuntimeError: a fault of the launcher" in done.err


MISTAKES = (
    ([], "no command: give one behind --, as: --workers=2 -- python -m launch.train"),
    (
        ["--workers=2", "--"],
        "no command: give one behind --, as: --workers=2 -- python -m launch.train",
    ),
    (["--workers=0", "--", "ls"], "flag --workers=0: give a number above 0"),
    (["--ps=-1", "--", "ls"], "flag --ps=-1: give 0 or more"),
    (["--wrokers=2", "--", "ls"], "Unknown command line flag 'wrokers'. Did you mean: workers ?"),
    (["--", "no-such-program"], "command 'no-such-program': no such program here; give its path, or `python`"),
    (
        ["--kill=worker:2@step3", "--max_restarts=1", "--", "ls"],
        "--kill=worker:2@step3: there is no worker:2 in this cluster, only worker:0, worker:1",
    ),
    (
        ["--kill=worker:1", "--", "ls"],
        "--kill=worker:1: give a process and a step, as --kill=worker:0@step20",
    ),
    (
        ["--stop=worker:1@step3", "--", "ls"],
        "--stop=worker:1@step3: nothing would start the cluster again; add --max_restarts=1",
    ),
    (
        ["--workers=1", "--stop=worker:0@step3", "--max_restarts=1", "--", "ls"],
        "--stop=worker:0@step3: nobody is there to notice it; add a worker, or take --kill",
    ),
    (
        ["--kill=worker:0@step3", "--stop=worker:0@step5", "--max_restarts=1", "--", "ls"],
        "--stop=worker:0@step5: worker:0 has --kill=worker:0@step3 already; give one of them",
    ),
)


def test_mistakes(tmp_path):
    """One line each, and nothing is written."""
    ended = run_many([("launch.local", flags) for flags, _ in MISTAKES], tmp_path)
    for (flags, line), (found, folder) in zip(MISTAKES, ended, strict=True):
        assert (found.code, found.out, found.err) == (2, "", f"local: error: {line}\n"), flags
        assert list(folder.iterdir()) == []


def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    command = (sys.executable, "program.py", "--directory=file/below")
    done = run_cluster(tmp_path, "", "--workers=1", command=command)
    assert done.code == 2
    [line] = done.err.splitlines()
    assert line.startswith(f"local: error: {tmp_path}/file/below/logs/worker-0.log: Not a directory: ")
    assert line.endswith("give another --directory")
