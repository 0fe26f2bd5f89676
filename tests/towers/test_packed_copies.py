"""Packed copies: what is packed, where it arrives, the same bits in every placement, and few copies in a step."""

import dataclasses
import functools

import pytest
import tensorflow as tf
from keras import layers

from strategies.registry import build_strategy
from tests.tiers import first_quick
from tests.towers import table_and_matrices
from tests.towers.gpu_kernels import on_host_in
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, parameters_of, stacked, vectors
from towers.devices import Devices
from towers.options import StepOptions
from towers.packed_copies import BYTES_PER_PACK, PackedCopies
from towers.updates.clipping import Clipping
from towers.updates.rules import Adam

FIRST, SECOND, THIRD = (f"/device:CPU:{index}" for index in range(3))


def differ(source: str, target: str) -> bool:
    return source != target


def on(device: str, *values) -> list[tf.Tensor]:
    with tf.device(device):
        return [tf.identity(value) for value in values]


# --- what is packed


def test_values_arrive_on_their_targets_with_their_bits():
    matrix, half, vector, scalar = tf.random.stateless_normal([4, 3, 2], (1, 2))
    values = on(FIRST, matrix, tf.cast(half, tf.bfloat16), vector[0], tf.cast(scalar, tf.bfloat16)[0, 0])
    sent = PackedCopies(differ).sent(values, [FIRST] * 4, [(FIRST, SECOND, THIRD)] * 4)
    for value, of_value in zip(values, sent, strict=True):
        assert of_value[FIRST] is value
        for target in (SECOND, THIRD):
            assert of_value[target].device.endswith(target) and of_value[target].dtype == value.dtype
            assert of_value[target].numpy().tobytes() == value.numpy().tobytes()


def test_sparse_gradients_integers_and_large_tensors_are_sent_as_they_are():
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 4]), tf.constant([9, 3]))
    large = tf.zeros([BYTES_PER_PACK // 4 + 1])
    values = [sparse, *on(FIRST, tf.constant([1, 2]), large, tf.ones([2]), tf.ones([3]))]
    sent = PackedCopies(differ).moved(values, FIRST, [SECOND] * 5)
    assert [found is value for found, value in zip(sent, values, strict=True)] == [True] * 3 + [False] * 2


@tf.function(autograph=False)
def _moved(values, bytes_per_pack):
    return PackedCopies(differ, bytes_per_pack).moved(values, FIRST, [SECOND] * len(values))


def test_a_pack_has_at_most_its_bytes():
    graph = _moved.get_concrete_function([tf.TensorSpec([size]) for size in (1, 2, 3, 4, 2)], 16).graph
    packs = [operation for operation in graph.get_operations() if operation.type == "ConcatV2"]
    # Packs (2), (4), (3), (2 1) from the end, of 4 bytes a number; a tensor alone is not joined.
    assert [[int(part.shape[0]) for part in pack.inputs[:-1]] for pack in packs] == [[2, 1]]
    assert all(pack.device.endswith(FIRST) for pack in packs)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16, tf.float64], ids=lambda dtype: dtype.name)
def test_gpus_join_and_cut_packs_without_the_host(dtype):
    graph = _moved.get_concrete_function([tf.TensorSpec(shape, dtype) for shape in ([], [5], [3, 2])], 64).graph
    assert "SplitV" in {operation.type for operation in graph.get_operations()}
    assert not on_host_in(graph)


def test_only_copies_between_gpus_are_packed():
    gpus = Devices(towers=("/device:GPU:0", "/device:GPU:1"), parameters="/device:GPU:0")
    assert gpus.packed("/device:GPU:0", "/device:GPU:1") and not gpus.packed("/device:GPU:1", "/device:GPU:1")
    assert not gpus.packed("/device:CPU:0", "/device:GPU:1") and not gpus.packed("/device:GPU:1", "/device:CPU:0")
    assert not cpus(2).packed(FIRST, SECOND)


# --- steps


def task_with_statistics() -> TinyTask:
    def build():
        pairs = [
            (layers.Dense(7, name=f"dense_{k}"), layers.BatchNormalization(name=f"norm_{k}")) for k in range(3)
        ]
        return stacked(
            (4,), *(layer for pair in pairs for layer in pair), layers.Dense(NUM_CLASSES, name="logits")
        )

    return TinyTask(build=build, examples=vectors(36), batch_size=18)


@functools.cache
def _run(make_task, packed: bool, spread: tuple, masks: bool = True, **options):
    """Numbers, strategy and graphs after three steps on three towers, by default with masks as on GPUs.

    The numbers are parameters and state. No test trains the strategy further.
    """
    devices = dataclasses.replace(cpus(3, **dict(spread)), packed_copies=packed, masks=masks)
    options = StepOptions(rule=Adam(), **options)
    strategy = build_strategy("towers", make_task(), devices, options)
    with recorded_graphs() as graphs:
        strategy.run_steps(3)
    state = {name: variable.numpy() for name, variable in strategy.engine.state().items()}
    return parameters_of(strategy) | state, strategy, graphs


SPREADS = {
    "central": (),
    "replicated": (("replicated", True),),
    "sharded": (("sharded", True),),
    "zero=1": (("zero", 1),),
    "zero=2": (("zero", 2),),
}
# Without microbatches ZeRO 1 sends what ZeRO 2 sends.
MODES = first_quick([mode for mode in SPREADS if mode != "zero=1"])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["central", "sharded", "zero=2"])
def test_packing_changes_no_bit(mode):
    (expected, alone, _), (found, together, _) = (
        _run(task_with_statistics, packed, SPREADS[mode]) for packed in (False, True)
    )
    assert len(found) == 20
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    assert together.evaluate() == alone.evaluate()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["central", "zero=1"])
def test_nor_with_tables_microbatches_and_clipping(mode):
    others = {"masks": False, "accumulation": 2, "clipping": Clipping(norm=0.05)}
    (expected, *_), (found, *_) = (
        _run(table_and_matrices.task, packed, SPREADS[mode], **others) for packed in (False, True)
    )
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_of_devices_sends_few_tensors_whatever_the_number_of_variables(mode):
    alone, packed = (
        _run(task_with_statistics, is_packed, SPREADS[mode])[-1].num_sent() for is_packed in (False, True)
    )
    assert packed.keys() == alone.keys()
    for pair, count in packed.items():
        # Scalars are not packed: weights, losses, the rate, and whether the step is finite.
        assert count <= 12 and count < alone[pair] / 2, (pair, count, alone[pair])
