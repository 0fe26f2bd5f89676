"""With TensorFlow's engines, variables, updates, towers and sums are on the devices of its strategies."""

import collections
import json
import pathlib

import pytest
import tensorflow as tf
from google.protobuf import text_format

from launch.binary import DONE
from tests.launch.server_groups import ServerGroup
from tests.launch.workers import Workers

pytestmark = pytest.mark.timeout(120)

PROGRAM = ("-m", "tests.strategies.distribute.placement_program")
LIMIT_SECONDS = 60


@pytest.mark.full
def test_a_ring_sums_by_collectives_of_its_strategy():
    with Workers([(*PROGRAM, "ring")] * 2) as workers:
        ends = workers.ends(LIMIT_SECONDS)
    for rank, ended in enumerate(ends):
        assert ended.code == DONE, ended.err
        here = f"/job:worker/replica:0/task:{rank}/device:CPU"
        assert json.loads(ended.out) == {
            "towers": [f"{here}:0", f"{here}:1"],
            "updates": [f"{here}:0"],
            "sums": [f"{here}:0"],
            "variables": ["MirroredVariable"],
        }


def partitions(folder: pathlib.Path) -> dict[str, list]:
    """The operations of a step on each device, from TensorFlow's own files."""
    found = {}
    for path in folder.glob("*_steps_*_partition__*.after_partition_passes.pbtxt"):
        graph = text_format.Parse(path.read_text(), tf.compat.v1.GraphDef())
        found[path.name.partition("partition__job:")[2].partition(".")[0]] = list(graph.node)
    return found


def messages(nodes, job: str) -> collections.Counter:
    """Number of tensors and control edges that a device sends to each device of a job."""
    to = (node.attr["recv_device"].s.decode() for node in nodes if node.op == "_Send")
    return collections.Counter(device for device in to if device.startswith(f"/job:{job}"))


@pytest.mark.full
def test_servers_hold_the_variables_and_update_them(tmp_path):
    dump = {"TF_DUMP_GRAPH_PREFIX": str(tmp_path), "TF_DUMP_GRAPH_NAME_FILTER": "*"}
    with ServerGroup((*PROGRAM, "ps"), workers=1, servers=2, variables={"worker:0": dump}) as group:
        for name, ended in group.ends(LIMIT_SECONDS).items():
            assert ended.code == DONE, (name, ended.err)
    graphs = partitions(tmp_path)
    found = {device: {node.op for node in nodes} for device, nodes in graphs.items()}
    servers = {device for device, ops in found.items() if any("ResourceApply" in op for op in ops)}
    readers = {device for device, ops in found.items() if "ReadVariableOp" in ops}
    assert servers == readers == {f"ps_replica:0_task:{index}_device:CPU:0" for index in (0, 1)}
    towers = {device for device, ops in found.items() if any("MatMul" in op for op in ops)}
    assert towers == {f"worker_replica:0_task:0_device:CPU:{index}" for index in (0, 1)}, found
    first, second = (f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in (0, 1))
    worker = graphs["worker_replica:0_task:0_device:CPU:0"]
    # The closure's two arguments and the gradients; server 0 also gets the figures, the other the decision.
    assert messages(worker, "ps") == {first: 4, second: 3}
    # The parameters; and from server 0 the plan, once in a closure.
    assert messages(graphs["ps_replica:0_task:0_device:CPU:0"], "worker").total() == 2
    assert messages(graphs["ps_replica:0_task:1_device:CPU:0"], "worker").total() == 1
