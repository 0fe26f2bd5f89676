"""Flags of the strategy and its devices."""

import os

from absl import flags

from launch.flags.checks import listed_in_help, positive
from strategies.registry import strategy_names
from towers.devices import KINDS, Devices, configure_devices

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "strategy",
    "towers",
    f"How to train: {', '.join(strategy_names())}. towers: all devices of one process. mirrored: the same with "
    "tf.distribute's MirroredStrategy. ring: several processes with an all-reduce. ps: several processes with "
    "parameter servers.",
)
flags.DEFINE_integer(
    "num_towers",
    None,
    "Number of towers in this process; each computes its part of a batch on its own device. Default: one per "
    "visible GPU, or one per CPU core if there is no GPU.",
)
flags.DEFINE_enum(
    "tower_device", "auto", KINDS, "Device type of the towers. auto: GPUs if any is visible, otherwise CPUs."
)
flags.DEFINE_string(
    "parameter_device",
    "cpu",
    "Device that holds the parameters and applies the updates: cpu, cpu:K or gpu:K, with K counted from 0.",
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
    "Threads that one operation of a CPU tower may use. Default: this process's cores divided by its towers.",
)
positive("num_towers", "threads_per_tower")
listed_in_help(__name__)


def devices_from_flags() -> Devices:
    """Configures this process's devices. Call it before TensorFlow computes anything."""
    return configure_devices(
        num_towers=FLAGS.num_towers,
        kind=FLAGS.tower_device,
        parameter_device=FLAGS.parameter_device,
        threads_per_tower=FLAGS.threads_per_tower,
        num_processes=int(os.environ.get("TOWERS_PROCESSES_HERE", "1")),
    )
