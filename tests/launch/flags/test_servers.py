"""A cluster that cannot run parameter servers is refused with the command that starts one."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import training
from tests.towers.user_errors import refused

START_ALL = "python -m launch.local --chief --workers=2 --ps=1 -- python -m launch.train --strategy=ps"


@pytest.fixture
def ps(monkeypatch):
    """Sets --strategy=ps outside of any cluster."""
    for variable in ("TF_CONFIG", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        flags.FLAGS.strategy = "ps"
        yield


def test_one_process_alone(ps):
    with refused("--strategy=ps needs several processes", "TF_CONFIG", START_ALL):
        training.serve_if_server()


@pytest.mark.parametrize("missing", ["chief", "worker"])
def test_a_missing_role(ps, missing, monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    del cluster[missing]
    if missing == "chief":
        del cluster["ps"]
    config = {"cluster": cluster, "task": {"type": next(iter(cluster)), "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with refused("--strategy=ps", f"no process of role {missing!r}", "add it to TF_CONFIG", START_ALL):
        training.serve_if_server()
