"""A module or package of a user's own that shadows one of this project's is named in one line."""

import os
import pathlib
import subprocess
import sys

import lazy_loader
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
SIDE_BY_SIDE = "towers, models, strategies and launch must be found in one folder"
NO_SITE_PACKAGES = ("-S",)  # this project may be installed there
# The finder that `pip install -e` adds to sys.meta_path: it finds this project only if no folder of sys.path does.
EDITABLE = f"""
import importlib.util, sys
class Editable:
    def find_spec(name, path=None, target=None):
        if name in ("towers", "models", "strategies", "launch"):
            folder = {str(ROOT)!r} + "/" + name
            return importlib.util.spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder]
            )
sys.meta_path.append(Editable)
"""


def python(*arguments, cwd, path=(ROOT,)):
    """`python arguments...` in the folder `cwd`, with `path` as PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=variables | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=60,
    )


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise AssertionError('this file is never imported')\n")
    return path


def expected(name, found, renamed):
    return (
        f"{name!r} would be imported from {found}, not from {ROOT / name}: {SIDE_BY_SIDE}; "
        f"rename {renamed}, or start from another folder\n"
    )


@pytest.mark.parametrize(
    "name, file",
    [("models", "models.py"), ("towers", "towers/__init__.py"), ("strategies", "strategies/__init__.py")],
)
def test_a_program_of_launch_ends_with_one_line(name, file, tmp_path):
    intruder = write(tmp_path / file)
    renamed = tmp_path / file.partition("/")[0]
    done = python("-m", "launch.train", "--steps=3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train: error: " + expected(name, intruder, renamed)


@pytest.mark.parametrize("options", [("-W", "ignore", "-m", "launch.local"), ("-mlaunch.local",)], ids=str)
def test_the_program_is_recognised_after_python_s_own_options(options, tmp_path):
    write(tmp_path / "models.py")
    done = python(*options, "--", "python", "-m", "launch.train", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("local: error: 'models' would be imported from ")


def test_a_program_of_the_user_gets_an_import_error(tmp_path):
    intruder = write(tmp_path / "models.py")
    (tmp_path / "mine.py").write_text("from launch import training\n")
    for command in (("mine.py",), ("-m", "mine")):
        done = python(*command, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.endswith("\nImportError: " + expected("models", intruder, intruder))


def test_a_console_script_ends_with_one_line(tmp_path):
    intruder = write(tmp_path / "installed" / "towers" / "__init__.py")
    (tmp_path / "towers-train").write_text("from launch.train import cli\ncli()\n")
    done = python("towers-train", cwd=tmp_path, path=(tmp_path / "installed", ROOT))
    assert done.returncode == 2
    assert done.stderr == (
        f"towers-train: error: 'towers' would be imported from {intruder}, not from {ROOT / 'towers'}: "
        f"{SIDE_BY_SIDE}; rename {intruder.parent}, remove its folder from PYTHONPATH, or uninstall the "
        "distribution that brought it\n"
    )


def test_a_folder_without_init_shadows_an_editable_installation(tmp_path):
    (tmp_path / "models").mkdir()
    done = python(*NO_SITE_PACKAGES, "-c", EDITABLE + "import launch", cwd=tmp_path, path=())
    assert done.returncode == 1
    assert done.stderr.endswith("\nImportError: " + expected("models", tmp_path / "models", tmp_path / "models"))


def test_an_incomplete_installation(tmp_path):
    for name in ("launch", "towers"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = python(*NO_SITE_PACKAGES, "-c", "import launch", cwd=tmp_path, path=())
    assert done.returncode == 1
    assert f"no package 'models' in {tmp_path}: {SIDE_BY_SIDE}; install this project again" in done.stderr


def test_other_names_are_no_intruders(tmp_path):
    for name in ("model.py", "my_models/__init__.py", "data/towers.py"):
        write(tmp_path / name)
    program = "import sys, launch; print({'tensorflow', 'towers', 'models', 'strategies'} & set(sys.modules))"
    done = python("-c", program, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{'towers'}\n", "")


def test_an_editable_installation_is_found(tmp_path):
    needed = tmp_path / "site-packages"
    needed.mkdir()
    (needed / "lazy_loader").symlink_to(pathlib.Path(lazy_loader.__file__).parent)
    done = python(*NO_SITE_PACKAGES, "-c", EDITABLE + "import launch", cwd=tmp_path, path=[needed])
    assert (done.returncode, done.stderr) == (0, "")
