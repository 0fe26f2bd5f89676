"""With GPUs, shapes and seeds of random layers are placed on the host: in each mode, with the same bits."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies.registry import build_strategy
from strategies.ring.exchange.joining import Ring, RingOptions
from tests.towers.gpu_towers import AS_ON_GPUS, waits_of_evaluation, waits_of_tower
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, images
from towers.devices import Devices
from towers.grid import Grid
from towers.layers.host_values import place_host_values
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.schedules import Constant


class OwnNoise(keras.layers.Layer):
    """A user's layer that takes seeds from a generator itself."""

    def __init__(self, **named):
        super().__init__(**named)
        self.generator = keras.random.SeedGenerator(3)

    def call(self, inputs, training=False):
        seed = self.generator.next()
        return (
            inputs + keras.random.normal(inputs.shape[1:], seed=self.generator) + tf.cast(seed[0] % 3, tf.float32)
        )


def network() -> keras.Model:
    inputs = keras.Input((6, 6, 3))
    stem = keras.layers.Dropout(0.3, name="before")(keras.layers.Conv2D(4, 3, padding="same", name="stem")(inputs))
    branches = [keras.layers.Conv2D(4, 3, padding="same", name=name)(stem) for name in ("one", "two")]
    branches = [keras.layers.Dropout(0.2)(branch) for branch in branches]
    joined = keras.layers.GaussianNoise(0.1, name="noise")(keras.layers.Concatenate()(branches))
    pooled = keras.layers.GlobalAveragePooling2D()(OwnNoise(name="own")(joined))
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES, name="logits")(pooled))


def task() -> TinyTask:
    return TinyTask(build=network, examples=images(14), batch_size=7)


# By mode or grid: (strategy, fields of the devices, options of the step, options of the mode)
MODES = {
    "towers": ("towers", {}, {}, {}),
    "pipeline": ("pipeline", {}, {}, {"pipeline": PipelineOptions(microbatches=2)}),
    "data:2,branch:2": ("branches", {}, {}, {}),
    "recompute": ("towers", {}, {"recompute": "full"}, {}),
    "data:2,stage:2": ("pipeline", {"zero": 3}, {}, {"pipeline": PipelineOptions(microbatches=2)}),
    "data:2,slice:2": ("slices", {}, {}, {}),
    "mirrored": ("mirrored", {}, {}, {}),
    # One tower, because XLA takes long to compile each tower's graph.
    "xla": ("towers", {"towers": ("/device:CPU:1",)}, {"xla": True}, {}),
}


def test_the_host_waits_for_no_seed():
    assert [wait for wait in waits_of_tower(task()) if "Random" in wait] == []
    found = waits_of_tower(task(), dataclasses.replace(AS_ON_GPUS, values_on_host=False))
    assert any(wait.startswith("StatelessRandomUniformFullIntV2 > Pack") for wait in found)
    assert any(wait.startswith("Cast > StatelessRandomGetKeyCounter") for wait in found)


def _not_the_host(mode: str) -> Devices:
    """Two towers, of one device or as the mode's grid says; the first CPU, which is the host's, comes last."""
    grid = Grid.parse(mode) if ":" in mode else None
    names = tuple(f"/device:CPU:{index}" for index in (1, 2, 3, 0))[: grid.num_devices if grid else 2]
    found = Devices(towers=names, parameters=names[0])
    return found.grouped(grid.groups(names)) if grid else found


def of_shapes() -> keras.Model:
    """A backward pass that divides by a product of dimensions; products that reshape; a slice by a dimension."""
    inputs = keras.Input((6, 6, 3))
    rows = keras.layers.Dense(4, activation="gelu", name="rows")(inputs)
    normed = keras.layers.LayerNormalization(name="norm")(rows)
    heads = keras.layers.MultiHeadAttention(2, 2, name="heads")(normed, normed)
    first = keras.ops.reshape(heads, (-1, 6, 24))[:, : keras.ops.shape(heads)[1] // 2]
    pooled = keras.layers.GlobalAveragePooling1D(name="pooled")(first)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES, name="logits")(pooled))


def test_the_host_waits_for_no_shape():
    shapes = TinyTask(build=of_shapes, examples=images(14), batch_size=7)
    assert waits_of_tower(shapes) == waits_of_evaluation(shapes) == []
    found = waits_of_tower(shapes, dataclasses.replace(AS_ON_GPUS, values_on_host=False))
    assert any("Tensordot" in wait for wait in found) and any(wait.startswith("DynamicStitch") for wait in found)


def test_what_the_host_does_not_read_stays():
    """A mask of constants stays on the GPU, and so does what depends on a number of the batch."""

    @tf.function(autograph=False)
    def computed(values, count):
        mask = tf.range(6) * 2 > 3
        of_batch = tf.reshape(values, [tf.cast(values[0, 0], tf.int32), -1])
        return tf.where(mask, values, 0.0), of_batch, tf.reshape(values, tf.stack([count * 2, -1]))

    graph = computed.get_concrete_function(tf.TensorSpec([None, 6]), tf.TensorSpec([], tf.int32)).graph
    place_host_values(graph)
    assert not [operation.name for operation in graph.get_operations() if operation.device]


@pytest.mark.parametrize(
    "name, of_mode",
    [
        pytest.param("towers", {}, id="towers"),
        pytest.param("mirrored", {}, id="mirrored", marks=pytest.mark.full),
        pytest.param("ring", {"ring": Ring.alone(RingOptions(engine="own"))}, id="ring", marks=pytest.mark.full),
    ],
)
def test_what_a_step_s_seed_is_drawn_from_is_on_the_host(name, of_mode):
    """Operations without a device would be on a GPU, and the host would wait for that GPU's last step."""
    devices = dataclasses.replace(_not_the_host("towers"), input_on_towers=True)
    made = build_strategy(name, task(), devices, StepOptions(schedule=Constant(0.05)), **of_mode)
    waiting = [one for one in made.graph().get_operations() if one.type == "StatelessRandomUniformFullIntV2"]
    found = {}
    while waiting:
        operation = waiting.pop()
        if operation.type not in ("Placeholder", "Const", "ReadVariableOp"):
            found[operation.name] = operation.device.rpartition("/")[2]
        waiting += [tensor.op for tensor in operation.inputs]
    assert set(found.values()) == {"device:CPU:0"}, found


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_seeds_are_on_the_host_with_the_same_bits(mode):
    name, fields, of_step, of_mode = MODES[mode]
    options = StepOptions(schedule=Constant(0.05), seed=5, **of_step)
    trained = []
    for as_on_gpus in (False, True):
        keras.utils.set_random_seed(2)
        devices = dataclasses.replace(_not_the_host(mode), input_on_towers=as_on_gpus, **fields)
        made = build_strategy(name, task(), devices, options, **of_mode)
        with recorded_graphs() as graphs:
            made.run_steps(1)
        values = made.checkpointables()["parameters"].values()
        trained.append([made.run_steps(2).loss, *(np.array(tf.convert_to_tensor(value)) for value in values)])
        drawn, folded = (
            graphs.devices_of(kind) for kind in ("StatelessRandomUniformV2", "StatelessRandomUniformFullInt")
        )
        # XLA compiles seeds with the tower.
        if mode != "xla":
            assert "CPU:1" in drawn
            # The towers' seeds of a step are on the host in any case.
            assert (set(folded) == {"CPU:0"}) == as_on_gpus
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)
