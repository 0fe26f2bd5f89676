"""The rows of the group cifar_fast: the network and the update rule of --recipe=cifar_fast beside PyTorch's."""

import pathlib
import subprocess

from absl import flags

from launch.measuring.case import BFLOAT16, FLOAT32, Case, Work, batch_of_flags, case_of_peer, own_case

FLAGS = flags.FLAGS
NETWORK = "cifar_fast"
# The recipe's batch, used unless --measured_batch is given.
_BATCH = 1024
_UPDATE_RULE = (
    *("--optimizer=nesterov", "--momentum=0.85", "--learning_rate=1.5", "--weight_decay=0.0089", "--decay_all"),
    *("--norm_bias_rate_factor=64", "--lookahead_every=5"),
)
# A GPU's steps are measured ten in a call.
FIVE_STEPS = ("--steps_per_execution=5",)
# Exits with 1 if PyTorch is installed and finds no GPU.
_FINDS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_SECONDS = 120.0
_PEER = pathlib.Path(__file__).with_name("peers") / "torch_cifar_fast.py"


def cifar_fast_cases() -> list[Case]:
    """Two towers in both precisions; with --torch also PyTorch, except in a precision that ours must leave out."""
    cases = []
    for precision in (FLOAT32, BFLOAT16):
        own = _towers(precision)
        cases += [own] if own.left_out else [own, *_torch(precision)]
    return cases


def cifar_fast_on_gpu() -> list[Case]:
    """One GPU in bfloat16, with one step and with five steps per execution; with --torch also PyTorch on it."""
    work, name = _work("towers", 1, BFLOAT16), f"gpu 1, cifar_fast, {BFLOAT16}"
    rows = [
        own_case(name, work, "--tower_device=gpu", *_UPDATE_RULE),
        own_case(f"{name}, 5 steps an execution", work, "--tower_device=gpu", *FIVE_STEPS, *_UPDATE_RULE),
    ]
    return [*rows, *_torch(BFLOAT16, "cuda")]


def _towers(precision: str) -> Case:
    return own_case(f"towers 2, {precision}", _work("towers", 2, precision), *_UPDATE_RULE)


def _torch(precision: str, device: str = "cpu") -> list[Case]:
    """PyTorch on one device, 'cpu' or 'cuda'; nothing without --torch."""
    if not FLAGS.torch:
        return []
    work = _work("torch", 1, precision)
    options = (f"--batch={work.batch}", f"--steps={work.steps}", f"--precision={precision}", f"--device={device}")
    why_not = _why_no_cuda(FLAGS.torch) if device == "cuda" else ""
    return [case_of_peer(f"torch, {precision}", work, (FLAGS.torch, str(_PEER), *options), left_out=why_not)]


def _why_no_cuda(python: str) -> str:
    """Why the PyTorch of the interpreter `python` can't be measured on a GPU; '' if it can, or if unknown."""
    command = [python, "-W", "ignore", "-c", _FINDS_GPU]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if not done.returncode:
        return ""
    return f"PyTorch of {python} finds no GPU" + "".join(f": {line}" for line in done.stderr.splitlines()[-1:])


def _work(strategy: str, count: int, precision: str) -> Work:
    return Work(strategy, count, NETWORK, batch_of_flags(_BATCH), precision, steps=FLAGS.measured_steps)
