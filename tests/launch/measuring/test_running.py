"""A row's processes: how they end, their errors, their hosts, and that none is left behind."""

import contextlib
import json
import os
import sys
import time

import psutil
import pytest

from launch.measuring.case import Case, Work
from launch.measuring.peer_on_hosts import on_hosts
from launch.measuring.running import Interrupted, run_case
from launch.networks.network_namespaces import namespaces
from strategies.errors import PeerLost
from tests.launch.programs import started
from tests.launch.system_networks import needs_hosts, needs_private_network
from tests.towers.user_errors import refused

pytestmark = pytest.mark.timeout(100)
LIMIT_SECONDS = 30

# Worker 0 receives what worker 1 sends, and prints the rate of its link in megabits a second. Started without
# TF_CONFIG, it starts two processes and sets TF_CONFIG itself, as the peers' programs do.
TRANSFER = """
import json, os, socket, subprocess, sys, time
MEGABYTES = 6
if "--rank" in sys.argv:
    workers = [f"127.0.0.1:{23000 + rank}" for rank in range(2)]
    task = {"type": "worker", "index": int(sys.argv[-1])}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
elif "TF_CONFIG" not in os.environ:
    ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)]) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["worker"][0].split(":")
if config["task"]["index"] == 0:
    peer, _ = socket.create_server((host, int(port))).accept()
    began, received = time.monotonic(), 0
    while chunk := peer.recv(1 << 20):
        received += len(chunk)
    assert received == MEGABYTES * 1_000_000
    rate = 8 * MEGABYTES / (time.monotonic() - began)
    print(json.dumps({"images_per_second": rate, "address": host}))
else:
    for attempt in range(200):
        try:
            server = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.05)
    server.sendall(bytes(MEGABYTES * 1_000_000))
"""

# Starts a process that runs on, writes its id into a file, and ends as asked: with an exit code, or never.
STAYS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
if sys.argv[2] == "never":
    time.sleep(60)
print("{}", flush=True)
sys.exit(int(sys.argv[2]))
"""
# Each worker has an argument 'seconds,code,line': when it ends, its exit code and its last line.
ENDS = """
import json, os, sys, time
seconds, code, line = sys.argv[1 + json.loads(os.environ["TF_CONFIG"])["task"]["index"]].split(",")
time.sleep(float(seconds))
print(line, file=sys.stderr, flush=True)
os._exit(int(code))
"""


def case(program: str, *arguments: str, link="none", count=0, name="row", **more) -> Case:
    """A row whose processes run the text `program`."""
    processes = {"worker": count} if count else {}
    command = (sys.executable, "-c", program, *arguments)
    return Case(name, Work("ring", count or 2, "tiny", 8, link=link), command, processes, **more)


def run(row: Case, timeout_seconds: float = LIMIT_SECONDS, is_interrupted=lambda: False) -> dict:
    return run_case(row, timeout_seconds=timeout_seconds, is_interrupted=is_interrupted)


def all_end(pids: list[int]) -> bool:
    """Whether all these processes end within some seconds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_measurement_is_the_last_line_of_the_first_process():
    program = "import json, os; print('x'); print(json.dumps(json.loads(os.environ['TF_CONFIG'])['task']))"
    found = run(case(program, count=2))
    assert (found["type"], found["index"]) == ("worker", 0)
    assert "peak_memory_bytes" in found


@pytest.mark.full
@needs_private_network
def test_its_servers_are_reached_from_the_row_alone():
    program = "import json, socket; print(json.dumps({'found': [name for _, name in socket.if_nameindex()]}))"
    assert run(case(program, count=2))["found"] == ["lo"]
    assert run(case(program))["found"] == ["lo"]


def test_a_program_that_prints_no_measurement_is_an_error():
    with pytest.raises(PeerLost, match="row: its last line is no measurement but 'done'"):
        run(case("print('done')"))


class TestAFailureIsOneLineAtOnce:
    def fails(self, *ends: str) -> str:
        """The error of a row whose workers end as `ends` says."""
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            run(case(ENDS, *ends, count=len(ends)), timeout_seconds=50)
        assert time.monotonic() - began < LIMIT_SECONDS
        return str(caught.value)

    @pytest.mark.full
    def test_a_crash_names_the_process_and_its_last_line(self):
        assert self.fails("60,0,x", "0.2,1,boom") == "row: worker:1 failed, exit code 1: boom"

    def test_a_process_that_lost_its_peer_is_not_the_cause(self):
        assert self.fails("0,5,lost worker:1", "0.3,7,out of memory") == (
            "row: worker:1 failed, exit code 7: out of memory"
        )

    @pytest.mark.full
    def test_a_users_mistake_stays_one(self):
        with refused("row: worker:0 failed, exit code 2 (a user error): batch_size=0 is too small"):
            run(case(ENDS, "0,2,benchmark: error: batch_size=0 is too small", "60,0,x", count=2))

    @pytest.mark.full
    def test_a_row_that_takes_too_long(self):
        with pytest.raises(PeerLost, match="row: worker:1 did not end within --row_timeout_seconds=1; raise it"):
            run(case(ENDS, "0,0,x", "60,0,x", count=2), timeout_seconds=1)


class TestNoProcessIsLeft:
    @pytest.mark.parametrize(
        "end, error", [("0", None), ("1", PeerLost), ("never", PeerLost)], ids=["done", "failed", "too long"]
    )
    @pytest.mark.full
    def test_of_those_that_a_program_started(self, tmp_path, end, error):
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            run(case(STAYS, str(tmp_path / "id"), end), timeout_seconds=2)
        assert all_end([int((tmp_path / "id").read_text())])

    def test_after_an_interruption(self, tmp_path):
        path = tmp_path / "id"
        with pytest.raises(Interrupted):
            run(case(STAYS, str(path), "never"), is_interrupted=lambda: path.exists() and bool(path.read_text()))
        assert all_end([int(path.read_text())])


class TestEachProcessIsOnItsHost:
    def test_a_peer_is_told_the_addresses_of_the_hosts(self):
        cluster = {"chief": ["127.0.0.1:70"], "ps": ["127.0.0.1:71"], "worker": ["127.0.0.1:72", "127.0.0.1:73"]}
        places = [(f"/run/netns/{host}", f"10.0.0.{host}") for host in range(4)]
        text, namespace = on_hosts(
            json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}), places
        )
        assert namespace == "/run/netns/3"
        assert json.loads(text) == {
            "cluster": {
                "chief": ["10.0.0.0:70"],
                "ps": ["10.0.0.1:71"],
                "worker": ["10.0.0.2:72", "10.0.0.3:73"],
            },
            "task": {"type": "worker", "index": 1},
        }

    @pytest.mark.full
    @needs_hosts
    @pytest.mark.parametrize("is_peer", [False, True])
    def test_a_link_has_its_rate(self, tmp_path, is_peer):
        program = tmp_path / "transfer.py"
        program.write_text(TRANSFER)
        row = Case(
            "transfer",
            Work("ring", 2, "tiny", 8, link="100mbit"),
            (sys.executable, str(program)),
            {} if is_peer else {"worker": 2},
            is_peer=is_peer,
            num_processes=2 if is_peer else 1,
        )
        found = run(row)
        assert found["address"] == "10.77.0.1"
        assert 70 < found["images_per_second"] < 130
        assert namespaces() == []


@needs_hosts
class TestNoHostIsLeft:
    def test_after_a_failure(self):
        with pytest.raises(PeerLost):
            run(case("raise SystemExit(7)", count=2, link="1gbit"))
        assert namespaces() == []

    def test_after_an_interruption(self):
        made = []

        def is_interrupted() -> bool:
            made.append(len(namespaces()))
            return len(made) > 1

        with pytest.raises(Interrupted):
            run(case("import time; time.sleep(60)", link="1gbit", count=2), is_interrupted=is_interrupted)
        # The namespaces of two hosts and the switch.
        assert made == [3, 3]
        assert namespaces() == []

    @pytest.mark.full
    def test_after_sigterm_to_the_benchmark(self, tmp_path):
        order = ("-m", "launch.benchmark", "--row=ring/own,2,tiny,8", "--link=1gbit", "--output=found")
        with started(*order, cwd=tmp_path) as benchmark:
            children = _children_in_hosts(benchmark.pid)
            benchmark.terminate()
            out, err = benchmark.communicate(timeout=LIMIT_SECONDS)
        assert benchmark.returncode == 75, err
        assert "interrupted by SIGTERM" in err
        assert "Traceback" not in err
        assert "no row was measured" in out
        assert all_end(children)
        assert not [name for name in os.listdir("/run/netns") if f"-{benchmark.pid}-" in name]


def _children_in_hosts(pid: int) -> list[int]:
    """The processes of a benchmark's first row, which has two workers; waits until they run."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        found = psutil.Process(pid).children(recursive=True)
        # A process may end between the two lines.
        with contextlib.suppress(psutil.NoSuchProcess):
            if len([one for one in found if "--measure=step" in " ".join(one.cmdline())]) == 2:
                return [one.pid for one in found]
        assert time.monotonic() < deadline
        time.sleep(0.05)
