"""oneDNN's kernels where they are faster, and a user's own choice."""

import os
import subprocess
import sys

import pytest

from towers.hardware.fast_kernels import CPU_INFO, use_fast_kernels

_SWITCH = "TF_ENABLE_ONEDNN_OPTS"
_RUNS = """
{first}
import os
print(os.environ.get("TF_ENABLE_ONEDNN_OPTS"))
from towers.hardware.cpu_kernels import runs_onednn
print(runs_onednn())
"""
# Prints the variable and ends just before the import of TensorFlow, which reads it.
_AT_IMPORT = """
import os, sys

class Watch:
    def find_spec(name, *_):
        if name == "tensorflow":
            print(os.environ.get("TF_ENABLE_ONEDNN_OPTS"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch)
{first}
import tensorflow
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


def test_after_tensorflow_nothing_is_set(tmp_path):
    (tmp_path / "cpuinfo").write_text("flags\t\t: avx2\n")
    assert "tensorflow" in sys.modules
    environment = {}
    use_fast_kernels(environment, tmp_path / "cpuinfo")
    assert environment == {}


HAS_AVX2 = pytest.mark.skipif(
    not CPU_INFO.exists() or " avx2 " not in CPU_INFO.read_text(), reason="a CPU without AVX2"
)


@HAS_AVX2
@pytest.mark.full
@pytest.mark.parametrize(("own", "runs"), [(None, ["1", "True"]), ("0", ["0", "False"])], ids=["on", "off"])
def test_a_program_runs_them(own, runs):
    assert asked(_RUNS.format(first="from strategies import Trainer"), own) == runs


@HAS_AVX2
@pytest.mark.full
@pytest.mark.parametrize("first", ["import launch", "from towers import Task", "from models import OwnTask"])
def test_tensorflow_will_read_it(first):
    """Whichever package of ours a program imports first."""
    assert asked(_AT_IMPORT.format(first=first), None) == ["1"]


def asked(program: str, own: str | None) -> list[str]:
    """The words that a program prints.

    Args:
      program: the program's text.
      own: the variable's value at the start; None if it is not set.
    """
    environment = {name: value for name, value in os.environ.items() if name != _SWITCH}
    if own is not None:
        environment[_SWITCH] = own
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
