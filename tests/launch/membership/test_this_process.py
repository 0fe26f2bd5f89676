"""A process finds its cluster in TF_CONFIG, otherwise in Slurm's variables."""

from launch.membership.this_process import cluster_of_this_process

RING = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def test_tf_config_overrides_slurm_even_if_it_describes_no_cluster():
    assert cluster_of_this_process({}) is None
    assert cluster_of_this_process({"TF_CONFIG": RING}).this.address == "b:2222"
    assert cluster_of_this_process(STEP).this.address == "n2:20448"
    assert cluster_of_this_process({**STEP, "TF_CONFIG": RING}).this.address == "b:2222"
    assert cluster_of_this_process({**STEP, "TF_CONFIG": "{}"}) is None


def test_the_environment_of_this_process(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", RING)
    assert cluster_of_this_process().rank == 1
