"""The rooms: imports point down and form no cycle, and only launch/ reads the environment and names flags."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The rooms that each room may import, besides itself.
BELOW = {
    "towers": set(),
    "models": {"towers"},
    "strategies": {"towers"},
    "launch": {"towers", "models", "strategies"},
}
# This file sets the variable that TensorFlow reads at its import: a user's own program may import no other room.
SETS_ENVIRONMENT = pathlib.Path("towers/hardware/fast_kernels.py")
# A flag with its dashes (the name may follow in an f-string's braces), or a command of launch/.
FLAG_OR_COMMAND = re.compile(r"(?<![\w-])--([a-z]|$)|python3? -m launch")


@functools.cache
def syntax() -> dict[pathlib.Path, ast.Module]:
    """The rooms' files; parsing takes a second, which only the process that runs these tests should pay."""
    paths = [path for room in BELOW for path in sorted((ROOT / room).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def below_launch() -> dict[pathlib.Path, ast.Module]:
    return {path: tree for path, tree in syntax().items() if path.parts[0] != "launch"}


def module_of(path: pathlib.Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> set[str]:
    return {module_of(path) for path in syntax()}


def imported_names(node: ast.AST) -> set[str]:
    """Full names that an import statement imports: 'towers.split' for `from towers import split`."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        full = {f"{node.module}.{alias.name}" for alias in node.names}
        ours = (node.module or "").partition(".")[0] in BELOW
        return {node.module if ours and name not in modules() else name for name in full}
    return set()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything that is imported anywhere in a file or function."""
    for node in ast.walk(tree):
        for name in sorted(imported_names(node)):
            yield node.lineno, name


@functools.cache
def imports_of_files() -> dict[pathlib.Path, list[tuple[int, str]]]:
    return {path: list(imports(tree)) for path, tree in syntax().items()}


def contracted(module: str) -> str:
    """The node of a module: its folder for 'towers.updates.rules', itself for 'towers.split'."""
    return ".".join(module.split(".")[:2])


def import_graph() -> dict[str, set[str]]:
    """Which modules of ours each file imports."""
    return {module_of(path): {name for _, name in found} & modules() for path, found in imports_of_files().items()}


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # The cycle lists each node after the one that it is imported by.
        raise AssertionError("imports form a cycle: " + " <- ".join(error.args[1])) from None


def assert_none(offences: Collection[str], fix: str) -> None:
    assert not offences, "\n".join([*offences, fix])


def test_the_rooms_are_found():
    assert {"towers.split", "strategies.towers", "models.networks.registry", "launch.train"} <= modules()


def test_imports_are_absolute():
    relative = [
        f"{path}:{node.lineno}"
        for path, tree in syntax().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert_none(relative, "import by the full name")


def test_imports_point_down():
    upward = [
        f"{path}:{line} imports {name}"
        for path, found in imports_of_files().items()
        for line, name in found
        if name.partition(".")[0] in {*BELOW, "tests"} - BELOW[path.parts[0]] - {path.parts[0]}
    ]
    assert_none(upward, f"each room may import: {BELOW}")


def test_modules_form_no_import_cycle():
    assert_no_cycle(import_graph())


def test_folders_of_a_room_form_no_import_cycle():
    """Each folder in a room counts as one node, each file at a room's top as one of its own."""
    graph: dict[str, set[str]] = {}
    for module, imported in import_graph().items():
        graph.setdefault(contracted(module), set()).update(map(contracted, imported))
    assert_no_cycle({node: imported - {node} for node, imported in graph.items()})


def test_no_function_imports_a_room():
    """A function may import a heavy library. An import of ours in a function would hide a cycle."""
    hidden = [
        f"{path}:{line} imports {name}"
        for path, tree in syntax().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, name in imports(function)
        if name.partition(".")[0] in BELOW
    ]
    assert_none(hidden, "import at the top of the file")


def reads_environment(node: ast.AST) -> bool:
    """os.environ, os.getenv, os.putenv, and their names imported from os."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in names
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return False


def test_only_launch_reads_the_environment():
    readers = [
        f"{path}:{node.lineno}"
        for path, tree in below_launch().items()
        for node in ast.walk(tree)
        if reads_environment(node) and path != SETS_ENVIRONMENT
    ]
    assert_none(readers, "take an argument instead of reading the environment")


def test_only_launch_defines_flags():
    definers = [
        f"{path}:{line} imports {name}"
        for path in below_launch()
        for line, name in imports_of_files()[path]
        if name.startswith(("absl.flags", "absl.app", "argparse"))
    ]
    assert_none(definers, "take keyword arguments instead of flags")


def texts_naming_flags(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the string constants, docstrings included, that name a flag or a command of launch/."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = FLAG_OR_COMMAND.search(node.value)
            if found:
                yield node.lineno, node.value[found.start() :][:40]


def test_only_launch_names_flags():
    """A program of a user's own has no flags: a message names the argument, as in num_towers=4."""
    naming = [
        f"{path}:{line} says {text!r}"
        for path, tree in below_launch().items()
        for line, text in texts_naming_flags(tree)
    ]
    assert_none(naming, "name the argument without dashes, as in num_towers=4, and no command")


def test_rooms_are_imported_without_tensorflow():
    """A process that only supervises others must start at once and in little memory."""
    program = (
        "import sys, towers, models, strategies, launch, launch.local\n"
        "import towers.memory.zero, towers.pipeline.cut, towers.pipeline.grid, towers.pipeline.schedule_csv\n"
        "print(sorted({'tensorflow', 'keras', 'tensorflow_datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
