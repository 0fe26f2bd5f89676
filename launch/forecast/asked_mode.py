"""The mode of one process that the flags of training choose."""

from absl import flags

from launch.flags.grid import divided_by
from launch.forecast.modes_of_a_process import AXES, TOWERS, ProcessMode, all_devices
from strategies.registry import cluster_kind
from towers.devices import Devices

FLAGS = flags.FLAGS


def asked_mode(devices: Devices) -> ProcessMode:
    """The mode that the flags choose, on all devices; for a ring or servers, the mode of a worker's towers."""
    # The towers of a ring's worker are those of the mode that its grid names.
    grouped = next((mode for mode, axis in AXES.items() if axis == divided_by()), TOWERS)
    count = len(all_devices(devices))
    name = f"{count} tower{'' if count == 1 else 's'}" if grouped == TOWERS else f"{grouped} on {count} devices"
    # In a cluster ZeRO divides the state between the workers, not between the towers of one worker.
    over_workers = bool(devices.zero and cluster_kind(FLAGS.strategy))
    return ProcessMode(
        name=name + ", without ZeRO over workers," * over_workers,
        num_devices=count,
        strategy=grouped,
        num_towers=devices.num_towers if devices.groups else 1,
        sharded=devices.sharded,
        replicated=devices.replicated,
        zero=0 if over_workers else devices.zero,
        offload=devices.offload,
    )
