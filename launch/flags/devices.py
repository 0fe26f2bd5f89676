"""Flags of the strategy and its devices."""

import functools
import os

from absl import flags

from launch import binary
from launch.flags.belonging import needs, serves
from launch.flags.branches import branched_grid
from launch.flags.checks import at_least_zero, listed_in_help, number_of_threads, positive
from launch.flags.grid import divided_by, grid_from_flags
from launch.flags.pipeline import num_stage_devices
from launch.flags.slices import sliced_grid
from launch.health.missing_gpus import missing_gpus
from launch.membership.shared_cores import processes_here
from launch.membership.shared_gpus import OwnGpus, own_gpus
from launch.membership.this_process import cluster_of_this_process
from strategies.cluster import SERVER, Cluster
from strategies.registry import (
    check_spread,
    cluster_kind,
    exchanges_statistics,
    has_parameter_device,
    strategy_names,
)
from towers.device_setup import KINDS, configure_devices, physical_gpus
from towers.devices import AUTOMATIC, Devices, spread_by
from towers.hardware.cores import input_threads, num_cores
from towers.hardware.cpu_instructions import AVX2, ONEDNN_LIMIT, cpu_instructions

FLAGS = flags.FLAGS


def _no_parameter_device() -> str:
    """Why --parameter_device has no effect; '' if it has one."""
    if divided_by() is not None:
        where = "each device of a tower has the parameters of its part of the model"
    elif not has_parameter_device(FLAGS.strategy):
        where = "each tower's device has a copy of all parameters"
    else:
        return ""
    return f"with --strategy={FLAGS.strategy}: {where}; use --strategy=towers"


flags.DEFINE_string(
    "strategy",
    "towers",
    f"How to train: {', '.join(strategy_names())}. towers: a copy of the model on each device of one process. "
    "slices, branches, pipeline: each copy is divided over several devices, by parts of the layers, by branches, "
    "or by stages. mirrored: towers with tf.distribute's MirroredStrategy. ring: several processes with an "
    "all-reduce. ps: several processes with parameter servers.",
)
flags.DEFINE_integer(
    "num_towers",
    None,
    "Number of towers in this process; each computes its part of a batch on its own device. Default: one per GPU; "
    "without GPUs one per CPU core (hyperthreads of a core count once; affinity and container limits count), but "
    "at most one for each 32 examples that this process computes at once, and, where synced batch norms are not "
    "compiled, for each two cores. The processes of a cluster on one machine divide its GPUs and its cores. With "
    "batch norm or dropout the numbers depend on this count: see --batch_stats.",
)
flags.DEFINE_enum(
    "tower_device",
    "auto",
    KINDS,
    "Device type of the towers. auto: GPUs if any is visible, otherwise CPUs. cpu: this process initializes no "
    "GPU. Parameter servers use no GPU, nor do a chief and an evaluator beside workers.",
)
flags.DEFINE_string(
    "parameter_device",
    AUTOMATIC,
    "Device that holds the parameters and applies the updates: cpu, cpu:K or gpu:K, with K counted from 0. auto: "
    "with --strategy=towers on GPUs chosen by their number, their memory and the size of the model, and printed "
    "with the reason; otherwise cpu. sharded: each tower's device holds an equal part of the parameters with "
    "their optimizer state, updates it, and sends it to the others in every step. replicated: each tower's device "
    "has a copy of all parameters and optimizer state, and computes every update. Both only with "
    "--strategy=towers. Use sharded if one device can't hold the optimizer state, replicated if sending "
    "parameters in every step costs time, as between GPUs. Not with --strategy=mirrored, whose devices have "
    "copies, nor with towers of several devices, of which each has its part.",
)
flags.DEFINE_integer(
    "zero",
    0,
    "Stage of ZeRO. It divides state over the towers (--strategy=towers, or several towers of pipeline, slices "
    "or branches: 1, 2, 3) or over the workers (--strategy=ring: 1, 2, 3). 1: each device or worker has all "
    "parameters, and holds and updates its own part of the optimizer state. 2: also its own part of the summed "
    "gradients: with --accumulation it sends gradients after each microbatch instead of once a step. 3: also its "
    "own part of the parameters; it gathers the others layer by layer. Default: 0, off. Use the lowest stage that "
    "fits in memory, without --parameter_device.",
    lower_bound=0,
    upper_bound=3,
)
flags.DEFINE_string(
    "offload",
    "",
    "optimizer: the CPU of --parameter_device holds the optimizer state and computes the update; each tower's "
    "device holds a copy of the parameters and sends its gradients to this CPU (--strategy=towers only). Default: "
    "no offload. Use it if a GPU has room for parameters and gradients, but not for the optimizer state too.",
)
flags.DEFINE_list(
    "tower_shares",
    None,
    "Relative number of examples of each batch for each tower: 3,1 gives the first tower three times as many as "
    "the second. Default: equal numbers. Use it for devices of different speed.",
)
flags.DEFINE_integer(
    "threads_per_tower",
    None,
    "Threads that one operation of a CPU tower may use. Default: this process's cores divided by its towers. "
    "Processes of a cluster that have the same host in TF_CONFIG divide the machine's cores, unless affinity or a "
    "container's limit gives this process only some of them; Slurm's tasks divide their step's unless Slurm binds "
    "them.",
)
flags.DEFINE_bool(
    "tf32",
    True,
    "On GPUs that have it, compute products of float32 in TensorFloat-32: several times faster, with 10 bits of "
    "mantissa. --notf32 computes them in float32. CPUs don't have it.",
)
flags.DEFINE_bool(
    "deterministic",
    False,
    "Use only operations that give the same bits each time, on GPUs too, where some are then slower (sums of "
    "embeddings' gradients, some convolutions). An operation without a deterministic kernel is an error. "
    "Asynchronous parameter servers still update in any order.",
)
flags.DEFINE_integer(
    "steps_per_execution",
    0,
    "For --strategy=towers: number of steps in an execution of a graph. Several save some 0.3 ms a step. Default: "
    "0, which on CPUs means up to 256 after 2,000 steps of at most 4 ms each, otherwise 1. The numbers stay the "
    "same. Not with --accumulation, --deterministic, nor --batch_stats=synced of several towers.",
)
serves("strategy", ("towers",), "steps_per_execution")
needs(_no_parameter_device, "parameter_device")
at_least_zero("steps_per_execution")
positive("num_towers")
number_of_threads("threads_per_tower")
listed_in_help(__name__)


def devices_from_flags() -> Devices:
    """Configures and returns this process's devices. Call it before TensorFlow computes anything."""
    # `build_strategy` checks this too, but servers and their workers don't call it.
    spread = spread_by(FLAGS.parameter_device, FLAGS.zero, FLAGS.offload)
    check_spread(FLAGS.strategy, spread)
    gpus, kind = _own_gpus()
    # Each refuses its own flags with another strategy, so both are called.
    sliced, branched = sliced_grid(), branched_grid()
    grid = sliced or branched or grid_from_flags(num_stage_devices())
    devices = configure_devices(
        num_towers=FLAGS.num_towers if grid is None else grid.num_devices,
        kind=kind,
        parameter_device=FLAGS.parameter_device,
        threads_per_tower=FLAGS.threads_per_tower,
        num_processes=processes_here(_own_cluster()),
        batch_size=_own_examples(),
        cores_per_tower=_cores_per_tower(spread),
        zero=FLAGS.zero,
        offload=FLAGS.offload,
        own_gpus=gpus.indices,
        tf32=FLAGS.tf32,
        deterministic=FLAGS.deterministic,
        max_cpu_isa=os.environ.get(ONEDNN_LIMIT, ""),
    )
    _separate_pools(devices)
    return devices if grid is None else devices.grouped(grid.groups(devices.towers))


def _cores_per_tower(spread: str) -> int:
    """Minimum number of cores per CPU tower: 2 if towers wait for each other in batch norms that are not compiled.

    ResNet-20, batch 256, two cores: two towers with their own statistics make 916 images/s, with synced ones 690;
    one tower of two threads, which needs no exchange for the same statistics, 836 (Intel Xeon with AVX-512; AMD
    EPYC, Zen 4: 663, 530 and 639). With compiled batch norms two synced towers make 961, unsynced ones 988.
    """
    waits = FLAGS.batch_stats == "synced" and exchanges_statistics(FLAGS.strategy)
    has_loops = AVX2 in cpu_instructions(os.environ.get(ONEDNN_LIMIT, ""))
    compiles_loops = has_loops and FLAGS.tuned_for_cpu and FLAGS.fused_batch_norm
    return 2 if waits and not spread and not compiles_loops else 1


def _own_gpus() -> tuple[OwnGpus, str]:
    """This process's GPUs, and the kind of its towers; prints a notice about them for the user."""
    kind, cluster = FLAGS.tower_device, _own_cluster()
    is_server = cluster is not None and cluster.role == SERVER
    if kind == "cpu" or is_server:
        return OwnGpus(indices=()), "cpu"
    num_found = len(physical_gpus())
    _warn_of_missing(num_found)
    gpus = own_gpus(num_found, cluster)
    if gpus.notice:
        _tell(gpus.notice)
    return gpus, "cpu" if num_found and not gpus.indices else kind


@functools.cache
def _warn_of_missing(num_found: int) -> None:
    """Prints a warning, once, if this machine has GPUs that TensorFlow does not find."""
    line = missing_gpus(num_found)
    if line:
        binary.warn(line)


@functools.cache
def _tell(notice: str) -> None:
    """Prints a line, but only once: devices are configured several times."""
    binary.note(notice)


def _separate_pools(devices: Devices) -> None:
    """Gives each CPU tower a pool of threads of its own. Call it before TensorFlow computes anything.

    By default the CPU devices of a process share one pool: a process with eight towers of eight threads had 10
    threads, with separate pools 66. A tower of one thread computes in the thread that runs the operation, and
    needs no pool. If the user has set the variable, it stays.
    """
    if devices.threads_per_tower > 1 and devices.num_towers > 1:
        os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")


def own_input_threads() -> int:
    """Default number of threads that prepare this process's batches."""
    gpus, _ = _own_gpus()
    cores = max(1, num_cores() // processes_here(_own_cluster()))
    return input_threads(cores, len(gpus.indices[: FLAGS.num_towers]))


def _own_examples() -> int | None:
    """Examples that this process computes at once; None if unknown (no --batch_size, or shares of towers).

    An estimate: `strategies.registry.build_strategy` computes the exact number, but then the threads can no longer
    be set.
    """
    batch_size = FLAGS["batch_size"].value if "batch_size" in FLAGS else None
    if not isinstance(batch_size, int) or FLAGS.tower_shares is not None:
        return None
    return batch_size // _num_sharing() // FLAGS.accumulation


def _num_sharing() -> int:
    """Number of workers that divide each batch."""
    cluster = _own_cluster()
    if cluster is None or (cluster_kind(FLAGS.strategy) == "servers" and FLAGS.staleness != "sync"):
        return 1
    return max(1, len(cluster.computing))


def _own_cluster() -> Cluster | None:
    """The cluster that this process trains in; None if it trains alone."""
    return cluster_of_this_process() if cluster_kind(FLAGS.strategy) else None
