"""MirroredStrategy's all-reduce where NCCL can't serve: two logical GPUs are one GPU for NCCL."""

import tensorflow as tf

from strategies.distribute.mirrored import mirrored
from tests.gpu.fresh_process import tower_devices


def fallback_of_nccl() -> None:
    """The replicas' sums are computed on one device, and are right."""
    strategy = mirrored(tower_devices())
    operations = strategy.extended._cross_device_ops
    assert isinstance(operations, tf.distribute.ReductionToOneDevice), operations

    def replica():
        own = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1.0
        return tf.distribute.get_replica_context().all_reduce("sum", tf.fill([1000], own))

    for found in strategy.experimental_local_results(tf.function(strategy.run)(replica)):
        assert float(tf.reduce_max(tf.abs(found - 3.0))) == 0.0


def nccl_on_one_whole_gpu() -> None:
    """A single replica, on the first of two logical GPUs, needs no sum."""
    strategy = mirrored(tower_devices()[:1])
    assert float(strategy.run(lambda: tf.constant(2.0))) == 2.0
