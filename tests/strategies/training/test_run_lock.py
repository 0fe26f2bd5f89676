"""One process at a time writes a run's files."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from strategies.callbacks import Callback
from strategies.training.run_lock import LOCK_FILE, RunLock
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import small_strategy
from tests.tiers import first_quick
from tests.towers.user_errors import refused

_HOLDER = """
import pathlib, sys, time
from strategies.training.run_lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
lock.acquire(create=True)
print("locked", flush=True)
time.sleep(100)
"""


def fit(directory, steps=3, callbacks=(), **options):
    options = TrainerOptions(steps=steps, directory=directory, report_every_steps=1, **options)
    return Trainer(small_strategy(), options, callbacks=callbacks, stop_requested=lambda: False).fit()


@pytest.mark.parametrize("resume", first_quick(["never", "auto"]))
def test_a_second_run_is_refused_and_the_first_one_loses_nothing(tmp_path, resume):
    class SecondRun(Callback):
        def before_steps(self, step):
            if step == 2:
                with refused(f"directory={tmp_path}", f"process {os.getpid()} on ", "only one run at a time"):
                    fit(tmp_path, resume=resume)

    assert fit(tmp_path, callbacks=[SecondRun()], checkpoint_every_steps=1).completed
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3]
    assert fit(tmp_path, steps=4).completed


def test_a_run_that_fails_gives_the_lock_back(tmp_path):
    class Failing(Callback):
        def steps(self, report):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[Failing()])
    lock = RunLock(tmp_path)
    lock.acquire(create=False)
    lock.release()


def test_a_killed_process_holds_no_lock(tmp_path):
    with subprocess.Popen([sys.executable, "-c", _HOLDER, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        lock = RunLock(tmp_path)
        try:
            with refused(f"process {holder.pid} on "):
                lock.acquire(create=True)
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        assert (tmp_path / LOCK_FILE).exists()
        lock.acquire(create=True)
        lock.release()


def test_a_file_system_without_locks_trains(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert fit(tmp_path).completed
