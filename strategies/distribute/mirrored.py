"""The strategy 'mirrored': MirroredStrategy of tf.distribute around the same tower function, for comparison."""

from collections.abc import Sequence

import tensorflow as tf

from strategies.distribute.replicated_engine import ReplicatedEngine
from strategies.synchronous import SynchronousStrategy
from towers.devices import Devices
from towers.hardware.gpus import gpus_are_whole
from towers.input.tower_parts import TowerParts
from towers.options import StepOptions
from towers.task import Task


def mirrored_strategy(
    task: Task, devices: Devices, options: StepOptions, *, shares: tuple[float, ...] | None = None
) -> SynchronousStrategy:
    """The strategy 'mirrored'. Parameters live on every tower's device; `devices.parameters` is ignored.

    Raises:
      UserError: shares don't fit the towers, or the batch is too small for all of them.
    """

    def make_engine(model, batch_spec):
        return ReplicatedEngine(
            task,
            model,
            devices,
            options,
            batch_spec=batch_spec,
            strategy=mirrored(devices.towers),
            parts=TowerParts.of_one_process(devices.num_towers, shares),
        )

    return SynchronousStrategy(
        "mirrored", task, options, make_engine, devices.num_towers, unprepared=devices.input_on_towers
    )


def mirrored(devices: Sequence[str]) -> tf.distribute.MirroredStrategy:
    """A MirroredStrategy with a replica on each device. It uses NCCL for GPUs.

    On CPUs it uses plain sums, because TensorFlow's collectives serve only one MirroredStrategy per process there.
    On logical GPUs too, because NCCL refuses two replicas on one card.
    """
    on_gpus = all("GPU" in device for device in devices)
    reduction = None if on_gpus and gpus_are_whole() else tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=reduction)


def num_gpus(devices: Devices) -> int:
    """Number of GPUs that TensorFlow's strategies use, each as a replica; 0 if the towers run on CPUs."""
    return 0 if devices.on_cpu else devices.num_towers
