"""`python -m launch.doctor --selftest` as a user runs it: two processes connect or time out, and always end."""

import json
import pathlib
import re
import time

import psutil
import pytest

from launch.health.selftest_worker import PRECISIONS, SIZES_MIB
from tests.launch.programs import LIMIT_SECONDS, listing, run, started
from tests.launch.shadowing import write_intruders

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

COMMAND = ("-m", "launch.doctor", "--selftest")


def workers_in(folder: pathlib.Path) -> list[psutil.Process]:
    """Processes of self-tests that were started in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if "launch.health.selftest_worker" in command and process.info["cwd"] == str(folder):
            found.append(process)
    return found


def wait_for_workers(folder: pathlib.Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(workers_in(folder)) != count:
        assert time.monotonic() < deadline, f"{len(workers_in(folder))} run, not {count}"
        time.sleep(0.05)


def test_each_size_and_wire_precision_has_its_time_and_speed(tmp_path):
    """In a folder whose modules would shadow ours in the two processes; -P protects the doctor itself."""
    write_intruders(tmp_path)
    intruders = listing(tmp_path)
    ended = run("-P", *COMMAND, "--json", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert found["problems"] == []
    facts = found["facts"]["selftest"]
    assert list(facts) == [f"{precision} {mib} MiB" for precision in PRECISIONS for mib in SIZES_MIB]
    for name, fact in facts.items():
        milliseconds, speed = map(float, re.fullmatch(r"([\d.]+) ms, ([\d.]+) GiB/s", fact).groups())
        mebibytes = int(name.split()[1])
        assert speed == pytest.approx(mebibytes / 1.024 / milliseconds, abs=0.02, rel=0.02)
        assert 0 < speed < 100, "between two processes of one machine"
    assert workers_in(tmp_path) == []
    assert listing(tmp_path) == intruders, "the self-test must write no file"


# A doctor whose second worker sleeps instead of joining.
ONE_SLEEPS = """
import sys
from launch import doctor
from launch.health import selftest

worker = "import json, os, runpy, time; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
worker += "time.sleep(100) if rank else runpy.run_module('launch.health.selftest_worker', run_name='__main__')"
selftest._COMMAND = (sys.executable, "-c", worker)
sys.argv = ["doctor.py", "--selftest", "--selftest_timeout_seconds=0.5"]
doctor.cli()
"""


def test_processes_that_do_not_connect_before_the_timeout(tmp_path):
    ended = run("-c", ONE_SLEEPS, cwd=tmp_path)
    assert (ended.code, ended.err) == (2, "")
    [problem] = ended.out.partition("\nproblems:\n")[2].splitlines()
    assert problem.startswith("  self-test: two processes of this machine could not connect on 127.0.0.1")
    assert "--selftest_timeout_seconds=0.5" in problem


def test_no_process_is_left_when_the_doctor_is_killed(tmp_path):
    """The workers are suspended, so they can't have ended by themselves."""
    with started(*COMMAND, cwd=tmp_path) as doctor:
        wait_for_workers(tmp_path, 2)
        for worker in workers_in(tmp_path):
            worker.suspend()
        doctor.kill()
        wait_for_workers(tmp_path, 0)
