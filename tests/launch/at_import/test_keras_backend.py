"""A Keras backend other than TensorFlow is named in one line, whether it is installed or not."""

import json
import subprocess
import sys

import pytest

from launch.at_import.keras_backend import keras_backend
from tests.launch.programs import LIMIT_SECONDS, environment

REFUSED = (
    "the Keras backend is {!r}, but this project needs tensorflow: unset KERAS_BACKEND, or set it to tensorflow"
)


def python(*arguments, cwd, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


@pytest.mark.parametrize("program", ["train", "doctor"])
def test_a_program_of_launch_ends_with_one_line(program, tmp_path):
    done = python("-m", f"launch.{program}", cwd=tmp_path, KERAS_BACKEND="torch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{program}: error: {REFUSED.format('torch')}, which overrides ~/.keras/keras.json\n"


def test_a_program_of_the_user_gets_an_import_error(tmp_path):
    """Here with the numpy backend, which is always installed."""
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "numpy"}))
    done = python("-c", "import launch", cwd=tmp_path, KERAS_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"ImportError: {REFUSED.format('numpy')}" in done.stderr


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"floatx": "float32"}'])
def test_without_another_one_it_is_tensorflow(text, tmp_path):
    (tmp_path / "keras.json").write_text(text)
    assert keras_backend({"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": ""}) == "tensorflow"
    assert keras_backend({"KERAS_HOME": str(tmp_path / "none")}) == "tensorflow"
