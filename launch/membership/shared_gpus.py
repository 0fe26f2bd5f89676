"""Divides the GPUs that TensorFlow finds between the processes of one machine.

The parts are equal, because a ring's collectives need equal numbers. `set_visible_devices` hides the other GPUs:
TensorFlow has already read CUDA_VISIBLE_DEVICES.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

from launch.membership.slurm_step import cluster_from_slurm
from strategies.cluster import CHIEF, EVALUATOR, SERVER, Cluster
from towers.errors import UserError

# Set by launch.local: the CUDA_VISIBLE_DEVICES that all of its processes get.
VARIABLE = "TOWERS_SHARED_GPUS"
_CUDA = "CUDA_VISIBLE_DEVICES"
_ALL = "all"
DRIVER = pathlib.Path("/proc/driver/nvidia")
# NVIDIA's container runtime, and device plugins of Kubernetes, put these GPUs into a container.
_OF_CONTAINER = "NVIDIA_VISIBLE_DEVICES"
_NAMES_NONE = ("", "all", "none", "void")
# Slurm's ways to bind a task to GPUs of its own; 'none' and 'closest' let tasks share.
_BINDS_OWN = ("per_task", "single", "map_gpu", "mask_gpu", "map", "mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnGpus:
    """The GPUs of this process.

    Attributes:
      indices: indices of this process's GPUs among those that TensorFlow finds.
      notice: a line for the user; '' if the process has all GPUs that it finds.
    """

    indices: tuple[int, ...]
    notice: str = ""


def own_gpus(
    num_found: int,
    cluster: Cluster | None,
    environ: Mapping[str, str] = os.environ,
    *,
    driver: pathlib.Path = DRIVER,
) -> OwnGpus:
    """Divides the GPUs between the processes of this machine that compute, in equal parts, by their order.

    A process that was given GPUs of its own (by Slurm, by Kubernetes or by hand) has all of these.
    Parameter servers use none. A chief of servers uses none if workers are on its machine, and an evaluator none:
    they would take memory from the workers.

    Args:
      num_found: number of GPUs that TensorFlow finds.
      cluster: the cluster that this process trains in; None for a process that trains alone.
      environ: the environment.
      driver: the folder in which NVIDIA's driver describes itself.

    Raises:
      UserError: more processes of this machine compute than there are GPUs, or Slurm lets them share GPUs.
    """
    everything = OwnGpus(indices=tuple(range(num_found)))
    if not num_found:
        return everything
    if cluster is not None and cluster.role == SERVER:
        return OwnGpus(indices=(), notice="a parameter server uses no GPU")
    is_given = _has_been_given(num_found, environ, driver)
    if cluster is not None and cluster.role == EVALUATOR and not is_given:
        beside_workers = any(member.is_here for member in cluster.computing)
        return _none_beside_workers("an evaluator") if beside_workers else everything
    alone = cluster is None
    cluster = _cluster_of_slurm(environ) if alone else cluster
    if cluster is None:
        return everything
    here = [member for member in _computing(cluster, alone) if member.host == cluster.this.host]
    if is_given:
        _check_own(num_found, len(here), environ)
        return everything
    if cluster.this not in here:
        return _none_beside_workers(f"a {CHIEF} of parameter servers") if here else everything
    if num_found < len(here) and _names_some(environ, num_in_machine(driver)):
        return everything
    return _part(num_found, len(here), here.index(cluster.this))


def environment_of_shared(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable by which a launcher tells its processes that they share its CUDA_VISIBLE_DEVICES."""
    return {VARIABLE: environ.get(_CUDA, _ALL)}


def num_in_machine(driver: pathlib.Path = DRIVER) -> int:
    """Number of GPUs that the driver lists on this machine; 0 if it lists none."""
    try:
        return len(list((driver / "gpus").iterdir()))
    except OSError:
        return 0


def _has_been_given(num_found: int, environ: Mapping[str, str], driver: pathlib.Path) -> bool:
    """Whether the GPUs that this process finds were given to it alone.

    A launcher's variable has the value that all its processes got: a process with another CUDA_VISIBLE_DEVICES has
    GPUs of its own. Slurm says how many GPUs the step has here, or that each task gets its own. Otherwise, if
    somebody named some of the machine's GPUs, they are this process's.
    """
    given = environ.get(_CUDA)
    if VARIABLE in environ:
        return (_ALL if given is None else given) != environ[VARIABLE]
    if given is not None and "MIG-" in given:
        return True
    if _in_step(environ):
        if _binds_own(environ):
            return True
        of_step = _num_of_step(environ)
        if of_step:
            return num_found < of_step
    return given is not None and num_found < num_in_machine(driver)


def _check_own(num_found: int, count: int, environ: Mapping[str, str]) -> None:
    """Raises UserError if Slurm shows each of `count` processes so many of the step's GPUs that some share them.

    With --gpu-bind=closest, all tasks on a socket find its GPUs.
    """
    of_step = _num_of_step(environ) if _in_step(environ) and VARIABLE not in environ else 0
    if num_found < of_step < count * num_found and not _binds_own(environ):
        raise UserError(
            f"{count} processes of this machine find {num_found} of the step's {of_step} GPUs each, so some would "
            "share GPUs, but each needs its own: use srun --gpu-bind=none, with which they divide all"
        )


def _names_some(environ: Mapping[str, str], in_machine: int) -> bool:
    """Whether somebody named GPUs: then GPUs too few for all processes here are probably this process's alone.

    Containers that use the machine's network have one host name, and in each the driver lists that container's
    GPUs; on some systems it lists none. A launcher's processes are in one container.
    """
    if VARIABLE in environ:
        return False
    if environ.get(_OF_CONTAINER, "").strip().lower() not in _NAMES_NONE:
        return True
    return not in_machine and _CUDA in environ


def _in_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ


def _binds_own(environ: Mapping[str, str]) -> bool:
    """Whether Slurm binds each task to GPUs of its own; an explicit binding overrides numbers per task."""
    bound = environ.get("SLURM_GPU_BIND", "") or environ.get("SLURM_TRES_BIND", "").rpartition("gpu:")[2]
    bound = re.sub(r"^(verbose|quiet|v|q),?", "", bound)
    if bound:
        return bound.split(":")[0] in _BINDS_OWN
    return bool(environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")


def _num_of_step(environ: Mapping[str, str]) -> int:
    """Number of GPUs that Slurm gave to the step on this machine, else to the job; 0 if unknown."""
    number = environ.get("SLURM_GPUS_ON_NODE", "")
    of_step = max(_num_listed(environ.get("SLURM_STEP_GPUS", "")), int(number) if number.isdecimal() else 0)
    return of_step or _num_listed(environ.get("SLURM_JOB_GPUS", ""))


def _num_listed(text: str) -> int:
    """Number of GPUs in a list such as '0,1' or '0-3,6'."""
    ranges = [re.fullmatch(r"(\d+)-(\d+)", part) for part in text.split(",") if part]
    return sum(int(found[2]) - int(found[1]) + 1 if found else 1 for found in ranges)


def _cluster_of_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """The tasks of this process's Slurm step; None outside of a step. Tasks that train alone share GPUs too."""
    try:
        return cluster_from_slurm(environ)
    except UserError:
        return None


def _computing(cluster: Cluster, alone: bool):
    """The members that need GPUs; if each task trains alone, all of them."""
    return cluster.members() if alone else cluster.computing


def _part(num_found: int, count: int, index: int) -> OwnGpus:
    """The GPUs of process `index` of `count`. All parts are equal: workers of a ring wait for the slowest, and its
    collectives need equal numbers.

    Raises:
      UserError: more processes than GPUs.
    """
    each, idle = divmod(num_found, count)
    if not each:
        raise UserError(
            f"{count} processes of this machine find {num_found} GPU{'s' * (num_found > 1)}, but each needs its "
            f"own: start {num_found} of them, or use --tower_device=cpu"
        )
    if count == 1:
        return OwnGpus(indices=tuple(range(num_found)))
    first = index * each
    last = first + each - 1
    named = f"GPU {first}" if each == 1 else f"GPUs {first} to {last}"
    notice = f"process {index + 1} of the {count} on this machine: {named} of {num_found}"
    if idle:
        notice += f"; {idle} of them are idle: {count} processes have {each} each"
    return OwnGpus(indices=tuple(range(first, first + each)), notice=notice)


def _none_beside_workers(who: str) -> OwnGpus:
    return OwnGpus(
        indices=(),
        notice=f"{who} computes on CPUs, because the workers on this machine use its GPUs; to give it some, start "
        f"it with a {_CUDA} of its own",
    )
