"""The rows of the group short_steps: a small network, whose step is about as short as a call from Python."""

import pathlib
import sys

from absl import flags

from launch.measuring.case import Case, Work, batch_of_flags, case_of_peer, own_case

FLAGS = flags.FLAGS
NETWORK = "tiny"
_BATCH = 64
_PEER = pathlib.Path(__file__).with_name("peers") / "short_steps.py"


def short_step_cases() -> list[Case]:
    """Two towers with one step per execution and with the default number; Keras's `fit` with 1 and 32; PyTorch."""
    return [
        _own("towers 2, one step an execution", "--steps_per_execution=1"),
        _own("towers 2, several steps an execution"),
        _peer("keras fit, one step an execution", sys.executable, "--library=keras", "--steps_per_execution=1"),
        _peer("keras fit, 32 steps an execution", sys.executable, "--library=keras", "--steps_per_execution=32"),
        *([_peer("torch", FLAGS.torch, "--library=torch")] if FLAGS.torch else []),
    ]


def _own(name: str, *more: str) -> Case:
    return own_case(name, _work("towers", 2), *more, measure="short_steps")


def _peer(name: str, python: str, *more: str) -> Case:
    work = _work(name.partition(",")[0], 1)
    return case_of_peer(name, work, (python, str(_PEER), f"--batch={work.batch}", f"--steps={work.steps}", *more))


def _work(strategy: str, count: int) -> Work:
    return Work(strategy, count, NETWORK, batch_of_flags(_BATCH), steps=FLAGS.measured_steps)
