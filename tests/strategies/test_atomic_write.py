"""A file has its old contents until the new ones are on the disk."""

import errno
import os

import keras
import pytest

from strategies.atomic_write import write_atomically
from strategies.training.export import save_model
from tests.towers.user_errors import refused


@pytest.fixture
def failing_disk(monkeypatch):
    """A disk that fails when the system writes buffered data to it."""

    def fsync(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_file_keeps_its_contents(tmp_path, failing_disk):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(OSError, match="output error"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_model_keeps_its_contents(tmp_path, failing_disk):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with refused(f"{path}: can't write the model there"):
        save_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model.keras"]
