"""Launchers do not import TensorFlow, and other programs import it without its notices."""

import pytest

from tests.launch.nursery import run_forked
from tests.launch.programs import run


@pytest.mark.parametrize("module", ["local", "membership.tf_config", "binary"])
def test_a_launcher_imports_no_tensorflow(tmp_path, module):
    done = run("-c", f"import sys, launch.{module}; print('tensorflow' in sys.modules)", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "False\n", "")


@pytest.mark.full
def test_tensorflow_is_quiet(tmp_path):
    program = "import launch, tensorflow as tf; print(tf.config.list_physical_devices('CPU')[0].name)"
    done = run("-c", program, cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "/physical_device:CPU:0\n", "")


def test_notices_are_printed_if_the_import_fails(tmp_path):
    broken = "import os\nos.write(2, b'no such library\\n')\nraise ImportError('broken')\n"
    (tmp_path / "tensorflow.py").write_text(broken)
    program = f"import sys, launch; sys.path.insert(0, {str(tmp_path)!r}); import tensorflow"
    done = run("-c", program, cwd=tmp_path)
    assert done.code == 1
    assert done.err.startswith("no such library\n")
    assert done.err.endswith("ImportError: broken\n")


@pytest.mark.full
def test_a_flag_that_ends_tensorflow_is_named(tmp_path, monkeypatch):
    program = "import launch, tensorflow"
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory=cache")
    done = run("-c", program, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_cache=cache")
    done = run("-c", program, cwd=tmp_path)
    assert done.code == 1
    assert done.err.endswith("Unknown flag in TF_XLA_FLAGS: --tf_xla_cache=cache\n")


MIRRORED = """
from launch import binary, training
from tests.launch.spoilt_task import spoilt_task

binary.run(lambda _: training.build_trainer(training.build_strategy(spoilt_task(None))).fit() and 0)
"""


@pytest.mark.full
def test_mirrored_strategy_is_quiet(tmp_path):
    (tmp_path / "own.py").write_text(MIRRORED)
    flags = ("--strategy=mirrored", "--num_towers=2", "--steps=2", "--directory=run")
    done = run_forked("own.py", *flags, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")


@pytest.mark.full
def test_a_program_that_imports_tensorflow_first_hears_nothing_of_cuda(tmp_path):
    """Notices of TensorFlow's own import can't be prevented then; those of the search for GPUs can."""
    program = "import os, sys, tensorflow\nos.write(2, b'imported\\n')\nfrom towers import configure_devices\n"
    program += "configure_devices(num_towers=1)\n"
    done = run("-c", program, cwd=tmp_path)
    assert done.code == 0
    assert done.err.partition("imported\n")[2] == ""
