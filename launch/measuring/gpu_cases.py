"""The rows of the group gpu: one GPU, and all of this machine's, in each mode that keeps its numbers on them."""

import dataclasses

import tensorflow as tf
from absl import flags

from launch.measuring.case import BFLOAT16, FLOAT32, Case, Work, batch_of_flags, own_case, peer_case, work_of_flags
from launch.measuring.cifar_fast_cases import FIVE_STEPS, cifar_fast_on_gpu
from towers.errors import UserError
from towers.quiet_stderr import stderr_aside

FLAGS = flags.FLAGS
_ON_GPUS = "--tower_device=gpu"
# Examples for each GPU, unless --measured_batch gives the global batch.
_BATCH = 1024


def num_gpus() -> int:
    """Number of GPUs that TensorFlow finds."""
    with stderr_aside():
        return len(tf.config.list_physical_devices("GPU"))


def check_gpus() -> None:
    """Raises UserError on a machine without a GPU."""
    if num_gpus() == 0:
        raise UserError(
            "--group=gpu: TensorFlow finds no GPU; run it on a machine with one and tensorflow[and-cuda], or "
            "use another group, such as --group=towers"
        )


def gpu_cases() -> list[Case]:
    """One GPU beside the peers, then all GPUs of this machine. Without GPUs the rows are those of one GPU."""
    count = max(1, num_gpus())
    rows = [
        _case("gpu 1", 1),
        *_keras_fit(FLOAT32),
        _case("gpu 1, bfloat16", 1, precision=BFLOAT16),
        *_keras_fit(BFLOAT16),
        _case("gpu 1, bfloat16, without XLA", 1, "--noxla", precision=BFLOAT16),
        _case("gpu 1, bfloat16, 5 steps an execution", 1, *FIVE_STEPS, precision=BFLOAT16),
        *cifar_fast_on_gpu(),
        _case(f"gpus {count}, parameters on the CPU", count, "--parameter_device=cpu"),
        own_case(f"gpus {count}, mirrored", _work("mirrored", count), _ON_GPUS),
    ]
    if count == 1:
        return rows
    replicated = "--parameter_device=replicated"
    return [
        *rows,
        _case(f"gpus {count}, replicated", count, replicated),
        _case(f"gpus {count}, replicated, bfloat16", count, replicated, precision=BFLOAT16),
        _case(f"gpus {count}, replicated, bfloat16, XLA", count, replicated, "--xla", precision=BFLOAT16),
        *(_case(f"gpus {count}, zero {stage}", count, f"--zero={stage}") for stage in (1, 2, 3)),
    ]


def _case(name: str, count: int, *more: str, precision: str = FLOAT32) -> Case:
    return own_case(name, _work("towers", count, precision), _ON_GPUS, *more)


def _keras_fit(precision: str) -> list[Case]:
    """Model.fit on the first GPU; nothing without --peers."""
    if not FLAGS.peers:
        return []
    work = _work("keras fit", 1, precision)
    return [peer_case(f"keras fit, {precision}", work, "keras_step.py", "--mode=fit", f"--dtype={precision}")]


def _work(strategy: str, count: int, precision: str = FLOAT32) -> Work:
    work = work_of_flags(strategy, count, precision)
    return dataclasses.replace(work, batch=batch_of_flags(count * _BATCH))
