"""Precision: layers compute in it, parameters stay float32, and loss scaling saves float16 gradients."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tiers import first_quick
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, dense_task, images, parameters_of, trainer_of
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.precision import LossScaling, layer_precision, loss_scaling_for

POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "float64": "float64",
}


@pytest.mark.parametrize("name, policy", POLICIES.items())
def test_layer_precision_is_restored(name, policy):
    before = keras.config.dtype_policy()
    with layer_precision(name):
        assert keras.config.dtype_policy().name == policy
    assert keras.config.dtype_policy() == before


def test_layer_precision_is_restored_after_an_error():
    before = keras.config.dtype_policy()
    with pytest.raises(RuntimeError), layer_precision("bfloat16"):
        raise RuntimeError
    assert keras.config.dtype_policy() == before


@pytest.mark.parametrize(
    "refuse", [lambda: layer_precision("fp8").__enter__(), lambda: StepOptions(precision="fp8")]
)
def test_an_unknown_precision(refuse):
    with refused("precision='fp8'", "float32, bfloat16, float16, float64"):
        refuse()


@pytest.mark.parametrize(
    "name, num_towers", first_quick([("bfloat16", 3), ("float16", 3), ("float32", 1), ("float64", 1)])
)
def test_training_keeps_the_parameters_dtype(name, num_towers):
    strategy = trainer_of(dense_task(24), num_towers, precision=name)
    first, last = strategy.run_steps(1), strategy.run_steps(15)
    assert last.loss < first.loss and last.skipped == first.skipped == 0
    kept = np.float64 if name == "float64" else np.float32
    assert {value.dtype.type for value in parameters_of(strategy).values()} == {kept}
    assert all(np.isfinite(value).all() for value in parameters_of(strategy).values())


@functools.cache
def loss_in(precision: str) -> float:
    return trainer_of(dense_task(24), precision=precision).run_steps(10).loss


@pytest.mark.full
@pytest.mark.parametrize("name, tolerance", [("float16", 0.004), ("bfloat16", 0.03)])
def test_losses_are_near_float32(name, tolerance):
    found = [loss_in(precision) for precision in ("float32", name)]
    assert found[1] == pytest.approx(found[0], rel=tolerance)
    assert found[1] != found[0], "the layers compute in another precision"


@functools.cache
def loss_of_a_batch_norm_before_a_relu(precision: str) -> float:
    def network() -> keras.Model:
        normed = layers.BatchNormalization()(layers.Conv2D(8, 3)(inputs := keras.Input((6, 6, 3))))
        pooled = layers.GlobalAveragePooling2D()(layers.ReLU()(normed))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, dtype="float32")(pooled))

    task = TinyTask(build=network, examples=images(8), batch_size=8)
    return trainer_of(task, precision=precision).run_steps(3).loss


@pytest.mark.parametrize("name", first_quick(["float16", "bfloat16"]))
def test_a_batch_norm_before_a_relu(name):
    """TensorFlow's graph optimizer would join them in float16, for which no CPU kernel exists."""
    found = [loss_of_a_batch_norm_before_a_relu(precision) for precision in ("float32", name)]
    assert found[1] == pytest.approx(found[0], rel=0.03)


# --- loss scaling


def next_state(scaling, scale, good_steps, finite):
    found = scaling.next_state(tf.constant(scale), tf.constant(good_steps, tf.int64), tf.constant(finite))
    return tuple(tensor.numpy() for tensor in found)


@pytest.mark.parametrize(
    "before, finite, after",
    [
        ((256.0, 3), True, (256.0, 4)),
        ((256.0, 9), True, (512.0, 0)),
        ((256.0, 3), False, (128.0, 0)),
        ((2.0**-14, 3), False, (2.0**-14, 0)),
        ((2.0**64, 9), True, (2.0**64, 0)),
        ((np.inf, 3), False, (2.0**64, 0)),
    ],
    ids=["counts", "doubles", "halves", "stops at the smallest", "stops at the largest", "leaves infinity"],
)
def test_next_state(before, finite, after):
    assert next_state(LossScaling(growth_steps=10), *before, finite) == after


def test_only_float16_is_scaled():
    assert [name for name in POLICIES if loss_scaling_for(name)] == ["float16"]


def test_the_scale_is_in_the_checkpoint():
    counters = trainer_of(dense_task(), precision="float16").checkpointables()["counters"]
    assert counters["loss_scale"].numpy() == 256.0 and counters["good_steps"].numpy() == 0


@pytest.mark.parametrize("num_towers", first_quick([2, 1]))
def test_an_overflow_halves_the_scale_and_skips(num_towers):
    strategy = trainer_of(dense_task(), num_towers, precision="float16")
    counters, before = strategy.checkpointables()["counters"], parameters_of(strategy)
    # float16's largest number is 65504, so gradients of single examples overflow.
    counters["loss_scale"].assign(2.0**24)
    report = strategy.run_steps(1)
    assert report.skipped == 1
    assert counters["loss_scale"].numpy() == 2.0**23
    found = {name: int(counters[name]) for name in ("step", "updates", "skipped")}
    assert found == {"step": 1, "updates": 0, "skipped": 1}
    for name, value in parameters_of(strategy).items():
        np.testing.assert_array_equal(value, before[name])


def test_training_continues_after_overflows():
    strategy = trainer_of(dense_task(), precision="float16")
    strategy.checkpointables()["counters"]["loss_scale"].assign(2.0**20)
    strategy.run_steps(15)
    assert strategy.run_steps(2).skipped == 0


def test_good_steps_double_the_scale():
    strategy = trainer_of(dense_task(), precision="float16")
    counters = strategy.checkpointables()["counters"]
    counters["good_steps"].assign(LossScaling().growth_steps - 1)
    strategy.run_steps(1)
    assert counters["loss_scale"].numpy() == 512.0 and counters["good_steps"].numpy() == 0


def flat_loss(outputs, batch):
    """A loss of 1000 for each example, without a gradient."""
    return 1000.0 + 0.0 * tf.cast(outputs[:, 0], tf.float32)


def test_at_the_largest_scale_a_step_is_finite():
    strategy = trainer_of(dense_task(losses=flat_loss), precision="float16")
    counters = strategy.checkpointables()["counters"]
    counters["loss_scale"].assign(LossScaling().largest)
    counters["good_steps"].assign(LossScaling().growth_steps - 1)
    report = strategy.run_steps(2)
    assert report.skipped == 0 and report.loss == 1000.0
    assert counters["loss_scale"].numpy() == LossScaling().largest


def test_the_scale_does_not_change_the_step():
    """Any power of two gives the same step, because gradients are divided by the scale before clipping."""
    strategy, norms = trainer_of(dense_task(), precision="float16", rate=0.0), []
    for scale in (1.0, 1024.0):
        strategy.checkpointables()["counters"]["loss_scale"].assign(scale)
        norms.append(strategy.run_steps(1).gradient_norm)
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)
