"""The exported model loads without this project, and a failing export leaves the older file."""

import json
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

from models.own_task import OwnTask
from strategies.registry import build_strategy
from strategies.training.export import save_model
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.strategies.small_task import random_task, small_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.task import InputShard

IMAGES = np.random.default_rng(0).normal(size=(5, 6, 6, 3)).astype(np.float32)

# Run with -I: Python imports neither from the current folder nor from PYTHONPATH.
LOADER = """
import json, sys, numpy, keras
model = keras.saving.load_model(sys.argv[1])
outputs = model.predict_on_batch(numpy.load(sys.argv[2]))
ours = [name for name in sys.modules if name.split(".")[0] in ("towers", "strategies", "models", "launch")]
dtypes = sorted({str(variable.dtype) for variable in model.weights if "seed" not in variable.path})
print(json.dumps({"outputs": outputs.tolist(), "ours": ours, "dtypes": dtypes}))
"""


# An export that is killed while it writes.
SLOW_EXPORT = """
import pathlib, sys, time
from strategies.training.export import save_model
class Slow:
    def save(self, where):
        pathlib.Path(where).write_bytes(b"half")
        print("half written", flush=True)
        time.sleep(100)
save_model(Slow(), pathlib.Path(sys.argv[1]))
"""


def tiny_model(bias: float) -> keras.Model:
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(bias))(inputs)
    return keras.Model(inputs, outputs)


def bias_of(path) -> float:
    return float(keras.saving.load_model(path).weights[1][0])


@pytest.mark.full
@pytest.mark.timeout(120)
def test_it_loads_in_a_fresh_process(kept_run, tmp_path):
    """A network with batch norm and dropout, trained on two towers."""
    path = shutil.copy(kept_run.result.files["model"], tmp_path / "model.keras")
    np.save(tmp_path / "images.npy", IMAGES)
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOADER, str(path), str(tmp_path / "images.npy")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] == []
    assert found["dtypes"] == ["float32"]
    expected = kept_run.strategy.portable_model().predict_on_batch(IMAGES)
    assert np.ptp(expected) > 0.1, "equal outputs would prove nothing"
    np.testing.assert_array_equal(np.array(found["outputs"], np.float32), expected)


def test_the_models_loss_and_accuracy_are_those_of_the_run(kept_run):
    """Over the held-out examples."""
    model = keras.saving.load_model(kept_run.result.files["model"])
    images, labels = [], []
    for batch in random_task().dataset("eval", InputShard()):
        images.append(batch.features.numpy())
        labels.append(batch.labels.numpy())
    outputs, labels = model.predict_on_batch(np.concatenate(images)), np.concatenate(labels)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, outputs)
    assert float(loss) == pytest.approx(kept_run.result.evaluation["loss"], rel=1e-5)
    assert (outputs.argmax(1) == labels).mean() == pytest.approx(kept_run.result.evaluation["accuracy"])


@pytest.mark.parametrize("precision", first_quick(["bfloat16", "float64"]))
def test_it_is_float32_whatever_the_precision_of_training(precision, tmp_path):
    strategy = small_strategy(random_task(), precision=precision)
    path = Trainer(strategy, TrainerOptions(steps=1)).export(tmp_path / "deep" / "model.keras")
    model = keras.saving.load_model(path)
    assert model.dtype_policy.name == "float32"
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


@pytest.mark.parametrize("name", ["model.h5", "model", "model.keras.zip"])
def test_another_suffix_is_refused(name, tmp_path):
    with refused(str(tmp_path / name), "ends in .keras", "use "):
        save_model(tiny_model(1.0), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_older_file_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tiny_model(1.0), pathlib.Path("model.keras"))
    assert save_model(tiny_model(2.0), pathlib.Path("model.keras")) == tmp_path / "model.keras"
    assert bias_of(tmp_path / "model.keras") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_a_failing_save_leaves_the_older_file(tmp_path):
    path = save_model(tiny_model(1.0), tmp_path / "model.keras")

    class Failing:
        def save(self, where):
            pathlib.Path(where).write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with refused(str(path), "No space left on device", "another path"):
        save_model(Failing(), path)
    assert bias_of(path) == 1.0
    assert [found.name for found in tmp_path.iterdir()] == ["model.keras"]


@pytest.mark.timeout(120)
@pytest.mark.full
def test_the_next_export_removes_what_a_killed_one_left(tmp_path):
    """It keeps the files of an export that is still running, and a user's files with similar names."""
    path, users = tmp_path / "model.keras", {"tmp12345678.keras", "model.keras.new", "model.keras.12345678.new"}
    (tmp_path / "tmp12345678.keras").write_text("of a user")
    (tmp_path / "model.keras.new").mkdir()
    (tmp_path / "model.keras.12345678.new").mkdir()
    with subprocess.Popen([sys.executable, "-c", SLOW_EXPORT, path], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"half written\n"
            save_model(tiny_model(1.0), path)
            names = {found.name for found in tmp_path.iterdir()}
            assert len(names - users) == 2, f"a process writes beside the file: {names}"
        finally:
            process.kill()
    save_model(tiny_model(2.0), path)
    assert {found.name for found in tmp_path.iterdir()} == {"model.keras", *users}
    assert bias_of(path) == 2.0


def test_a_full_disk_leaves_the_older_file(small_disk, fill):
    disk = small_disk(256)
    path = save_model(tiny_model(1.0), disk / "model.keras")
    fill(disk / "filler")
    with open(disk / "filler", "rb+") as filler:
        filler.truncate((disk / "filler").stat().st_size - 8192)
    with refused(str(path), "No space left on device"):
        save_model(tiny_model(2.0), path)
    assert bias_of(path) == 1.0
    assert sorted(found.name for found in disk.iterdir()) == ["filler", "model.keras"]


class WithArgument(keras.Model):
    """A model without a configuration, so Keras can't construct it again."""

    def __init__(self, width):
        super().__init__()
        self.head = keras.layers.Dense(width)

    def call(self, inputs):
        return self.head(inputs)


def test_a_model_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    """Not only after the last step. A run that saves nothing trains the model."""

    def build():
        model = WithArgument(2)
        model(IMAGES[:, 0, 0])
        return model

    labels = np.zeros(len(IMAGES), np.int64)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = OwnTask(model=build, train_data=(IMAGES[:, 0, 0], labels), losses=losses, batch_size=5)
    strategy = build_strategy("towers", task, cpus(1), StepOptions())
    directory = tmp_path / "run"
    with refused("can't be saved", "Object WithArgument", "get_config()"):
        Trainer(strategy, TrainerOptions(steps=1, directory=directory)).fit()
    assert strategy.step == 0 and not directory.exists()
    assert Trainer(strategy, TrainerOptions(steps=1)).fit().completed


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with refused(str(tmp_path / "file" / "model.keras"), "can't write the model there"):
        save_model(tiny_model(1.0), tmp_path / "file" / "model.keras")
