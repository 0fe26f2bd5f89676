"""--verify of processes that have all variables, some, or none."""

import types

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from launch import (
    binary,
    train,  # noqa: F401, defines the flags
)
from launch.supervision import verify_run


class Values:
    """A strategy that has these values of a parameter 'kernel'; None: another process has it."""

    name, num_towers, options = "ring", 2, None

    def __init__(self, value: float | None, *, keeps_files: bool = False):
        self.keeps_files = keeps_files
        variable = types.SimpleNamespace(is_here=value is not None, numpy=lambda: np.asarray(value))
        self._kept = {"parameters": {"kernel": variable}, "slots": {}, "counters": {}}

    def checkpointables(self):
        return self._kept

    def run_steps(self, num_steps):
        pass

    def collect(self):
        pass

    def release(self):
        pass

    def finish(self, *, completed):
        pass


@pytest.mark.parametrize(
    "value, keeps_files, code, printed",
    [
        (2.0, True, binary.DONE, "verified: largest 0.00e+00"),
        (2.5, True, binary.DIFFERS, "DIFFERS: largest 2.50e-01"),
        (2.5, False, binary.DIFFERS, ""),
        (None, False, binary.DONE, ""),
    ],
)
def test_a_process_compares_the_variables_that_it_has(monkeypatch, capsys, value, keeps_files, code, printed):
    monkeypatch.setattr(verify_run, "reference_strategy", lambda *_: (Values(2.0), "one device"))
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        assert verify_run.verify(None, Values(value, keeps_files=keeps_files)) == code
    out = capsys.readouterr().out
    assert printed in out and bool(out) == keeps_files
