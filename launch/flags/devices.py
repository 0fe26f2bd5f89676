"""Flags of the strategy and its devices."""

import os

from absl import flags

from launch.flags.checks import listed_in_help, positive
from strategies.registry import strategy_names
from towers.devices import KINDS, Devices, configure_devices

FLAGS = flags.FLAGS

flags.DEFINE_string("strategy", "towers", f"Mode of training: {', '.join(strategy_names())}.")
flags.DEFINE_integer("num_towers", None, "Towers; default: one a GPU, or else one a core.")
flags.DEFINE_enum("tower_device", "auto", KINDS, "Where towers run; auto takes GPUs where there are any.")
flags.DEFINE_string("parameter_device", "cpu", "Where parameters live and updates run: cpu, cpu:K or gpu:K.")
flags.DEFINE_list("tower_shares", None, "How much of a batch each tower takes, as 3,1; default: equal parts.")
flags.DEFINE_integer("threads_per_tower", None, "Threads of an operation on a CPU tower; default: cores / towers.")
positive("num_towers", "threads_per_tower")
listed_in_help(__name__)


def devices_from_flags() -> Devices:
    """Configures this process's devices; call it before TensorFlow computes anything."""
    return configure_devices(
        num_towers=FLAGS.num_towers,
        kind=FLAGS.tower_device,
        parameter_device=FLAGS.parameter_device,
        threads_per_tower=FLAGS.threads_per_tower,
        num_processes=int(os.environ.get("TOWERS_PROCESSES_HERE", "1")),
    )
