"""A ring, and parameter servers, that `srun` of a real Slurm starts."""

import sys

import pytest

from launch.manifests.slurm_script import Job, batch_script
from tests.launch.programs import LAST_STEP, assert_same_end
from tests.launch.server_runs import PROGRAM, check_counts
from tests.launch.slurm_node import needs_slurm, slurm_nodes
from tests.launch.workers import TRAIN


@needs_slurm
@pytest.mark.timeout(280)
def test_srun_starts_a_ring_without_tf_config(tmp_path, undisturbed, monkeypatch):
    """The cluster is read from Slurm's variables; the result is bit-equal to that of a ring with TF_CONFIG."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with slurm_nodes() as slurm:
        ended = slurm.run("srun", "--ntasks=2", "--label", sys.executable, *TRAIN, cwd=tmp_path)
    assert ended.code == 0, ended.err
    tasks = {line.partition(":")[0].strip() for line in ended.out.splitlines()}
    assert tasks == {"0"}, ended.out
    assert f"step {LAST_STEP}/{LAST_STEP}" in ended.out
    assert ended.out.count("checkpoint: ") == 1
    assert_same_end(tmp_path / "run", undisturbed.directory)


@needs_slurm
@pytest.mark.timeout(280)
def test_a_batch_script_starts_parameter_servers(tmp_path, monkeypatch):
    """Of four tasks, one is the chief, one a server and two are workers."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("SECONDS_PER_BATCH", "0")
    command = [sys.executable, *PROGRAM, "--engine=tensorflow"]
    (tmp_path / "run").mkdir()
    (tmp_path / "job").write_text(batch_script(Job(tasks_per_node=4), command))
    with slurm_nodes() as slurm:
        ended = slurm.run("sbatch", "--wait", "--output=out", "job", cwd=tmp_path)
    assert ended.code == 0, ended.err + (tmp_path / "out").read_text()
    assert set(check_counts(tmp_path)["workers"]) == {"worker:0", "worker:1"}
