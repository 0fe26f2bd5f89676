"""TensorFlow optimizes graphs with synced statistics in a ring's processes too."""

import pytest

from tests.launch.nursery import run_forked

_PROGRAM = """
import collections
import socket
import tensorflow as tf
from strategies.ring.exchange.joining import without_scoped_allocator
from tests.towers.partitioned_graphs import recorded_graphs
from towers.exchange import TowerExchange

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
cluster = tf.train.ClusterSpec({"worker": [address]})
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster, task_type="worker", task_id=0, rpc_layer="grpc"
)
with without_scoped_allocator():
    tf.distribute.MultiWorkerMirroredStrategy(resolver)
exchange = TowerExchange(1)

@tf.function
def synced(value):
    first, second = value * 3, value * 5
    first, second = exchange.sum(first), exchange.sum(second)
    third = exchange.sum(first * second)
    # The optimizer computes the constant once.
    return third + tf.exp(tf.constant(1.0) * tf.constant(2.0))

with recorded_graphs() as graphs:
    assert abs(float(synced(tf.constant(1.0))) - 22.389) < 0.001
found = collections.Counter(node.op for node in graphs.nodes)
assert found["CollectiveReduce"] == 3, found
assert not found["Exp"], found
"""


@pytest.mark.full
def test_the_optimizer_runs(tmp_path):
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = run_forked("program.py", cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
