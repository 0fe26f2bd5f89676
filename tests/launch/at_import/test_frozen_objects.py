"""Objects that imports make are never searched for garbage, and no garbage is collected when a program ends."""

import pytest

from tests.launch.programs import run

# Stands in for TensorFlow: records whether garbage is collected during its import, and makes objects.
STAND_IN = "import gc\nenabled = gc.isenabled()\nmade = [[] for _ in range(1000)]\n{end}\n"


@pytest.mark.parametrize("end", ["", "raise ImportError"])
@pytest.mark.parametrize("before", ["enable", "disable"])
def test_objects_of_the_import_are_frozen(tmp_path, before, end):
    (tmp_path / "tensorflow.py").write_text(STAND_IN.format(end=end))
    program = f"""
import contextlib, gc, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # asks a stand-in for no GPUs
import launch
sys.path.insert(0, {str(tmp_path)!r})
gc.{before}()
with contextlib.suppress(ImportError):
    import tensorflow
    assert not tensorflow.enabled
    assert not any(one is tensorflow.made[0] for one in gc.get_objects()), "not frozen"
assert gc.isenabled() == {before == "enable"}
print("tensorflow" in sys.modules)
"""
    done = run("-c", program, cwd=tmp_path)
    assert (done.code, done.out) == (0, f"{not end}\n"), done.err


CYCLE = """
import gc
from launch import binary

IMPORTED = []

class Collected:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("collected")

def main(_):
    assert not any(one is IMPORTED for one in gc.get_objects())
    Collected()

if __name__ == "__main__":
    binary.run(main)
"""


def test_nothing_is_collected_when_a_program_ends(tmp_path):
    (tmp_path / "own.py").write_text(CYCLE)
    done = run("own.py", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "", "")
