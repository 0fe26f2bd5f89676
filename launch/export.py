"""Exports the newest checkpoint of a run as a `.keras` file, and checks that it loads without this project.

python -m launch.export --directory=runs/NAME --output=model.keras
    exported step 395 to /path/model.keras
    checked in a fresh process: outputs agree to 1.2e-07
"""

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import keras
import numpy as np
from absl import flags

from launch import binary
from launch.evaluate import load_run, restored_trainer
from launch.flags.paths import define_path
from models.networks.views import with_test_time_views
from strategies.data_checks.batches import as_batches
from strategies.training.export import save_model
from towers.errors import UserError
from towers.task import InputShard, Task

FLAGS = flags.FLAGS
define_path("output", None, "File to write, ending in .keras. Default: model.keras in --directory.")
flags.DEFINE_bool(
    "test_time_views",
    False,
    "Export a model that averages its predictions over shifted and mirrored views of each image. This raises "
    "the accuracy of an image classifier, and a prediction takes longer.",
)
_CHECK_SECONDS = 120
_NUM_EXAMPLES = 4
_TOLERANCE = 1e-4

# Runs without this project: python -I ignores the current folder and PYTHONPATH, and the last line checks it.
_LOADER = """
import sys, numpy, keras
model = keras.saving.load_model(sys.argv[1])
given = numpy.load(sys.argv[2])
features = [given[name] for name in sorted(given.files)]
outputs = model.predict_on_batch(keras.tree.pack_sequence_as(model.input, features))
outputs = outputs.values() if isinstance(outputs, dict) else outputs
outputs = [outputs] if hasattr(outputs, "shape") else outputs
numpy.savez(sys.argv[3], *outputs)
assert not [name for name in sys.modules if name.split(".")[0] in ("towers", "strategies", "models", "launch")]
"""


def main(_) -> int:
    trainer = restored_trainer()
    model = trainer.strategy.portable_model()
    if FLAGS.test_time_views:
        model = with_test_time_views(model)
    output = pathlib.Path(FLAGS.output or pathlib.Path(FLAGS.directory) / "model.keras")
    path = save_model(model, output)
    print(f"exported step {trainer.strategy.step} to {path}")
    apart = checked_apart(model, path, first_inputs(trainer.strategy.task, model))
    print(f"checked in a fresh process: outputs agree to {apart:.1e}")
    return binary.DONE


def first_inputs(task: Task, model: keras.Model) -> list[np.ndarray]:
    """The first training examples, an array for each of the model's inputs. Real ones, so that ids are valid."""
    batch = next(iter(as_batches(task.dataset("train", InputShard()))))
    features = batch.features
    if isinstance(features, Mapping):
        features = {name: features[name] for name in model.input}
    return [np.asarray(tensor[:_NUM_EXAMPLES]) for tensor in keras.tree.flatten(features)]


def checked_apart(model: keras.Model, path: pathlib.Path, inputs: Sequence[np.ndarray]) -> float:
    """Loads the file in a new process without this project; returns the largest difference of the outputs.

    Args:
      model: the exported model.
      path: its file.
      inputs: some examples, an array for each of the model's inputs.

    Raises:
      UserError: the file does not load in that process, or not in time, or its outputs differ.
    """
    outputs = model.predict_on_batch(keras.tree.pack_sequence_as(model.input, inputs))
    expected = [np.asarray(array) for array in _leaves(outputs)]
    with tempfile.TemporaryDirectory() as folder:
        given, found = os.path.join(folder, "given.npz"), os.path.join(folder, "found.npz")
        np.savez(given, **{f"{index:03d}": array for index, array in enumerate(inputs)})
        command = [sys.executable, "-I", "-c", _LOADER, str(path), given, found]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_CHECK_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{path} is written but not checked: a fresh process did not end within {_CHECK_SECONDS} seconds; "
                "export again when the machine is less busy"
            ) from error
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or ["no error message"])[-1]
            raise UserError(
                f"{path} does not load without this project ({why}); use only Keras's own layers in the model"
            )
        with np.load(found) as arrays:
            actual = [arrays[name] for name in arrays.files]
    largest = max(float(np.abs(a - b).max(initial=0)) for a, b in zip(actual, expected, strict=True))
    if not largest <= _TOLERANCE:
        raise UserError(
            f"{path}: outputs differ by {largest:.1e} in a fresh process, above {_TOLERANCE:.0e}: a layer does "
            "not save all of its state; use only Keras's own layers in the model"
        )
    return largest


def _leaves(outputs):
    if isinstance(outputs, dict):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def cli() -> None:
    """Console script."""
    binary.run(main, trains=False, after_parsing=load_run)


if __name__ == "__main__":
    cli()
