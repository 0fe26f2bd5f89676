"""A user's own program: one import defines all flags; its own task trains, resumes and is exported."""

import json

import pytest

from tests.launch.nursery import forked, run_forked
from tests.launch.programs import ended, run, wait_for
from tests.tiers import first_quick

pytestmark = pytest.mark.timeout(300)

PROGRAM = '''
"""Fits a line, as in the docstring of launch/training.py."""

import os
import signal

from launch import binary, training

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from models.own_task import OwnTask

FLAGS = flags.FLAGS
flags.DEFINE_string("signal_in", None, "Part of the program in which it receives SIGINT.")
flags.DEFINE_float("slope", 3.0, "Slope of the line.")


def reached(part):
    if FLAGS.signal_in == part:
        os.kill(os.getpid(), signal.SIGINT)


def build():
    reached("model")
    inputs = keras.Input((1,), name="x")
    return keras.Model(inputs, keras.layers.Dense(1, name="line")(inputs))


def loss(labels, outputs):
    if not tf.executing_eagerly():
        reached("tracing")
    return keras.losses.mean_absolute_error(labels, outputs)


def main(_):
    reached("main")
    x = np.linspace(-1, 1, 101, dtype=np.float32)[:, None]
    my_task = OwnTask(
        model=build,
        train_data=(x, FLAGS.slope * x + 1),
        eval_data=(x[::2], FLAGS.slope * x[::2] + 1),
        losses=keras.losses.MeanSquaredError(),
        metric_functions={"mae": loss},
        batch_size=20,
    )
    strategy = training.build_strategy(my_task)
    trainer = training.build_trainer(strategy)
    result = trainer.fit()
    line = trainer.strategy.portable_model().get_layer("line")
    print("found", *(round(float(value), 2) for value in (line.kernel.numpy()[0, 0], line.bias.numpy()[0])))
    print("mae", result.evaluation["mae"], "at", result.step)


if __name__ == "__main__":
    binary.run(main)
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
def test_a_recipe_of_the_built_in_tasks_is_refused(folder):
    """Not run in a fork, because a fork has the flags of launch.train."""
    done = run("line.py", *FLAGS, "--recipe=cifar_fast", cwd=folder)
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith("line: error: --recipe=cifar_fast sets --task, which this program does not have")


@pytest.mark.parametrize("part", first_quick(["model", "main"]))
def test_ctrl_c_before_training_is_one_line(folder, part):
    done = run_forked("line.py", *FLAGS, "--directory=early", f"--signal_in={part}", cwd=folder)
    assert (done.code, done.out) == (75, "")
    assert done.err == (
        "line: interrupted by SIGINT: the same command starts again, from the last checkpoint if there is one\n"
    )
    assert not (folder / "early").exists()


def test_ctrl_c_while_the_first_step_is_traced_saves(folder):
    done = run_forked("line.py", *FLAGS, "--directory=traced", "--signal_in=tracing", cwd=folder)
    assert (done.code, done.err) == (75, "")
    assert "\nSIGINT: stopped at step 1; to resume" in done.out
    assert (folder / "traced" / "checkpoints" / "step-1.index").exists()


def test_sigterm_saves_and_the_same_command_resumes(folder):
    command = ("line.py", *FLAGS, "--directory=stopped", "--epochs=4", "--report_every_steps=1")
    with forked(*command, "--epochs=100000", cwd=folder) as process:
        wait_for(folder / "stopped" / "metrics.jsonl", process)
        process.terminate()
        stopped = ended(process)
    assert (stopped.code, stopped.err) == (75, "")
    [notice] = [line for line in stopped.out.splitlines() if line.startswith("SIGTERM: stopped at step ")]
    assert f"--directory={folder / 'stopped'}" in notice
    assert "found" not in stopped.out, "the rest of the program is for complete runs"
    assert (folder / "stopped" / "flags.txt").exists()
    step = int(notice.partition("step ")[2].partition(";")[0])
    again = run_forked("line.py", *FLAGS, "--directory=stopped", f"--steps={step + 1}", cwd=folder)
    assert again.code == 0, again.err
    assert f"resumed at step {step} of {step + 1}" in again.out


@pytest.mark.full
def test_it_knows_verify(folder):
    done = run_forked("line.py", *FLAGS, "--directory=verified", "--verify", cwd=folder)
    assert done.code == 0, done.err
    assert "\nverified: largest " in done.out
    assert not (folder / "verified").exists()


@pytest.mark.full
def test_its_help_lists_all_flags(folder):
    done = run_forked("line.py", "--helpfull", cwd=folder)
    for flag in ("--slope", "--num_towers", "--learning_rate", "--checkpoint_every_steps", "--strategy"):
        assert flag in done.out
