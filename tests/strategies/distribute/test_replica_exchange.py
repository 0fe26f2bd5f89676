"""What replicas pass to TensorFlow's all-reduce."""

import types

import tensorflow as tf

from strategies.distribute import replica_exchange


def test_gradients_of_two_dtypes_are_reduced_apart(monkeypatch):
    """TensorFlow packs the values of a call over several processes. LoRA's weights are float32 in any layer."""

    def all_reduce(_, values):
        assert len({value.dtype for value in values}) == 1
        return [2 * value for value in values]

    context = types.SimpleNamespace(num_replicas_in_sync=2, all_reduce=all_reduce)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
    own = [tf.constant(1.0), tf.constant(2.0, tf.float64), tf.constant(3.0)]
    found = replica_exchange._all_reduced(own)
    assert [float(value) for value in found] == [2.0, 4.0, 6.0]
    assert [value.dtype for value in found] == [value.dtype for value in own]
