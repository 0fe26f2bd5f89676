"""Flags of the strategy and its devices."""

from absl import flags

from launch.flags.branches import branched_grid
from launch.flags.checks import listed_in_help, positive
from launch.flags.grid import grid_from_flags
from launch.flags.pipeline import num_stage_devices
from launch.flags.slices import sliced_grid
from launch.membership.shared_cores import processes_here
from launch.membership.this_process import cluster_of_this_process
from strategies.cluster import Cluster
from strategies.registry import check_spread, cluster_kind, default_num_towers, strategy_names
from towers.devices import KINDS, Devices, configure_devices, spread_by

FLAGS = flags.FLAGS

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
    "Number of towers in this process; each computes its part of a batch on its own device. Default: one per "
    "visible GPU; without GPUs one per CPU core (affinity and container limits count, and the processes of a "
    "cluster on one machine divide its cores), but at most one for each 32 examples that this process computes at "
    "once. With batch norm or dropout the numbers depend on it: see --batch_stats.",
)
flags.DEFINE_enum(
    "tower_device", "auto", KINDS, "Device type of the towers. auto: GPUs if any is visible, otherwise CPUs."
)
flags.DEFINE_string(
    "parameter_device",
    "cpu",
    "Device that holds the parameters and applies the updates: cpu, cpu:K or gpu:K, with K counted from 0. "
    "sharded: each tower's device holds an equal part of them, with its optimizer state and its update, and sends "
    "it to the others in every step. replicated: each tower's device has a copy of all parameters and optimizer "
    "state, and makes every update. Both with --strategy=towers only. Use sharded if the optimizer state exceeds "
    "a device, replicated if sending parameters in every step costs time, as between GPUs.",
)
flags.DEFINE_integer(
    "zero",
    0,
    "Stage of ZeRO. It divides state over the towers (--strategy=towers: 1, 2, 3; several towers of pipeline, "
    "slices or branches: 1, 2) or over the workers (--strategy=ring: 1, 2, 3). 1: each device or worker has all "
    "parameters, and holds and updates its own part of the optimizer state. 2: also its own part of the summed "
    "gradients: with --accumulation it sends gradients after each microbatch instead of once a step. 3: also its "
    "own part of the parameters; it gathers the others layer by layer, and a worker of a ring then has one tower. "
    "Default: 0, off. Use the lowest stage that fits in memory, without --parameter_device.",
    lower_bound=0,
    upper_bound=3,
)
flags.DEFINE_string(
    "offload",
    "",
    "optimizer: the device in --parameter_device (a CPU) has the optimizer state and makes the update, and each "
    "tower's device has a copy of the parameters and sends its gradients there (--strategy=towers only). Default: "
    "nothing. Use it if parameters and gradients fit a GPU, and the optimizer state beside them does not.",
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
    "container's limit gives this process only some of them.",
)
positive("num_towers", "threads_per_tower")
listed_in_help(__name__)


def devices_from_flags() -> Devices:
    """Configures this process's devices. Call it before TensorFlow computes anything."""
    # `build_strategy` checks it too, but of servers and their workers only the chief calls that.
    spread = spread_by(FLAGS.parameter_device, FLAGS.zero, FLAGS.offload)
    check_spread(FLAGS.strategy, spread)
    own_number = FLAGS.num_towers or default_num_towers(FLAGS.strategy, spread)
    grid = sliced_grid() or branched_grid() or grid_from_flags(num_stage_devices())
    devices = configure_devices(
        num_towers=own_number if grid is None else grid.num_devices,
        kind=FLAGS.tower_device,
        parameter_device=FLAGS.parameter_device,
        threads_per_tower=FLAGS.threads_per_tower,
        num_processes=processes_here(_own_cluster()),
        batch_size=_own_examples(),
        zero=FLAGS.zero,
        offload=FLAGS.offload,
    )
    return devices if grid is None else devices.grouped(grid.groups(devices.towers))


def _own_examples() -> int | None:
    """Examples that this process computes at once; None if the program's flags have no batch size.

    `strategies.registry.build_strategy` computes it again, exactly, when the threads can no longer be set.
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
