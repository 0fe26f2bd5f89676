"""What the distribution contains besides its modules: version, license, markers of typed packages."""

import ast
import configparser
import pathlib

import pytest

import models
import strategies
import towers

ROOT = pathlib.Path(towers.__file__).parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")


def test_setup_can_read_the_version_without_an_import():
    """setuptools reads `attr:` statically only from a plain assignment of a literal."""
    assert SETUP["metadata"]["version"] == "attr: towers.__version__"
    statements = ast.parse((ROOT / "towers" / "__init__.py").read_text(encoding="utf-8")).body
    literals = {
        target.id: statement.value.value
        for statement in statements
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
    }
    assert literals["__version__"] == towers.__version__


def test_the_doctor_asks_for_the_distributions_name():
    statements = ast.parse((ROOT / "launch" / "health" / "versions.py").read_text(encoding="utf-8")).body
    names = {
        statement.targets[0].id: statement.value for statement in statements if isinstance(statement, ast.Assign)
    }
    assert ast.literal_eval(names["DISTRIBUTION"]) == SETUP["metadata"]["name"]


@pytest.mark.parametrize("package", ["towers", "models", "strategies", "launch"])
def test_each_package_is_marked_as_typed(package):
    assert (ROOT / package / "py.typed").is_file()
    assert SETUP["options.package_data"]["*"] == "py.typed, *.pyi"


@pytest.mark.parametrize("package", [towers, strategies, models])
def test_each_public_name_of_the_stub_is_found(package):
    stub = ast.parse(pathlib.Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    names = {alias.name for line in stub if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert names == set(package.__all__) <= set(dir(package))
    assert all(callable(getattr(package, name)) for name in names)


def test_the_changelog_has_the_version():
    assert f"\n## [{towers.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_gpu_extra_has_the_bounds_of_tensorflow():
    required = SETUP["options"]["install_requires"].split()
    (extra,) = SETUP["options.extras_require"]["gpu"].split()
    assert extra.replace("[and-cuda]", "") in required
