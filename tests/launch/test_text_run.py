"""`launch.train`, `launch.evaluate` and `launch.export` on the drawn text, as a user types them."""

import json

import keras
import numpy as np
import pytest

from tests.launch.nursery import run_forked
from tests.launch.server_groups import ServerGroup
from tests.launch.server_runs import all_end

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

FLAGS = (
    "--task=text",
    "--model=transformer_tiny",
    "--text_tokens=8",
    "--text_length=10",
    "--text_examples=200",
    "--text_dropout=0.1",
    "--batch_size=32",
    "--num_towers=2",
    "--threads_per_tower=1",
    "--steps=10",
    "--directory=run",
)


def own_lines(errors: str) -> str:
    """The lines but one: TensorFlow 2.21 writes it as an error on CPUs with oneDNN, but goes on training."""
    return "".join(line for line in errors.splitlines(True) if "oneDNN supports DT_INT64 only" not in line)


def test_a_run_is_trained_evaluated_and_exported(tmp_path):
    calls = {
        "train": FLAGS,
        "evaluate": ("--directory=run", "--json"),
        "export": ("--directory=run", "--output=other.keras"),
    }
    ends = {name: run_forked("-m", f"launch.{name}", *flags, cwd=tmp_path) for name, flags in calls.items()}
    assert {name: (ended.code, own_lines(ended.err)) for name, ended in ends.items()} == dict.fromkeys(
        calls, (0, "")
    )
    evaluation = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    assert set(evaluation) == {"loss", "accuracy"}
    assert json.loads(ends["evaluate"].out) == {"step": 10, **evaluation}
    tokens = np.random.default_rng(0).integers(0, 8, (3, 10))
    logits = [keras.models.load_model(tmp_path / file)(tokens) for file in ("run/model.keras", "other.keras")]
    assert logits[0].shape == (3, 10, 8)
    np.testing.assert_array_equal(*logits)


def test_the_layout_of_slices_is_printed_and_nothing_is_written(tmp_path):
    flags = [flag for flag in FLAGS if not flag.startswith("--num_towers")]
    layout = ("--strategy=slices", "--layout=*/mlp_down=columns", "--show_layout")
    ended = run_forked("-m", "launch.train", *flags, *layout, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    rows = {line.split()[0]: line for line in ended.out.splitlines()}
    assert "all-gather" in rows["block_0/mlp_down/kernel"] and "heads" in rows["block_1/attention/query/kernel"]
    assert list(tmp_path.iterdir()) == []


def test_parameter_servers_train_and_evaluate_a_model_with_gelu(tmp_path):
    """TensorFlow's servers refuse the compiled GELU that a single process uses."""
    command = ("-m", "launch.train", *FLAGS, "--strategy=ps", "--num_towers=1", "--steps=2")
    with ServerGroup(command, workers=1, servers=1, cwd=tmp_path) as group:
        all_end(group)
    assert set(json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]) == {"loss", "accuracy"}
