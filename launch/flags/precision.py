"""Replaces --precision=auto by a number format at the start of a program, and warns of a slow precision.

From then on the flag has that value: in flags.txt and summary.json, in the settings that a checkpoint holds, and
in those that the processes of a run compare at the start.
"""

import os
from collections.abc import Mapping

from absl import flags

from launch import binary
from launch.flags.run import known_directory
from launch.flags.saved_flags import saved_precision
from launch.membership.this_process import cluster_of_this_process
from strategies.cluster import CHIEF, EVALUATOR, SERVER, WORKER
from towers.device_setup import lowest_compute_capability
from towers.devices import Devices
from towers.errors import UserError
from towers.hardware.cpu_instructions import (
    AMX_BFLOAT16,
    ARM_BFLOAT16,
    AVX512_BFLOAT16,
    FAST_BFLOAT16,
    ONEDNN_LIMIT,
    cannot_compute,
)
from towers.hardware.cpu_kernels import runs_onednn
from towers.options import StepOptions
from towers.precision import SHORT_PRECISIONS
from towers.precision_cost import cost_of, cost_text

FLAGS = flags.FLAGS
AUTO = "auto"
# Chosen by the kind of CPU, not by a measurement: at nearly equal costs processes would choose differently.
_VECTORS = (AVX512_BFLOAT16, ARM_BFLOAT16)
_FIRST_WITH_BFLOAT16 = (8, 0)
# The smallest cost that gives a warning, as a multiple of float32's time.
_WARNS_FROM = 1.1


def resolve_precision(devices: Devices, environment: Mapping[str, str] = os.environ) -> None:
    """Sets --precision to a number format if it is auto; warns if this CPU is slow in the requested one.

    A run that is resumed keeps its precision: the same command ends with the same weights on any CPU.

    Args:
      devices: this process's devices.
      environment: this process's environment.

    Raises:
      UserError: oneDNN is limited to instructions with which TensorFlow crashes in this precision.
    """
    is_known = False
    if FLAGS.precision == AUTO:
        saved = saved_precision(known_directory()) if FLAGS.resume == "auto" else None
        chosen, why = chosen_precision(devices)
        FLAGS["precision"].value = saved or chosen
        # If it differs, the run began on other devices, and its precision may be slow here.
        is_known = FLAGS.precision == chosen
        if _is_first():
            binary.note(f"--precision={AUTO}: {FLAGS.precision}, {'as in the resumed run' if saved else why}")
    limit = environment.get(ONEDNN_LIMIT, "")
    if devices.on_cpu and runs_onednn() and cannot_compute(FLAGS.precision, limit):
        raise UserError(
            f"--precision={FLAGS.precision}: with {ONEDNN_LIMIT}={limit} oneDNN has no kernels for it, and "
            "TensorFlow would crash; use --precision=float32"
        )
    if not is_known:
        _warn_of_cost(devices)


def chosen_precision(devices: Devices) -> tuple[str, str]:
    """(precision, reason) for these devices; the same in all processes on such devices."""
    if not devices.on_cpu:
        capability = lowest_compute_capability()
        has = capability >= _FIRST_WITH_BFLOAT16
        return ("bfloat16" if has else "float32"), f"compute capability {'.'.join(map(str, capability))}"
    found = devices.cpu_instructions
    if not runs_onednn():
        return "float32", "without oneDNN's kernels"
    has = [name for name in (AMX_BFLOAT16, *_VECTORS) if name in found]
    if FAST_BFLOAT16 in found:
        return "bfloat16", f"this CPU has {has[0]}{'' if AMX_BFLOAT16 in has else ' and is fast in it'}"
    if not has:
        return "float32", "this CPU has no instructions for bfloat16"
    return "float32", f"although this CPU has {has[0]}, which is not known to be faster on it"


def _warn_of_cost(devices: Devices) -> None:
    """Prints a warning if this process computes, and is slower in its precision than in float32."""
    cluster = cluster_of_this_process()
    computes = cluster is None or cluster.role not in (SERVER, EVALUATOR)
    if FLAGS.precision not in SHORT_PRECISIONS or FLAGS.verify or not computes or not devices.on_cpu:
        return
    if FLAGS.precision == "bfloat16" and FAST_BFLOAT16 in devices.cpu_instructions and runs_onednn():
        return
    step = StepOptions(precision=FLAGS.precision, tuned_for_cpu=FLAGS.tuned_for_cpu, xla=FLAGS.xla)
    cost = cost_of(FLAGS.precision, float32_products=step.kernels(devices).float32_products)
    if cost >= _WARNS_FROM:
        binary.warn(f"--precision={FLAGS.precision} is {cost_text(cost)}; use --precision=float32")


def _is_first() -> bool:
    """Whether this is the run's first process, which prints for all of them."""
    cluster = cluster_of_this_process()
    if cluster is None:
        return True
    return cluster.index == 0 and cluster.role == (CHIEF if cluster.addresses.get(CHIEF) else WORKER)
