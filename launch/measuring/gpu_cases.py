"""The rows of the group gpu: one GPU, and all of this machine's, in each mode that keeps its numbers on them."""

import tensorflow as tf

from launch.measuring.case import BFLOAT16, FLOAT32, Case, own_case, work_of_flags
from launch.measuring.cifar_fast_cases import cifar_fast_on_gpu
from towers.errors import UserError
from towers.quiet_stderr import stderr_aside

_ON_GPUS = "--tower_device=gpu"


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
    """One GPU, then all of them; a machine without any has the rows of one."""
    count = max(1, num_gpus())
    return [
        _case("gpu 1", 1),
        _case("gpu 1, bfloat16", 1, precision=BFLOAT16),
        _case("gpu 1, bfloat16, without XLA", 1, "--noxla", precision=BFLOAT16),
        *cifar_fast_on_gpu(),
        _case(f"gpus {count}, parameters on the CPU", count, "--parameter_device=cpu"),
        _case(f"gpus {count}, replicated", count, "--parameter_device=replicated"),
        _case(f"gpus {count}, replicated, bfloat16", count, "--parameter_device=replicated", precision=BFLOAT16),
        *(_case(f"gpus {count}, zero {stage}", count, f"--zero={stage}") for stage in (1, 2, 3)),
        own_case(f"gpus {count}, mirrored", work_of_flags("mirrored", count), _ON_GPUS),
    ]


def _case(name: str, count: int, *more: str, precision: str = FLOAT32) -> Case:
    return own_case(name, work_of_flags("towers", count, precision), _ON_GPUS, *more)
