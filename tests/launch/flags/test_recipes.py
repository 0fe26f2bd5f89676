"""Recipes: flags by name, what is given beside them comes first; the one there is, from training to its file."""

import json

import pytest

from launch.flags.recipes import RECIPES
from tests.launch.programs import run

pytestmark = pytest.mark.timeout(240)
# A few seconds' worth.
SMALL = ("--task=shapes", "--steps=4", "--batch_size=16", "--num_towers=2", "--threads_per_tower=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    done = run("-m", "launch.train", "--recipe=cifar_fast", *SMALL, "--directory=run", cwd=folder)
    assert done.code == 0, done.err
    return folder


def test_given_flags_come_first(folder):
    found = json.loads((folder / "run" / "summary.json").read_text())["flags"]
    recipe = dict(RECIPES["cifar_fast"])
    expected = recipe | {"task": "shapes", "batch_size": 16, "epochs": None, "steps": 4}
    assert {name: found[name] for name in expected} == expected


RING = ("-m", "launch.local", "--workers=2", "--", "python")


@pytest.mark.parametrize("how", [(), RING], ids=["towers", "ring"])
def test_towers_and_the_ring_train_it_as_one_device_does(how, tmp_path):
    """The recipe as it is, of a batch of uneven parts, in the precision of --verify."""
    strategy = "--strategy=ring" if how else "--num_towers=3"
    small = ("--task=shapes", "--batch_size=10", "--threads_per_tower=1", "--steps=20")
    done = run(*how, "-m", "launch.train", "--recipe=cifar_fast", *small, strategy, "--verify", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "verified: largest" in done.out


def test_its_model_is_exported_with_views(folder):
    done = run(
        *("-m", "launch.export", "--directory=run", "--test_time_views", "--output=views.keras"), cwd=folder
    )
    assert done.code == 0, done.err
    assert "checked in a fresh process" in done.out
    assert (folder / "views.keras").exists()
