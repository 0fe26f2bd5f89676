"""Collectives that could be launched in any order get one order, as the graphs show; the bits stay the same."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import strategies.towers
from strategies.ring.exchange.collectives import WireOptions, WorkerExchange
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, assert_close, images, parameters_of, trainer_of
from towers.launch_order import LaunchOrder
from towers.tracing.traced_once import TracedOnce


def ancestors(nodes: dict[str, list[str]], name: str) -> set[str]:
    """Names of all operations that must run before `name`; `nodes` are the inputs of each operation."""
    found, waiting = set(), [*nodes[name]]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += nodes.get(one, [])
    return found


def unordered_pairs(node_defs) -> tuple[int, int]:
    """Number of collectives, and of pairs of collectives in which neither waits for the other."""
    nodes = {node.name: [name.lstrip("^").partition(":")[0] for name in node.input] for node in node_defs}
    collectives = [node.name for node in node_defs if node.op.startswith("Collective")]
    before = {name: ancestors(nodes, name) for name in collectives}
    pairs = [(one, other) for one in collectives for other in collectives if one < other]
    return len(collectives), sum(a not in before[b] and b not in before[a] for a, b in pairs)


def two_branches() -> keras.Model:
    inputs = layers.Input((6, 6, 3))
    branches = [
        layers.BatchNormalization(name=f"norm_{name}")(layers.Conv2D(2, 3, name=f"conv_{name}")(inputs))
        for name in ("left", "right")
    ]
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(layers.Flatten()(layers.Add()(branches))))


@pytest.fixture(autouse=True)
def towers_with_graphs_of_their_own(monkeypatch):
    """Gives each tower a graph of its own, as on GPUs."""
    monkeypatch.setattr(strategies.towers, "_traced", lambda *_: TracedOnce)


def towers_of(ordered: bool, **options):
    task = TinyTask(build=two_branches, examples=images(16), batch_size=8)
    strategy = trainer_of(task, 2, batch_stats="synced", **options)
    # In time, because the tower is traced at its first step.
    strategy.engine.tower.exchange.order = LaunchOrder() if ordered else None
    return strategy


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"accumulation": 2}])
def test_statistics_of_branches_are_exchanged_in_one_order(options):
    pairs, numbers = {}, []
    for ordered in (False, True):
        strategy = towers_of(ordered, **options)
        library = strategy.graph().as_graph_def().library
        found = [unordered_pairs(function.node_def) for function in library.function]
        pairs[ordered] = [one for one in found if one[0]]
        strategy.run_steps(3)
        numbers.append(parameters_of(strategy))
    assert all(unordered for _, unordered in pairs[False]) and pairs[False]
    assert [count for count, _ in pairs[True]] == [count for count, _ in pairs[False]]
    assert not any(unordered for _, unordered in pairs[True])
    assert_close(numbers[1], numbers[0], tolerance=0)


def test_a_tower_ends_after_its_exchanges():
    graph_def = towers_of(ordered=True).graph().as_graph_def()
    (function,) = [
        one for one in graph_def.library.function if any(node.op == "CollectiveReduce" for node in one.node_def)
    ]
    nodes = {node.name: [name.lstrip("^").partition(":")[0] for name in node.input] for node in function.node_def}
    collectives = {node.name for node in function.node_def if node.op == "CollectiveReduce"}
    for result in function.ret.values():
        name = result.partition(":")[0]
        assert collectives <= {name} | ancestors(nodes, name), result


def test_workers_launch_their_sums_in_one_order():
    """They need no order of ours: TensorFlow runs stateful operations, as these are, in order of creation."""
    exchange = WorkerExchange(2, 0, WireOptions(algorithm="nccl", bytes_per_pack=8), channel=1)

    @tf.function(autograph=False)
    def step(first, second, table):
        (scalar,) = exchange.sum([tf.reduce_sum(first)])
        rows = tf.IndexedSlices(table, tf.constant([0, 1]), tf.constant([4, 2]))
        summed = exchange.sum_gradients([first, second, rows])
        return scalar, summed[:2], summed[2].values

    shapes = [tf.TensorSpec(shape, tf.float32) for shape in ([2], [3], [2, 2])]
    count, unordered = unordered_pairs(step.get_concrete_function(*shapes).graph.as_graph_def().node)
    assert (count, unordered) == (6, 0)
