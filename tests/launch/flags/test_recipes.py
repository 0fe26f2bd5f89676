"""--recipe sets flags, the command line overrides them; cifar_fast trains, verifies and exports."""

import json

import pytest

from launch.flags.recipes import RECIPES
from tests.launch.programs import run

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]
# A run of a few seconds.
SMALL = ("--task=shapes", "--steps=4", "--batch_size=16", "--num_towers=2", "--threads_per_tower=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    done = run("-m", "launch.train", "--recipe=cifar_fast", *SMALL, "--directory=run", cwd=folder)
    assert done.code == 0, done.err
    return folder


def test_flags_of_the_command_line_override_the_recipe_s(folder):
    found = json.loads((folder / "run" / "summary.json").read_text())["flags"]
    recipe = dict(RECIPES["cifar_fast"])
    expected = recipe | {"task": "shapes", "batch_size": 16, "epochs": None, "steps": 4}
    assert {name: found[name] for name in expected} == expected


RING = ("-m", "launch.local", "--workers=2", "--", "python")


@pytest.mark.parametrize("how", [(), RING], ids=["towers", "ring"])
def test_towers_and_the_ring_give_the_numbers_of_one_device(how, tmp_path):
    """With a batch that divides unevenly, in the precision of --verify."""
    strategy = "--strategy=ring" if how else "--num_towers=3"
    small = ("--task=shapes", "--batch_size=10", "--threads_per_tower=1", "--steps=20")
    done = run(*how, "-m", "launch.train", "--recipe=cifar_fast", *small, strategy, "--verify", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "verified: largest" in done.out


def test_its_model_is_exported_with_test_time_views(folder):
    done = run(
        *("-m", "launch.export", "--directory=run", "--test_time_views", "--output=views.keras"), cwd=folder
    )
    assert done.code == 0, done.err
    assert "checked in a fresh process" in done.out
    assert (folder / "views.keras").exists()
