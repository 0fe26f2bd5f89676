"""The prepared datasets found in a folder of TFDS."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from launch.health.prepared_sets import data


@pytest.fixture
def data_dir(tmp_path):
    """A folder with a dataset that TFDS wrote, one with a configuration, and incomplete ones."""
    tfds.dataset_builders.store_as_tfds_dataset(
        name="numbers",
        version="1.2.0",
        features=tfds.features.FeaturesDict({"n": tfds.features.Scalar(np.int64)}),
        split_datasets={"train": tf.data.Dataset.from_tensor_slices({"n": [1, 2]})},
        data_dir=tmp_path,
        disable_shuffling=True,
    )
    for name in ("wiki/en/2.0.0", "mnist/3.0.1.incompleteA1", "mnist/notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "dataset_info.json").write_text("{}")
    (tmp_path / "mnist/3.0.1").mkdir()
    return tmp_path


def test_prepared_datasets_are_listed(data_dir):
    found = data(str(data_dir))
    assert found.problems == ()
    assert found.facts["prepared sets"] == ["numbers:1.2.0", "wiki/en:2.0.0"]


def test_not_given():
    assert data(None).facts == {"data_dir": "not given"}
    assert data(None).problems == ()


def test_an_empty_folder(tmp_path):
    (problem,) = data(str(tmp_path)).problems
    assert problem.startswith(
        f"--data_dir={tmp_path} contains no prepared dataset; give the folder that contains cifar10/"
    )


@pytest.mark.parametrize("name, reason", [("none", "No such file or directory"), ("file", "Not a directory")])
def test_no_folder(tmp_path, name, reason):
    (tmp_path / "file").write_text("")
    path = tmp_path / name
    (problem,) = data(str(path)).problems
    assert problem == f"--data_dir={path}: {reason}; give the folder in which TFDS prepared its datasets"


def test_the_home_folder(data_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(data_dir.parent))
    assert data(f"~/{data_dir.name}").facts["prepared sets"]
