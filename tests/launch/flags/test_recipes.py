"""--recipe sets flags, the command line overrides them; cifar_fast trains, verifies and exports.

The recipe's network is large: the sets are a few images.
"""

import json

import pytest

from launch.flags.recipes import RECIPES
from launch.import_cifar import import_cifar
from tests.launch.cifar_archive import write_archive
from tests.launch.nursery import run_forked

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]
# A run of a few seconds. The recipe's own rate is too high for such small batches of noise.
SMALL = ("--steps=4", "--learning_rate=0.01", "--batch_size=16", "--num_towers=1", "--threads_per_tower=1")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The flag that names a prepared cifar10 of 20 training and 4 test images."""
    folder = tmp_path_factory.mktemp("cifar")
    import_cifar(
        archive=write_archive(folder / "a.tar.gz"), data_dir=str(folder / "tfds"), allow_any_checksum=True
    )
    return f"--data_dir={folder / 'tfds'}"


@pytest.fixture(scope="module")
def folder(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    done = run_forked("-m", "launch.train", "--recipe=cifar_fast", *SMALL, data_dir, "--directory=run", cwd=folder)
    assert done.code == 0, done.err
    return folder


def test_flags_of_the_command_line_override_the_recipe_s(folder):
    found = json.loads((folder / "run" / "summary.json").read_text())["flags"]
    recipe = dict(RECIPES["cifar_fast"])
    expected = recipe | {"learning_rate": 0.01, "batch_size": 16, "epochs": None, "steps": 4}
    # auto is resolved at the start.
    assert expected.pop("precision") == "auto"
    assert found["precision"] in ("float32", "bfloat16")
    assert {name: found[name] for name in expected} == expected


# The batch divides unevenly between 3 towers.
VERIFY = (
    *("-m", "launch.train", "--recipe=cifar_fast", "--task=tfds:cifar10", "--image_size=24"),
    *("--batch_size=5", "--steps=8", "--threads_per_tower=1", "--verify"),
)


def test_towers_give_the_numbers_of_one_device(data_dir, tmp_path):
    done = run_forked(*VERIFY, data_dir, "--num_towers=3", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "verified: largest" in done.out


def test_its_model_is_exported_with_test_time_views(folder):
    done = run_forked(
        *("-m", "launch.export", "--directory=run", "--test_time_views", "--output=views.keras"), cwd=folder
    )
    assert done.code == 0, done.err
    assert "checked in a fresh process" in done.out
    assert (folder / "views.keras").exists()
