"""An evaluator of a run with parameter servers: it evaluates the newest checkpoints while training continues."""

import json

import pytest

from launch import binary
from tests.launch.programs import ROOT
from tests.launch.server_groups import ServerGroup

pytestmark = pytest.mark.timeout(200)

LIMIT_SECONDS = 100
TRAIN = (
    str(ROOT / "tests" / "launch" / "slow_input_program.py"),
    *("--steps=30", "--checkpoint_every_steps=5", "--strategy=ps", "--num_towers=1", "--directory=run"),
)


def evaluations(folder, log) -> dict[int, float]:
    """The evaluator's losses by step."""
    records = [json.loads(line) for line in (folder / log).read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "evaluation"}


@pytest.mark.full
def test_it_evaluates_checkpoints_up_to_the_last(tmp_path):
    with ServerGroup(TRAIN, workers=1, servers=1, cwd=tmp_path) as group:
        group.start("evaluator:0")
        for name, ended in group.ends(LIMIT_SECONDS).items():
            assert ended.code == binary.DONE, (name, ended.err)
    found, chiefs = (
        evaluations(tmp_path, "run/evaluator/metrics.jsonl"),
        evaluations(tmp_path, "run/metrics.jsonl"),
    )
    assert set(found) <= set(range(5, 31, 5))
    assert found[30] == pytest.approx(chiefs[30], rel=1e-6)
    assert list((tmp_path / "run" / "evaluator" / "tensorboard").iterdir())


@pytest.mark.full
def test_it_ends_at_sigterm(tmp_path):
    with ServerGroup(TRAIN, workers=1, servers=1, cwd=tmp_path, missing=("chief:0", "worker:0", "ps:0")) as group:
        group.start("evaluator:0")
        # The evaluator creates its folder when it starts to wait for checkpoints.
        while not (tmp_path / "run" / "evaluator" / "metrics.jsonl").exists():
            assert group.processes["evaluator:0"].poll() is None
        group.processes["evaluator:0"].terminate()
        assert group.end("evaluator:0", LIMIT_SECONDS).code == binary.INTERRUPTED
