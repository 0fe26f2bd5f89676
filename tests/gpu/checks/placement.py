"""Which device has the parameters and slots, which computes a tower, and what is sent within a step."""

import collections

import tensorflow as tf

from models.clicks_task import ClicksTask
from models.data.drawn_clicks import DrawnClicks
from models.data.drawn_text import DrawnText
from models.networks.transformer import TransformerSize
from models.text_task import TextTask
from strategies.registry import build_strategy
from tests.gpu.fresh_process import STAND_IN, tower_devices, towers
from tests.gpu.modes import strategy_of
from tests.towers.partitioned_graphs import PartitionedGraphs, recorded_graphs
from towers.devices import Devices
from towers.memory.engine_memory import _parts_of
from towers.options import StepOptions
from towers.timeline.activities import tower_scope
from towers.updates.schedules import Constant

# The runtime's own operations, and values that are wherever they are read.
_ANYWHERE = (
    "_Send",
    "_Recv",
    "_Arg",
    "_Retval",
    "_HostSend",
    "_HostRecv",
    "Const",
    "_HostConst",
    "NoOp",
    "Identity",
)


_INTEGERS = (tf.int32.as_datatype_enum, tf.int64.as_datatype_enum)
_TASKS = {
    "text": TextTask(
        text=DrawnText(num_tokens=9, length=6),
        size=TransformerSize(blocks=1, width=8, heads=2),
        batch_size=8,
        dropout=0.1,
    ),
    "clicks": ClicksTask(clicks=DrawnClicks(num_tables=2, num_rows=10), batch_size=8),
}


def _short(device: str) -> str:
    return device.rpartition("device:")[2]


def variables(mode: str) -> None:
    """Parameters and slots are on the devices that the mode says."""
    first, second = map(_short, tower_devices())
    host, both = {"CPU:0"}, {first, second}
    expected = {
        "central": (host, host),
        "parameters on the first device": ({first}, {first}),
        "replicated": (both, both),
        "sharded": (both, both),
        "zero=1": (both, both),
        "zero=2": (both, both),
        "zero=3": (both, both),
        "offload": ({*host, *both}, host),
        "pipeline": (both, both),
        "slices": (both, both),
    }[mode]
    found = strategy_of(mode, towers()).checkpointables()
    slots = [slot for of_slot in found["slots"].values() for slot in of_slot.values()]
    assert (_devices_of(found["parameters"].values()), _devices_of(slots)) == expected


def _devices_of(variables) -> set[str]:
    return {_short(part.device) for variable in variables for part in _parts_of(variable)}


def tower_operations(mode: str) -> None:
    """Each tower's operations, the preparation of its input among them, are on its device."""
    nodes = _nodes_of_step(mode)
    for index, device in enumerate(map(_short, tower_devices())):
        # With two towers, no tower's name is the beginning of another's.
        own = [node for node in nodes if node.name.startswith(f"{tower_scope(index)}/")]
        assert any("/prepare/" in node.name for node in own), "the tower does not prepare its input"
        # The host computes shapes and seeds.
        homes = {False: {device}, True: {device, "CPU:0"}}
        elsewhere = [
            node
            for node in own
            if _short(node.device) not in homes[_is_of_integers(node)] and node.op not in _ANYWHERE
        ]
        assert not elsewhere, [(node.name, node.op, node.device) for node in elsewhere]


def no_copies_of_input(mode: str) -> None:
    """No image is sent within a step; prints how many other tensors each pair of devices exchanges."""
    sends = [node for node in _nodes_of_step(mode) if node.op == "_Send"]
    pairs = collections.Counter(
        (_short(node.device), _short(node.attr["recv_device"].s.decode())) for node in sends
    )
    print(f"{mode}: tensors sent in a step: {dict(pairs)}")
    images = [node.name for node in sends if node.attr["T"].type == tf.uint8.as_datatype_enum]
    assert not images, images
    assert not [node.name for node in sends if "/prepare/" in node.name or "/prepare/" in node.input[0]]


def _is_of_integers(node) -> bool:
    return any(node.attr[name].type in _INTEGERS for name in ("T", "Tparams", "dtype", "DstT"))


def integers_stay(kind: str) -> None:
    """No integer that a tower got or computed is sent to the host."""
    # Ids of rows are sent to the device of the parameters.
    devices = towers(parameters=tower_devices()[0])
    strategy = build_strategy("towers", _TASKS[kind], devices, StepOptions(schedule=Constant(0.01)))
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    of_towers = tuple(f"{tower_scope(index)}/" for index in range(2))
    # Also what a GPU's own operation reads in the host's memory.
    read = {
        node.attr["tensor_name"].s
        for node in graphs.nodes
        if node.op == "_HostRecv" or (node.op == "_Recv" and _short(node.device) == "CPU:0")
    }
    sent = [
        node.input[0]
        for node in graphs.nodes
        if node.op == "_Send"
        and _short(node.device) != "CPU:0"
        and node.attr["T"].type in _INTEGERS
        and node.attr["tensor_name"].s in read
    ]
    found = [name for name in sent if name.startswith(of_towers)]
    # CPUs that stand in for GPUs have nothing in another device's memory.
    assert STAND_IN or not found, found
    assert set(graphs.devices_of("StatelessRandomUniformFullInt")) <= {"CPU:0"}


def packed_copies(mode: str) -> None:
    """The towers' devices send each other fewer tensors than without packs; prints both numbers."""
    alone, packed = (
        _graphs_of_step(mode, towers(packed_copies=packs)).num_sent()
        for packs in (False, True if STAND_IN else None)
    )
    pair = tuple(map(_short, tower_devices()))
    for one in (pair, pair[::-1]):
        print(f"{mode}: from {one[0]} to {one[1]} {packed[one]} tensors in packs, alone {alone[one]}")
        assert 0 < packed[one] < alone[one]


def _nodes_of_step(mode: str) -> list:
    return _graphs_of_step(mode, towers()).nodes


def _graphs_of_step(mode: str, devices: Devices) -> PartitionedGraphs:
    strategy = strategy_of(mode, devices)
    with recorded_graphs() as graphs:
        strategy.run_steps(1)
    return graphs
