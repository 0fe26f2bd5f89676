"""Launchers do not import TensorFlow, and other programs import it without its notices."""

import pytest

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
