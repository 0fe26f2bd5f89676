"""Embedding tables on parameter servers of both engines: no worker holds a table, and a bad id is one line."""

import json

import numpy as np
import pytest

from launch.binary import DONE, USER_ERROR
from launch.measuring.memory_watch import MemoryWatch
from tests.launch.programs import ROOT, checkpoint_values, errors
from tests.launch.server_groups import ServerGroup
from tests.launch.server_runs import outputs
from tests.towers.control_group_files import real_memory_group

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

PROGRAM = (
    str(ROOT / "tests" / "launch" / "lookups_program.py"),
    "--strategy=ps",
    "--num_towers=1",
    "--steps=12",
    "--evaluate_every_epochs=100",
    "--learning_rate=0.5",
    "--directory=run",
)
LIMIT_SECONDS = 60
ROWS = 1_000_000
TABLE_MIB = ROWS * 16 * 4 // 2**20

both = pytest.mark.parametrize("engine", ["tensorflow", "own"])


def group(cwd, *flags: str, workers: int = 1, **variables: str) -> ServerGroup:
    names = ["chief:0", "ps:0", "ps:1", *(f"worker:{index}" for index in range(workers))]
    return ServerGroup(
        (*PROGRAM, *flags), workers=workers, servers=2, cwd=cwd, variables=dict.fromkeys(names, variables)
    )


@both
def test_no_worker_holds_the_table(tmp_path, engine):
    with group(tmp_path, f"--engine={engine}", "--optimizer=sgd", ROWS=str(ROWS)) as processes:
        pids = {name: [process.pid] for name, process in processes.processes.items()}
        with MemoryWatch(pids["chief:0"]) as of_chief, MemoryWatch(pids["worker:0"]) as of_worker:
            ends = processes.ends(LIMIT_SECONDS)
    assert {ended.code for ended in ends.values()} == {DONE}, outputs(ends)
    assert "1,000,000 rows: workers pull and push the rows of their batches" in ends["chief:0"].out
    # The chief has at least one copy of the table; everything else is the same in both processes.
    assert of_worker.peak_bytes < of_chief.peak_bytes - 0.8 * TABLE_MIB * 2**20
    servers = json.loads((tmp_path / "run" / "summary.json").read_text())["parameter_servers"]["servers"]
    for server in servers.values():
        assert server["kept_bytes"] == pytest.approx(TABLE_MIB * 2**20 / 2, rel=0.001)
        # The first values, and 12 steps of at most 48 rows of 64 bytes and the small vector.
        assert server["sent_bytes"] < TABLE_MIB * 2**20 * 0.6


@both
def test_lazy_updates_change_only_named_rows(tmp_path, engine):
    flags = ("--optimizer=adam", "--sparse_updates=lazy", "--checkpoint_every_steps=4")
    with group(tmp_path, f"--engine={engine}", *flags) as processes:
        ends = processes.ends(LIMIT_SECONDS)
    assert {ended.code for ended in ends.values()} == {DONE}, outputs(ends)
    assert "lazy updates change only those rows" in ends["chief:0"].out
    saved = checkpoint_values(tmp_path / "run", 12)
    (moment,) = (value for name, value in saved.items() if "second_moment" in name and "words" in name)
    named = np.unique(np.random.default_rng(0).integers(0, 1000, (96, 2)))
    np.testing.assert_array_equal(np.flatnonzero(moment.any(axis=1)), named)


@both
def test_an_id_outside_its_table_is_one_line(tmp_path, engine):
    # With our own servers the worker fails, and they wait for another one, as after any worker's end.
    where = {"own": "worker:0", "tensorflow": "chief:0"}[engine]
    with group(tmp_path, f"--engine={engine}", BAD_FROM="2") as processes:
        ended = processes.end(where, LIMIT_SECONDS)
    assert ended.code == USER_ERROR, outputs({where: ended})
    (line,) = errors(ended)
    assert "words/embeddings: id 1" in line and "it has 1000 rows, ids 0 to 999" in line
    assert "Traceback" not in ended.err


@both
def test_a_server_without_the_memory_for_its_part_is_named(tmp_path, engine):
    # Table and momentum of 488 MiB each, on two servers: each server keeps 488 MiB.
    rows = 8_000_000
    with (
        real_memory_group(400 * 2**20) as small,
        group(tmp_path, f"--engine={engine}", "--optimizer=momentum", ROWS=str(rows)) as processes,
    ):
        (small / "cgroup.procs").write_text(str(processes.processes["ps:1"].pid))
        ended = processes.end("chief:0", LIMIT_SECONDS)
        processes.ends(LIMIT_SECONDS)
    assert ended.code == USER_ERROR, outputs({"chief:0": ended})
    (line,) = errors(ended)
    assert "ps:1 can get" in line and "its part of parameters and slots takes 0.477 GiB" in line
    assert "start more servers" in line
