"""`python -m launch.local` as a process, with small programs as training: starts, output, exits, restarts."""

import json
import os
import re
import signal
import sys
import time

import pytest

from tests.launch.clusters import launched, network_flags, run_cluster, wait_until, wait_until_full
from tests.launch.programs import run, run_many
from tests.tiers import first_quick

pytestmark = pytest.mark.timeout(300)

STOPS_ON_A_SIGNAL = """
def stop(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
mark(name)
time.sleep(60)
"""
SIGNALS = pytest.mark.parametrize(
    "number", first_quick([signal.SIGTERM, signal.SIGINT]), ids=["SIGTERM", "SIGINT"]
)


def last_block(err: str) -> list[str]:
    """The launcher's failure report, which ends its stderr."""
    lines = err.splitlines()
    [first] = [index for index, line in enumerate(lines) if " failed: " in line]
    return lines[first:]


class TestStart:
    @pytest.fixture(scope="class")
    def found_by_name(self, tmp_path_factory):
        """What each process of a cluster with every role found, by its name."""
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

    def test_one_process_for_each_role_and_index(self, found_by_name):
        assert sorted(found_by_name) == ["chief:0", "evaluator:0", "ps:0", "worker:0", "worker:1"]
        tasks = {name: found["config"]["task"] for name, found in found_by_name.items()}
        assert tasks == {
            name: {"type": name.partition(":")[0], "index": int(name.partition(":")[2])} for name in found_by_name
        }

    def test_all_know_the_same_cluster(self, found_by_name):
        clusters = [found["config"]["cluster"] for found in found_by_name.values()]
        assert all(cluster == clusters[0] for cluster in clusters)
        assert {role: len(addresses) for role, addresses in clusters[0].items()} == {
            "chief": 1,
            "worker": 2,
            "ps": 1,
        }, "an evaluator is not a member"
        addresses = [address for of_role in clusters[0].values() for address in of_role]
        assert len(set(addresses)) == 4
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)

    def test_environment(self, found_by_name):
        for found in found_by_name.values():
            environment = found["environment"]
            assert environment["TOWERS_PROCESSES_HERE"] == "3", "parameter servers and their chief don't compute"
            shared = environment.get("CUDA_VISIBLE_DEVICES", "all")
            assert environment["TOWERS_SHARED_GPUS"] == shared, "so that they know that all see the same GPUs"
            assert environment["PYTHONUNBUFFERED"] == "1"
            assert re.fullmatch(
                re.escape(found["here"]) + r"/runs/\d{8}-\d{6}-\d+", environment["TOWERS_RUN_DIRECTORY"]
            )
            assert "TOWERS_FAULT" not in environment

    def test_processes_have_their_own_session_and_no_input(self, found_by_name):
        assert all(found["session"] for found in found_by_name.values())
        assert all(found["input"] == "" for found in found_by_name.values())


def test_the_commands_directory_is_the_runs_directory(tmp_path):
    program = "print(os.environ['TOWERS_RUN_DIRECTORY'], sys.argv[1:])"
    command = ("python", "program.py", "--directory=mine", "--", "more")
    done = run_cluster(tmp_path, program, "--workers=1", command=command)
    assert done.out == f"[worker:0] {tmp_path}/mine ['--directory=mine', '--', 'more']\n"
    assert (tmp_path / "mine" / "logs" / "worker-0.log").exists()


def test_a_directory_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_cluster(tmp_path, "", "--workers=1", command=("python", "program.py", "--directory=~/mine"))
    assert (tmp_path / "home" / "mine" / "logs" / "worker-0.log").exists()


class TestLines:
    PROGRAM = r"""
if index == 0:
    os.write(1, b"out \xff\n\nlong" + b"x" * 100000 + b"\nno end")
else:
    os.write(2, b"err\n[not markup]\n")
"""

    def test_lines_have_a_prefix_on_the_screen_and_none_in_the_logs(self, tmp_path):
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

    def test_each_line_is_shown_at_once(self, tmp_path):
        with launched(tmp_path, "print('now'); until_marked('seen')", "--workers=1") as cluster:
            assert cluster.process.stdout.readline() == "[worker:0] now\n"
            (tmp_path / "seen").touch()
            assert cluster.ended().code == 0

    def test_processes_go_on_when_the_reader_is_gone(self, tmp_path):
        """For example after Ctrl-C has ended the `| tee`."""
        program = "mark(name); until_marked('gone'); [print(i) for i in range(1000)]; print('last')"
        with launched(tmp_path, program, "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            cluster.process.stdout.close()
            (tmp_path / "gone").touch()
            assert cluster.process.wait(60) == 0
            assert cluster.process.stderr.read() == ""
        assert cluster.log("worker:0").endswith("999\nlast\n")

    @pytest.mark.full
    def test_a_pipe_that_another_session_holds_open(self, tmp_path):
        """The launcher can't end a process in another session. It shows its output but does not wait for it."""
        program = "subprocess.Popen(['sh', '-c', 'sleep 0.3; echo late $$; sleep 60'], start_new_session=True)"
        with launched(tmp_path, program, "--workers=1") as cluster:
            beginning, _, session = cluster.process.stdout.readline().rpartition(" ")
            assert beginning == "[worker:0] late"
            begin = time.monotonic()
            assert cluster.process.wait(60) == 0
            assert time.monotonic() - begin < 4
            # The process in the other session lives, and holds the pipe.
            os.killpg(int(session), signal.SIGKILL)


DEFAULT_SECONDS = """
from absl import flags
from launch import binary, local

flags.FLAGS(["local"])
plan = local.plan_from_flags(["python", "program.py"])
print(plan.seconds_to_save == binary.SECONDS_TO_SAVE, plan.seconds_to_notice < plan.seconds_to_save)
"""


def test_processes_have_as_long_to_save_as_under_the_other_launchers(tmp_path):
    assert run("-c", DEFAULT_SECONDS, cwd=tmp_path).out == "True True\n"


class TestSignals:
    @SIGNALS
    def test_a_signal_is_forwarded_to_all(self, tmp_path, number):
        with launched(tmp_path, STOPS_ON_A_SIGNAL, "--workers=2", "--chief", "--evaluator") as cluster:
            names = ("chief:0", "worker:0", "worker:1", "evaluator:0")
            cluster.wait_for(*names)
            cluster.process.send_signal(number)
            done = cluster.ended()
        assert (done.code, done.err) == (75, "")
        assert sorted(done.out.splitlines()) == sorted(f"[{name}] heard {number.name}" for name in names)

    @SIGNALS
    def test_a_reader_of_its_output_that_is_stopped(self, tmp_path, number):
        """The pipe is full, and the launcher waits for its reader; the processes wait for the launcher."""
        program = """
def stop(number, frame):
    mark(f"{name} heard")
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
try:
    while True:
        print("a line " * 100, flush=True)
finally:
    os.write(1, b"\\nthe last line\\n")
"""
        with launched(tmp_path, program, "--workers=2") as cluster:
            wait_until_full(cluster.process.stdout.fileno())
            cluster.process.send_signal(number)
            cluster.wait_for("worker:0 heard", "worker:1 heard")
            assert cluster.process.wait(60) == 75
            assert cluster.log("worker:1").endswith("\nthe last line\n"), "the log has what was not read"

    def test_processes_that_still_start(self, tmp_path):
        """They don't handle signals yet, so SIGTERM kills them; they had nothing to save."""
        with launched(tmp_path, "mark(name)\ntime.sleep(60)", "--workers=2", "--max_restarts=1") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            cluster.process.send_signal(signal.SIGTERM)
            done = cluster.ended()
        assert (done.code, done.out, done.err) == (75, "", "")

    @pytest.mark.full
    def test_a_second_signal_is_forwarded_too(self, tmp_path):
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
            assert cluster.ended().code == 75, "the processes exit with 0 after a signal"

    def test_a_process_that_ignores_the_signal_is_killed(self, tmp_path):
        program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmark(name)\n" + (
            "sys.exit(75) if index == 0 else time.sleep(60)"
        )
        with launched(tmp_path, program, "--workers=2", "--grace_seconds=0.5") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            cluster.process.send_signal(signal.SIGTERM)
            done = cluster.ended()
        assert done.code == 128 + signal.SIGKILL
        assert last_block(done.err)[0].startswith("worker:1 failed: killed by SIGKILL")

    def test_servers_are_not_signalled_until_the_others_have_ended(self, tmp_path):
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

    def test_a_script_and_the_processes_that_it_started(self, tmp_path):
        """The signal reaches the whole process group, as a terminal's signal does."""
        command = ("sh", "-c", f"{sys.executable} program.py; true")
        with launched(tmp_path, STOPS_ON_A_SIGNAL, "--workers=1", command=command) as cluster:
            cluster.wait_for("worker:0")
            cluster.process.send_signal(signal.SIGINT)
            done = cluster.ended()
        assert "[worker:0] heard SIGINT" in done.out


class TestFailure:
    def test_the_report_begins_with_the_cause(self, tmp_path):
        """worker:0 ends before worker:1, but only because it lost worker:1."""
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
        assert re.fullmatch(r"worker:1 failed: exit code 7; last lines of \S+/logs/worker-1\.log:", first)
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

    def test_the_launchers_starter_ignores_sigchld(self, tmp_path):
        """Some daemons do. The launcher inherits that, and would not learn how its processes end."""
        # One worker: of two, either could be the first to fail.
        command = ("-m", "launch.local", *network_flags(), "--workers=1", "--", "sh", "-c", "exit 3")
        starter = f"""
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *{command}])
"""
        done = run("-c", starter, cwd=tmp_path)
        assert done.code == 3
        assert last_block(done.err)[0].startswith("worker:0 failed: exit code 3 (")

    def test_all_processes_lost_a_peer(self, tmp_path):
        done = run_cluster(tmp_path, "time.sleep(index / 2); sys.exit(5)", "--workers=2")
        assert done.code == 5
        assert last_block(done.err)[0].startswith("worker:0 failed: exit code 5 (a peer was lost);")

    def test_the_others_may_end_by_themselves_in_the_grace_period(self, tmp_path):
        program = STOPS_ON_A_SIGNAL.replace("time.sleep(60)", "time.sleep(0.5)") + "print('in time')"
        program = f"if index == 1: sys.exit(3)\n{program}"
        done = run_cluster(tmp_path, program, "--workers=2")
        assert (done.code, done.out) == (3, "[worker:0] in time\n")

    @pytest.mark.full
    def test_after_the_grace_period_sigterm_and_then_sigkill(self, tmp_path):
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

    def test_a_stopped_process_is_the_cause(self, tmp_path):
        """Its peer failed first, by a timeout. SIGTERM can't end a stopped process: it is killed at once."""
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
        assert time.monotonic() - begin < 25, "less than the grace period"
        assert done.code == 128 + signal.SIGKILL
        block = last_block(done.err)
        assert block[0].startswith("worker:1 failed: stopped by a signal, hung until the launcher killed it; ")
        assert block[-1] == "worker:0: exit code 5 (a peer was lost)"

    @pytest.mark.full
    def test_all_processes_were_interrupted_by_others(self, tmp_path):
        """For example if a scheduler sends SIGTERM to the processes themselves: all is saved, nothing failed."""
        done = run_cluster(tmp_path, "sys.exit(75)", "--workers=2", "--max_restarts=1")
        assert (done.code, done.out, done.err) == (75, "", "")

    def test_a_program_that_cannot_be_executed(self, tmp_path):
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

    def test_servers_are_ended_when_the_workers_have_ended(self, tmp_path):
        done = self.run(tmp_path, ["ps"], ["ps:0", "ps:1"], "--workers=2", "--ps=2")
        assert (done.code, done.err) == (0, "")
        assert sorted(done.out.splitlines()) == ["[worker:0] done", "[worker:1] done"]

    def test_workers_are_ended_when_their_chief_has_ended(self, tmp_path):
        names = ["worker:0", "worker:1", "ps:0"]
        done = self.run(tmp_path, ["ps", "worker"], names, "--workers=2", "--ps=1", "--chief")
        assert (done.code, done.out, done.err) == (0, "[chief:0] done\n", "")

    def test_servers_serve_the_evaluator_until_it_has_ended(self, tmp_path):
        program = """
if role == "worker":
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: (mark("ended"), sys.exit(0)))
if role == "ps":
    mark("serves")
    time.sleep(60)
until_marked("serves")
time.sleep(0.5)
print("not served" if (here / "ended").exists() else "served")
"""
        done = run_cluster(tmp_path, program, "--workers=1", "--ps=1", "--evaluator")
        assert (done.code, done.out) == (0, "[evaluator:0] served\n")
        assert (tmp_path / "ended").exists()

    @pytest.mark.full
    def test_in_a_ring_workers_go_on_after_the_chief(self, tmp_path):
        program = "role == 'worker' and time.sleep(1); print('done')"
        done = run_cluster(tmp_path, program, "--workers=1", "--chief")
        assert (done.code, done.out) == (0, "[chief:0] done\n[worker:0] done\n")

    @pytest.mark.full
    def test_a_server_that_ignores_sigterm_is_killed(self, tmp_path):
        program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark(name)\n" + (
            "time.sleep(60) if role == 'ps' else until_marked('ps:0')"
        )
        done = run_cluster(tmp_path, program, "--workers=1", "--ps=1", "--grace_seconds=0.5")
        assert (done.code, done.err) == (0, "")

    @pytest.mark.full
    def test_a_server_that_fails_is_the_cause(self, tmp_path):
        program = "role == 'ps' and sys.exit(4); time.sleep(60)"
        done = run_cluster(tmp_path, program, "--workers=1", "--ps=1", "--grace_seconds=0.5")
        assert done.code == 4
        assert last_block(done.err)[0].startswith("ps:0 failed: exit code 4 (a loss or gradient was not finite);")


class TestRestarts:
    PROGRAM = """
starts = here / f"{name} starts"
with starts.open("a") as file:
    file.write(json.dumps(config["cluster"]) + "\\n")
start = len(starts.read_text().splitlines())
with (here / f"{name} times").open("a") as file:
    print(time.monotonic(), file=file)
print("start", start)
"""

    def test_restarts_until_training_completes(self, tmp_path):
        program = self.PROGRAM + "sys.exit(1 if index == 1 and start < 3 else 0)"
        with launched(tmp_path, program, "--workers=2", "--max_restarts=5") as cluster:
            done = cluster.ended()
        assert (done.code, done.err) == (0, "")
        [directory] = (tmp_path / "runs").iterdir()
        reports = [line for line in done.out.splitlines() if line.startswith("restart")]
        log = f"{directory}/logs/worker-1.log"
        heads = ("restart 1 of 5", "restart 2 of 5 in 2 s")
        assert reports == [f"{head}: worker:1 failed: exit code 1; its log: {log}" for head in heads]
        times = [float(line) for line in (tmp_path / "worker:1 times").read_text().splitlines()]
        assert times[2] - times[1] >= 2, "a second failure that follows at once waits"
        clusters = {(tmp_path / f"worker:{n} starts").read_text() for n in (0, 1)}
        [lines] = [text.splitlines() for text in clusters]
        assert len(set(lines)) == 3, "new ports at each start"
        assert re.fullmatch(
            r"start 1\n--- start 2, .{19} ---\nstart 2\n--- start 3, .{19} ---\nstart 3\n", cluster.log("worker:1")
        )

    @pytest.mark.full
    def test_no_more_restarts_than_the_maximum(self, tmp_path):
        program = self.PROGRAM + "sys.exit(10 + start)"
        done = run_cluster(tmp_path, program, "--workers=1", "--max_restarts=1")
        assert done.code == 12
        block = last_block(done.err)
        assert block[0].startswith("worker:0 failed: exit code 12;")
        assert block[1:] == ["    start 2"], "lines of the last start only"

    @pytest.mark.full
    def test_a_signal_ends_a_pause(self, tmp_path):
        """During the pause the launcher has no process. As after any other interruption, everything is saved."""
        with launched(tmp_path, "sys.exit(1)", "--workers=1", "--max_restarts=9") as cluster:
            next(line for line in cluster.process.stdout if line.startswith("restart 3 of 9 in 4 s: "))
            begin = time.monotonic()
            cluster.process.send_signal(signal.SIGINT)
            done = cluster.ended()
            assert time.monotonic() - begin < 3
        assert (done.code, done.out, done.err) == (75, "", "interrupted by SIGINT before restart 3\n")

    @pytest.mark.parametrize("code", first_quick([2, 3, 4]))
    def test_no_restart_that_would_fail_again(self, tmp_path, code):
        done = run_cluster(tmp_path, self.PROGRAM + f"sys.exit({code})", "--workers=1", "--max_restarts=2")
        assert (done.code, done.out) == (code, "[worker:0] start 1\n")

    def test_no_restart_after_a_signal(self, tmp_path):
        program = self.PROGRAM + STOPS_ON_A_SIGNAL.replace("sys.exit(75)", "sys.exit(1)")
        with launched(tmp_path, program, "--workers=1", "--max_restarts=2") as cluster:
            cluster.wait_for("worker:0")
            cluster.process.send_signal(signal.SIGTERM)
            done = cluster.ended()
        assert (done.code, done.out) == (1, "[worker:0] start 1\n[worker:0] heard SIGTERM\n")


class TestFaults:
    """Programs that execute the fault in TOWERS_FAULT, as launch/supervision/fault_injection.py does."""

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

    @pytest.mark.full
    @pytest.mark.parametrize("kind, done", [("kill", "killed"), ("stop", "stopped")], ids=["kill", "stop"])
    def test_recovered(self, tmp_path, kind, done):
        program = f"EXPECTED = True\n{self.PROGRAM}"
        found = run_cluster(tmp_path, program, "--workers=2", f"--{kind}=worker:1@step20", "--max_restarts=1")
        assert found.code == 0, found.err
        first, last = found.out.splitlines()
        assert first.startswith("restart 1 of 1: worker:1 failed: ")
        assert last == f"recovered: worker:1 was {done} at step 20, restart 1 completed"

    def test_workers_of_servers_continue_without_a_killed_one(self, tmp_path):
        program = f"EXPECTED = False\n{self.PROGRAM}\ntime.sleep(60) if name == 'ps:0' else until_marked('fault')"
        done = run_cluster(tmp_path, program, "--workers=2", "--ps=1", "--chief", "--kill=worker:1@step20")
        assert done.code == 0, done.err
        assert "warning: worker:1 was lost: killed by SIGKILL; the others continued without it" in done.err
        assert done.out.splitlines()[-1] == "recovered: worker:1 was killed at step 20, the others completed"

    def test_a_fault_that_did_not_happen(self, tmp_path):
        program = f"EXPECTED = False\n{self.PROGRAM}"
        done = run_cluster(tmp_path, program, "--workers=2", "--kill=worker:1@step50", "--max_restarts=1")
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            "local: error: --kill=worker:1@step50: the fault did not happen, because worker:1 did not begin "
            "step 50 before any restart; choose an earlier step\n"
        )

    @pytest.mark.full
    @pytest.mark.parametrize("flag", ["--kill=worker:1@step20", "--stop=worker:0@step20"])
    def test_a_restart_with_another_cause_is_no_recovery(self, tmp_path, flag):
        program = """
if not (here / "again").exists():
    until_marked("ready") if index == 1 else mark("ready")
    mark("again") if index == 1 else time.sleep(60)
    sys.exit(1)
"""
        done = run_cluster(tmp_path, program, "--workers=2", flag, "--max_restarts=1", "--grace_seconds=0.5")
        assert done.code == 2, done.out
        assert f"{flag}: the fault did not happen" in done.err

    def test_a_cluster_that_does_not_recover(self, tmp_path):
        program = f"EXPECTED = False\n{self.PROGRAM}\nsys.exit(6 if (here / 'fault').exists() else 0)"
        done = run_cluster(tmp_path, program, "--workers=1", "--kill=worker:0@step20", "--max_restarts=1")
        assert done.code == 6
        assert "recovered" not in done.out


class TestNothingIsLeft:
    """As in every test here, `launched` fails if a process still runs at the end."""

    FAMILY = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
mark(name)
"""
    # A launcher with a bug, which raises while the cluster runs.
    BROKEN = """
import os, sys
from launch import local
from launch.supervision import supervisor

def broken(self):
    if {"worker:0", "worker:1"} <= set(os.listdir()):
        raise RuntimeError("a bug of the launcher")

supervisor.Supervisor._collect_exits = broken
sys.argv = ["local.py", "--workers=2", "--", "python", "program.py"]
local.cli()
"""

    def test_after_the_launcher_was_killed(self, tmp_path):
        program = self.FAMILY + "time.sleep(60)"
        with launched(tmp_path, program, "--workers=2", "--ps=1") as cluster:
            cluster.wait_for("worker:0", "worker:1", "ps:0")
            assert len(cluster.left()) == 8, "the launcher, the guard, three processes with one child each"
            cluster.process.kill()

    @pytest.mark.full
    def test_after_the_guard_was_killed_too(self, tmp_path):
        """When the launcher dies, the kernel kills the launcher's own children, without the guard."""
        with launched(tmp_path, "mark(name); time.sleep(600)", "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            [guard] = [process for process in cluster.left() if "group_guard.py" in " ".join(process.cmdline())]
            guard.kill()
            cluster.process.kill()

    def test_after_a_process_has_ended(self, tmp_path):
        program = self.FAMILY + "until_marked('end' if index == 0 else 'seen')"
        with launched(tmp_path, program, "--workers=2") as cluster:
            cluster.wait_for("worker:0", "worker:1")
            assert len(cluster.left()) == 6, "the launcher, the guard, two processes with one child each"
            (tmp_path / "end").touch()
            wait_until(lambda: len(cluster.left()) == 4, seconds=20)
            (tmp_path / "seen").touch()
            assert cluster.ended().code == 0

    def test_after_a_bug_of_the_launcher(self, tmp_path):
        (tmp_path / "broken.py").write_text(self.BROKEN)
        program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + self.FAMILY + "time.sleep(60)"
        with launched(tmp_path, program, "--workers=1", command=("python", "broken.py")) as cluster:
            done = cluster.ended()
        assert done.code == 1
        assert "RuntimeError: a bug of the launcher" in done.err


MISTAKES = (
    ([], "no command: give one after --, for example --workers=2 -- python -m launch.train --strategy=ring"),
    (
        ["--workers=2", "--"],
        "no command: give one after --, for example --workers=2 -- python -m launch.train --strategy=ring",
    ),
    (["--workers=0", "--", "ls"], "flag --workers=0: give a number above 0"),
    (["--ps=-1", "--", "ls"], "flag --ps=-1: give 0 or more"),
    (["--wrokers=2", "--", "ls"], "Unknown command line flag 'wrokers'. Did you mean: workers ?"),
    (
        ["--max_restarts=1", "--", "train", "--resume=never"],
        "--resume=never: a restart would begin at step 0; omit --resume",
    ),
    (["--", "no-such-program"], "command 'no-such-program': program not found; give its path, or `python`"),
    (
        ["--kill=worker:2@step3", "--max_restarts=1", "--", "ls"],
        "--kill=worker:2@step3: this cluster has no worker:2; name one of worker:0, worker:1",
    ),
    (
        ["--ps=1", "--chief", "--kill=ps:0@step3", "--max_restarts=1", "--", "ls"],
        "--kill=ps:0@step3: ps:0 takes no steps, so the fault would never happen; name one of chief:0, worker:0, "
        "worker:1",
    ),
    (
        ["--kill=worker:1", "--", "ls"],
        "--kill=worker:1: give a process and a step, for example --kill=worker:0@step20",
    ),
    (
        ["--stop=worker:1@step3", "--", "ls"],
        "--stop=worker:1@step3: the cluster would not restart after the fault; add --max_restarts=1",
    ),
    (
        ["--ps=1", "--chief", "--kill=worker:0@step3", "--kill=worker:1@step3", "--", "ls"],
        "--kill=worker:1@step3: the cluster would not restart after the fault; add --max_restarts=1",
    ),
    (
        ["--workers=1", "--stop=worker:0@step3", "--max_restarts=1", "--", "ls"],
        "--stop=worker:0@step3: no other worker would notice that worker:0 hangs; add a worker, or use --kill",
    ),
    (
        ["--kill=worker:0@step3", "--stop=worker:0@step5", "--max_restarts=1", "--", "ls"],
        "--stop=worker:0@step5: worker:0 already has --kill=worker:0@step3; give one fault for each process",
    ),
)


def test_mistakes(tmp_path):
    """Each gives an error of one line and writes nothing."""
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
    assert line.startswith(f"local: error: {tmp_path}/file/below/logs/worker-0.log: can't write a log there ")
    assert line.endswith("(Not a directory); give another --directory")
