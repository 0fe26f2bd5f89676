"""The commands that our READMEs, docstrings and messages advise: their flags are known, and dry runs train.

A dry run uses a small network and drawn examples instead of the command's own, which may need data.
"""

import ast
import dataclasses
import pathlib
import re
import shlex

import pytest

from launch.flags.flag_in_command import flag_value
from launch.manifests.cluster_of_command import num_servers
from launch.membership.roles import Roles
from tests.launch.cluster_processes import ClusterProcesses
from tests.launch.nursery import run_forked
from tests.launch.programs import ROOT, run_many
from tests.test_readme import READMES

LIMIT_SECONDS = 100
LAUNCHERS = ("local", "slurm", "kubernetes")
IMPORTING_TENSORFLOW = ("train", "evaluate", "export", "benchmark")
PROGRAMS = (*IMPORTING_TENSORFLOW, "doctor", "import_cifar", *LAUNCHERS)
# If absl gets a flag twice, the last one counts.
IMAGES = ("--task=shapes", "--model=tiny")
# Evaluating the task's 50,000 examples in small batches would take two seconds.
CLICKS = (
    *("--task=clicks", "--model=dlrm", "--eval_batch_size=10000"),
    *("--click_tables=2", "--click_rows=20", "--click_examples=2000"),
)
DRY = ("--batch_size=32", "--precision=float32", "--num_towers=1", "--threads_per_tower=1", "--dry_run")
REPLACED = {flag.partition("=")[0] for flag in (*CLICKS, *DRY)} | {
    "--data_dir",
    "--directory",
    "--epochs",
    "--verify",
    # A dry run writes no files.
    "--timeline_steps",
}
# 'python -m launch.NAME' and all words of that command, with the '-- ' of a launcher before it.
_WORD = r"(?:--?[\w-]*(?:=(?:'[^']*'|[^\s`'\"]*))?|python|launch\.\w+|script|[\w./-]+\.(?:json|gz))"
_COMMAND = re.compile(
    rf"(?P<launched>-- )?python -m (?P<words>launch\.(?:{'|'.join(PROGRAMS)})\b(?: +{_WORD}(?=[\s`'\"),;:]|$))*)"
)


@dataclasses.dataclass(frozen=True)
class Advised:
    """A command in a text of ours.

    Attributes:
      words: the words after `python -m`.
      is_launched: the text puts it after a launcher's flags, as '--workers=2 -- python -m ...'.
    """

    words: tuple[str, ...]
    is_launched: bool

    @property
    def program(self) -> str:
        return self.words[0].removeprefix("launch.")

    @property
    def own_words(self) -> tuple[str, ...]:
        """The words before the command that a launcher starts."""
        return self.words[: self.words.index("--")] if "--" in self.words else self.words

    @property
    def training(self) -> tuple[str, ...] | None:
        """The words after `python -m` of the training that it runs or has a launcher run; None for no training."""
        words = self.words[len(self.own_words) + 3 :] if "--" in self.words else self.words
        return words if words[:1] == ("launch.train",) and "--help" not in words else None

    def roles(self) -> Roles | None:
        """The cluster in which the training runs, with two workers and at most one server; None for no cluster."""
        if self.program not in LAUNCHERS:
            return Roles(workers=2) if self.is_launched else None
        asked = int(flag_value(self.own_words, "ps") or 0)
        if self.program == "local":
            return Roles(workers=2, ps=min(1, asked), chief="--chief" in self.own_words)
        servers = min(1, num_servers(self.training, asked or None))
        return Roles(workers=2, ps=servers, chief=servers > 0)

    @property
    def dry_flags(self) -> tuple[str, ...]:
        """The flags of the training, of which a dry run replaces some."""
        names = [flag.partition("=")[0] for flag in self.training[1:]]
        kept = [flag for flag, name in zip(self.training[1:], names, strict=True) if name not in REPLACED]
        # Shapes replace images that are augmented.
        augment = ("--augment",) if "--task=cifar10" in self.training else ()
        return (*kept, *(CLICKS if "--task=clicks" in self.training else (*IMAGES, *augment)), *DRY)


def advised_in(text: str) -> list[Advised]:
    joined = re.sub(r"\\\n\s*", "", text)
    found = []
    for line in joined.splitlines():
        for match in _COMMAND.finditer(line):
            words = shlex.split(match["words"].rstrip(".,;:"))
            found.append(Advised(tuple(words), match["launched"] is not None))
    return found


def texts(path: pathlib.Path) -> list[str]:
    """The texts of a Python file: docstrings and the constant parts of messages, adjacent ones as one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in whole:
            found.append(node.value)
    return found


def all_advised() -> dict[str, Advised]:
    """The commands in the READMEs and in launch/, each once, by its first source."""
    sources = [(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")) for page in READMES]
    for path in sorted((ROOT / "launch").rglob("*.py")):
        sources += [(path.relative_to(ROOT).as_posix(), text) for text in texts(path)]
    found: dict[Advised, str] = {}
    for source, text in sources:
        for advised in advised_in(text):
            found.setdefault(advised, f"{source}: {' '.join(advised.words)}")
    return {name: advised for advised, name in found.items()}


ADVISED = all_advised()
TRAININGS = {
    (advised.roles(), advised.dry_flags): name for name, advised in reversed(ADVISED.items()) if advised.training
}


class Cluster(ClusterProcesses):
    """Context manager: the same training in each process of a cluster."""

    def __init__(self, roles: Roles, words, cwd: pathlib.Path):
        self._clusters = {cluster.this.name: cluster for cluster in roles.clusters()}
        super().__init__(next(iter(self._clusters.values())).addresses, cwd)
        self._words = words

    def start_all(self) -> None:
        for name, cluster in self._clusters.items():
            self.run(name, self._words, role=cluster.role, index=cluster.index, variables={})


def test_the_commands_are_found():
    """Otherwise the tests below might pass without any command after a change of the texts."""
    programs = {advised.program for advised in ADVISED.values()}
    assert programs == set(PROGRAMS)
    roles = [roles for roles, _ in TRAININGS]
    assert None in roles
    assert Roles(workers=2) in roles
    assert Roles(workers=2, ps=1, chief=True) in roles


def test_what_a_launcher_starts_is_for_several_processes():
    for name, advised in ADVISED.items():
        if advised.training and advised.roles() is not None:
            assert flag_value(advised.training, "strategy") in ("ring", "ps"), name


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS)
def test_their_flags_are_known(program, tmp_path):
    # A command without a flag may only name a program.
    of_program = [advised for advised in ADVISED.values() if advised.program == program and advised.words[1:]]
    flags = [[word for word in advised.own_words[1:] if word != "--help"] for advised in of_program]
    calls = [(f"launch.{program}", [*words, "--only_check_args"]) for words in flags]
    if program in IMPORTING_TENSORFLOW:
        ends = [run_forked("-m", module, *given, cwd=tmp_path) for module, given in calls]
    else:
        ends = [ended for ended, _ in run_many(calls, tmp_path)]
    assert not {shlex.join(words): ended.err for words, ended in zip(flags, ends, strict=True) if ended.code}


@pytest.mark.full
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("roles, flags", TRAININGS, ids=TRAININGS.values())
def test_a_dry_run(roles, flags, tmp_path):
    words = ("-m", "launch.train", *flags)
    if roles is None:
        ended = run_forked(*words, cwd=tmp_path)
        assert ended.code == 0, ended.err
        return
    with Cluster(roles, words, tmp_path) as cluster:
        ends = {name: cluster.end(name, LIMIT_SECONDS) for name in cluster.processes}
    assert {name: ended.code for name, ended in ends.items()} == dict.fromkeys(ends, 0), ends
