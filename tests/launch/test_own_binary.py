"""A user's own program: one import defines all flags; its own task trains, resumes and is exported."""

import json

import pytest

from tests.launch.nursery import run_forked
from tests.launch.programs import run

pytestmark = pytest.mark.timeout(300)

PROGRAM = '''
"""Fits a line, as in the docstring of launch/training.py."""

import keras
import numpy as np
from absl import app, flags

from launch import training
from models.own_task import OwnTask

FLAGS = flags.FLAGS
flags.DEFINE_float("slope", 3.0, "Slope of the line.")


def build():
    inputs = keras.Input((1,), name="x")
    return keras.Model(inputs, keras.layers.Dense(1, name="line")(inputs))


def main(_):
    x = np.linspace(-1, 1, 101, dtype=np.float32)[:, None]
    my_task = OwnTask(
        model=build,
        train_data=(x, FLAGS.slope * x + 1),
        eval_data=(x[::2], FLAGS.slope * x[::2] + 1),
        losses=keras.losses.MeanSquaredError(),
        metric_functions={"mae": keras.metrics.mean_absolute_error},
        batch_size=20,
    )
    strategy = training.build_strategy(my_task)
    trainer = training.build_trainer(strategy)
    result = trainer.fit()
    line = trainer.strategy.portable_model().get_layer("line")
    print("found", *(round(float(value), 2) for value in (line.kernel.numpy()[0, 0], line.bias.numpy()[0])))
    print("mae", result.evaluation["mae"], "at", result.step)


if __name__ == "__main__":
    app.run(main)
'''
FLAGS = ("--num_towers=2", "--learning_rate=0.3", "--weight_decay=0", "--directory=run", "--slope=-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "line.py").write_text(PROGRAM)
    return folder


@pytest.mark.full
def test_it_trains_and_resumes(folder):
    first = run("line.py", *FLAGS, "--epochs=10", "--schedule=constant", cwd=folder)
    assert first.code == 0, first.err
    assert "found -2.0 1.0" in first.out
    assert "at 60\n" in first.out
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["examples"]) == ("completed", 1010)
    assert summary["evaluation"]["mae"] < 1e-2
    assert summary["flags"]["num_towers"] == 2
    assert (folder / "run" / "model.keras").exists()

    second = run_forked("line.py", *FLAGS, "--epochs=12", "--schedule=constant", cwd=folder)
    assert second.code == 0, second.err
    assert "resumed at step 60 of 72" in second.out


@pytest.mark.full
def test_its_help_lists_all_flags(folder):
    done = run_forked("line.py", "--helpfull", cwd=folder)
    for flag in ("--slope", "--num_towers", "--learning_rate", "--checkpoint_every_steps", "--strategy"):
        assert flag in done.out
