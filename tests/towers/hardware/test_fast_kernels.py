"""oneDNN's kernels where they are faster, and a user's own choice."""

import os
import subprocess
import sys

import pytest

from towers.hardware.fast_kernels import CPU_INFO, use_fast_kernels

_SWITCH = "TF_ENABLE_ONEDNN_OPTS"
_ASKED = """
{first}
import os
print(os.environ.get("TF_ENABLE_ONEDNN_OPTS"))
from towers.hardware.cpu_kernels import runs_onednn
print(runs_onednn())
"""


@pytest.fixture
def before_tensorflow(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [("sse4_2 avx avx2 fma", "1"), ("avx avx2 avx512f avx512_vnni", "1"), ("sse4_2 avx", None), (None, None)],
    ids=["avx2", "avx512", "avx", "no_file"],
)
def test_what_the_cpu_has(before_tensorflow, tmp_path, flags, chosen):
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"model name\t: Some CPU\nflags\t\t: fpu {flags}\n\n" * 2)
    environment = {}
    use_fast_kernels(environment, info)
    assert environment.get(_SWITCH) == chosen


def test_a_value_of_the_users_stands(before_tensorflow, tmp_path):
    (tmp_path / "cpuinfo").write_text("flags\t\t: avx2\n")
    environment = {_SWITCH: "0"}
    use_fast_kernels(environment, tmp_path / "cpuinfo")
    assert environment == {_SWITCH: "0"}


@pytest.mark.full
@pytest.mark.skipif(not CPU_INFO.exists() or " avx2 " not in CPU_INFO.read_text(), reason="a CPU without AVX2")
@pytest.mark.parametrize(
    ("first", "own", "runs"),
    [
        ("from strategies import Trainer", None, ["1", "True"]),
        ("from strategies import Trainer", "0", ["0", "False"]),
        ("import launch", None, ["1", "True"]),
        ("from towers import Task", None, ["1", "True"]),
        ("from models import OwnTask", None, ["1", "True"]),
        ("import tensorflow, strategies", "0", ["0", "False"]),
    ],
    ids=["strategies", "off", "launch", "towers", "models", "off after TensorFlow"],
)
def test_a_program_runs_them(first, own, runs):
    """Whichever package of ours a program imports first."""
    assert asked(first, own) == runs


@pytest.mark.full
def test_after_tensorflow_nothing_is_set():
    switch, _ = asked("import tensorflow, strategies", None)
    assert switch == "None"


def asked(first: str, own: str | None) -> list[str]:
    """The variable in a process of its own, and whether oneDNN's kernels run there.

    Args:
      first: the first import.
      own: the variable's value at the start; None if it is not set.
    """
    environment = {name: value for name, value in os.environ.items() if name != _SWITCH}
    if own is not None:
        environment[_SWITCH] = own
    done = subprocess.run(
        [sys.executable, "-c", _ASKED.format(first=first)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
