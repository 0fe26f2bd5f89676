"""The layers: imports point down, in no circle, and only `launch` reads the environment."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What each room may import of the rooms, besides itself.
BELOW = {
    "towers": set(),
    "models": {"towers"},
    "strategies": {"towers"},
    "launch": {"towers", "models", "strategies"},
}
FILES = [path for room in BELOW for path in sorted((ROOT / room).rglob("*.py"))]
SYNTAX = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imported(path: pathlib.Path) -> set[str]:
    """Full names that a file imports anywhere in it, 'towers.split' for `from towers import split`."""
    found = set()
    for node in ast.walk(SYNTAX[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = node.module.partition(".")[0] in BELOW
            found |= {node.module if ours and name not in MODULES else name for name in names}
    return found


def test_there_is_something_to_look_at():
    assert {"towers.split", "strategies.towers", "models.networks.registry"} <= MODULES


@every_file
def test_imports_point_down(path):
    room = path.relative_to(ROOT).parts[0]
    rooms = {name.partition(".")[0] for name in imported(path)} & {*BELOW, "tests"}
    above = rooms - BELOW[room] - {room}
    assert not above, f"{room} may import {sorted(BELOW[room]) or 'no room'}, this imports {sorted(above)}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {module_of(path): imported(path) & MODULES for path in FILES}
    # Raises CycleError, which names the circle.
    graphlib.TopologicalSorter(graph).prepare()


@every_file
def test_no_import_of_ours_hides_in_a_function(path):
    """A heavy library may; a room's module would be dodging a circle."""
    functions = [
        node for node in ast.walk(SYNTAX[path]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for function in functions:
        for node in ast.walk(function):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            hidden = [name for name in names if name.partition(".")[0] in BELOW]
            assert not hidden, f"{function.name} imports {hidden}"


def reads_environment(node: ast.AST) -> bool:
    """os.environ, os.getenv, os.putenv, and their names imported from os."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in names
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return False


def below_launch(path: pathlib.Path) -> bool:
    return path.relative_to(ROOT).parts[0] != "launch"


@pytest.mark.parametrize("path", [path for path in FILES if below_launch(path)], ids=module_of)
def test_only_launch_reads_the_environment(path):
    lines = [node.lineno for node in ast.walk(SYNTAX[path]) if reads_environment(node)]
    assert not lines, f"reads the environment in lines {lines}; give it an argument instead"


@pytest.mark.parametrize("path", [path for path in FILES if below_launch(path)], ids=module_of)
def test_only_launch_knows_flags(path):
    flags = {name for name in imported(path) if name.startswith(("absl.flags", "absl.app", "argparse"))}
    assert not flags, f"imports {sorted(flags)}; take keyword arguments instead"
