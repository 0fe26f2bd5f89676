"""The engine's step: steps that are not finite, refused arguments, and the gradients that reach the update."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies.errors import NonFiniteStep
from strategies.registry import build_strategy
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.partitioned_graphs import recorded_graphs
from tests.towers.tiny_tasks import (
    NUM_CLASSES,
    TinyTask,
    assert_close,
    dense_network,
    dense_task,
    parameters_of,
    squared_error,
    stacked,
    trainer_of,
    vectors,
)
from tests.towers.user_errors import refused
from tests.towers.watched_rule import WatchedSGD
from towers.devices import Devices
from towers.options import StepOptions
from towers.split import sizes
from towers.task import Batch
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead
from towers.updates.rules import SGD, Momentum
from towers.updates.schedules import Constant

# --- not finite

# Index of the batch, of 8 examples, that contains a NaN.
BAD_STEP = 2


def task_with_nan(index_in_batch: int = 0) -> TinyTask:
    examples = vectors(40)
    examples.features[8 * BAD_STEP + index_in_batch, 1] = np.nan
    return TinyTask(build=dense_network, examples=examples, batch_size=8)


def counters_of(strategy) -> dict[str, int]:
    counters = strategy.checkpointables()["counters"]
    return {name: int(counters[name]) for name in ("step", "updates", "skipped")}


def all_numbers(strategy) -> dict[str, np.ndarray]:
    """Parameters and momenta."""
    slots = strategy.checkpointables()["slots"]["momentum"]
    return parameters_of(strategy) | {f"momentum of {name}": value.numpy() for name, value in slots.items()}


# (towers, microbatches, index of the NaN's example in its batch): in the first part and in the last part.
NAN_CASES = first_quick([(2, 2, 7), (3, 1, 0)])


@pytest.mark.parametrize(
    "num_towers, accumulation, nan_index, at_once", first_quick([(2, 2, 7, False), (3, 1, 0, True)])
)
def test_stop_names_the_step_and_applies_nothing(num_towers, accumulation, nan_index, at_once):
    strategy = trainer_of(task_with_nan(nan_index), num_towers, accumulation=accumulation)
    expected = trainer_of(task_with_nan(nan_index), num_towers, accumulation=accumulation)
    expected.run_steps(BAD_STEP)
    with pytest.raises(NonFiniteStep) as caught:
        for num_steps in [5] if at_once else [1] * 5:
            strategy.run_steps(num_steps)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.step == BAD_STEP and f"step {BAD_STEP} " in message
    assert "its batch holds NaN" in message and "on_nan='skip'" in message
    assert_close(all_numbers(strategy), all_numbers(expected), tolerance=0)
    assert counters_of(strategy)["updates"] == BAD_STEP


@pytest.mark.full
@pytest.mark.parametrize(
    "mode, num_steps",
    [
        ("mirrored", BAD_STEP + 1),
        ("towers", BAD_STEP + 3),
        ("towers", BAD_STEP + 1),
        ("ring", BAD_STEP + 1),
    ],
)
def test_lookahead_ends_with_the_average_if_a_step_is_skipped(mode, num_steps):
    rule = Lookahead(rule=SGD(), num_updates=num_steps, every=2)
    options = StepOptions(rule=rule, schedule=Constant(0.1), on_nan="skip")
    strategy = build_strategy(mode, task_with_nan(), cpus(2), options)
    assert strategy.run_steps(num_steps).skipped == 1
    found, slow = parameters_of(strategy), strategy.checkpointables()["slots"]["slow"]
    assert all(np.any(value.numpy() != 0) for value in slow.values())
    assert_close(found, {name: value.numpy() for name, value in slow.items()}, tolerance=0)
    strategy.run_steps(1)
    assert any(np.any(value != found[name]) for name, value in parameters_of(strategy).items())


def test_training_continues_from_values_restored_after_a_bad_step():
    strategy, expected = trainer_of(task_with_nan(), 2), trainer_of(task_with_nan(), 2)
    kept = tf.nest.map_structure(lambda variable: variable.numpy(), strategy.checkpointables())
    for _ in range(2):
        with pytest.raises(NonFiniteStep) as caught:
            strategy.run_steps(BAD_STEP + 2)
        assert caught.value.step == BAD_STEP and "\n" not in str(caught.value)
    assert "restore a checkpoint" in str(caught.value)
    tf.nest.map_structure(lambda variable, value: variable.assign(value), strategy.checkpointables(), kept)
    strategy.restored()
    assert strategy.run_steps(BAD_STEP).loss == expected.run_steps(BAD_STEP).loss
    assert counters_of(strategy) == counters_of(expected) == {"step": BAD_STEP, "updates": BAD_STEP, "skipped": 0}
    assert_close(all_numbers(strategy), all_numbers(expected), tolerance=0)
    with pytest.raises(NonFiniteStep):
        strategy.run_steps(1)


@pytest.mark.parametrize("num_towers, accumulation, nan_index", NAN_CASES)
def test_skip_omits_the_update_and_continues(num_towers, accumulation, nan_index):
    strategy = trainer_of(task_with_nan(nan_index), num_towers, accumulation=accumulation, on_nan="skip")
    before_it = strategy.run_steps(BAD_STEP)
    before = all_numbers(strategy)
    report = strategy.run_steps(1)
    assert_close(all_numbers(strategy), before, tolerance=0)
    assert report.skipped == 1 and np.isnan(report.loss) and before_it.skipped == 0
    after = strategy.run_steps(2)
    assert after.skipped == 0 and np.isfinite(after.loss)
    assert counters_of(strategy) == {"step": 5, "updates": 4, "skipped": 1}
    assert all(np.isfinite(value).all() for value in all_numbers(strategy).values())


def test_skipped_steps_are_not_in_the_mean_loss():
    strategy = trainer_of(task_with_nan(), 2, on_nan="skip", rate=0.0)
    report = strategy.run_steps(5)
    losses = [strategy.run_steps(1).loss for _ in range(5)]  # the same five batches again
    assert report.skipped == 1
    assert report.loss == pytest.approx(np.nanmean(losses), rel=1e-6)


def test_a_divergence_is_not_reported_as_bad_data():
    task = TinyTask(
        build=lambda: stacked((4,), layers.Dense(1, name="line")),
        examples=Batch(vectors(8).features, np.ones((8, 1), np.float32)),
        losses=squared_error,
    )
    with pytest.raises(NonFiniteStep, match="lower the learning rate or clip") as caught:
        trainer_of(task, 2, rate=1e6).run_steps(40)
    assert "NaN or infinite features" not in str(caught.value)


def test_infinite_features_are_bad_data_too():
    task = task_with_nan()
    task.examples.features[np.isnan(task.examples.features)] = np.inf
    with pytest.raises(NonFiniteStep, match="infinite features"):
        trainer_of(task).run_steps(4)


def test_features_beyond_float16_are_named():
    examples = vectors(8)
    examples.features[3, 1] = -1e5
    task = TinyTask(build=lambda: stacked((4,), layers.Dense(NUM_CLASSES)), examples=examples)
    with pytest.raises(
        NonFiniteStep, match="step 0 .* features beyond float16's largest number, 65,504: scale them"
    ):
        trainer_of(task, 2, precision="float16").run_steps(4)


def test_under_masks_features_are_checked_on_the_devices_that_have_them():
    """As on GPUs: a check on the host would wait for them in every step."""
    _, *own = cpus(3).towers
    devices = Devices(towers=tuple(own), parameters=own[0], masks=True, input_on_towers=True)
    made = build_strategy("towers", dense_task(8), devices, StepOptions(schedule=Constant(0.1)))
    checks = {one.device.rpartition("/")[2] for one in made.graph().get_operations() if one.type == "All"}
    assert checks == {name.rpartition("/")[2] for name in own}


# --- what is refused


@pytest.mark.parametrize("num_towers", first_quick([2, 1]))
def test_labels_out_of_range(num_towers):
    task = dense_task(8)
    task.examples.labels[6] = 7
    strategy = trainer_of(task, num_towers)
    with refused("step 0", "label 7 is out of range", f"labels 0..{NUM_CLASSES - 1}"):
        strategy.run_steps(1)
    with refused("evaluation", "label 7"):
        strategy.evaluate()


@pytest.mark.parametrize(
    "count, num_towers, options, parts",
    [
        (3, 4, {}, ["4 towers for a batch of 3", "num_towers=3"]),
        (8, 3, {"shares": (5, 3)}, ["tower_shares=5,3", "2 shares for 3 towers"]),
        (8, 2, {"shares": (5, 3, 2)}, ["tower_shares=5,3,2", "3 shares for 2 towers"]),
        (8, 2, {"shares": (5, 0)}, ["tower_shares=5,0"]),
        (4, 3, {"shares": (50, 1, 1)}, ["tower_shares=50,1,1", "a batch of 4"]),
        (3, 1, {"accumulation": 4}, ["accumulation=4 for a batch of 3", "use accumulation=3 or less"]),
        (8, 3, {"accumulation": 4}, ["3 towers for a microbatch (accumulation=4) of 2"]),
    ],
)
def test_a_batch_too_small_for_all_towers(count, num_towers, options, parts):
    with refused(*parts):
        trainer_of(dense_task(count), num_towers, **options)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"batch_stats": "median"}, "batch_stats='median'"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"accumulation": 2.0}, "accumulation=2.0: must be an integer"),
        ({"on_nan": "ignore"}, "on_nan='ignore'"),
        ({"seed": None}, "seed=None: must be an integer"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**31}, f"seed={2**31}"),
        ({"schedule": 0.1}, "schedule=0.1: must be a function"),
        ({"rule": keras.optimizers.Adam()}, "rule=Adam: must be a rule"),
    ],
)
def test_step_options(options, part):
    with refused(part):
        StepOptions(**options)


# --- what reaches the update


def word_task(rows: int = 20) -> TinyTask:
    """Examples with repeated words, within one tower's part and in several towers' parts."""

    def build():
        embedding = layers.Embedding(rows, 16, name="embedding")
        return stacked((3,), embedding, layers.Flatten(), layers.Dense(NUM_CLASSES, name="logits"))

    words = np.array([[1, 2, 1], [2, 3, 9], [1, 1, 1], [9, 4, 2], [7, 7, 3], [1, 2, 3]], np.int32)
    return TinyTask(build=build, examples=Batch(words, vectors(6).labels))


@pytest.mark.parametrize(
    "num_towers, accumulation, clipping, rows",
    first_quick(
        [
            (2, 2, Clipping(norm=0.05), 70_000),
            (2, 2, Clipping(global_norm=0.1), 20),
            (1, 1, Clipping(norm=0.05), 20),
            (1, 1, Clipping(global_norm=0.1), 70_000),
            (3, 1, Clipping(global_norm=0.1), 70_000),
        ]
    ),
    ids=str,
)
def test_sparse_gradients_stay_sparse_and_exact(num_towers, accumulation, clipping, rows):
    """Towers get only those rows of a large table that the batch uses."""
    rule, task = WatchedSGD(), word_task(rows)
    strategy = trainer_of(task, num_towers, rule=rule, clipping=clipping, accumulation=accumulation)
    assert bool(strategy.engine._lookups.heights) == (rows > 20)
    strategy.run_steps(3)
    assert issubclass(rule.seen["embedding/embeddings"], tf.IndexedSlices)
    assert not issubclass(rule.seen["logits/kernel"], tf.IndexedSlices)
    assert_close(parameters_of(strategy), by_hand(task, clipping, num_steps=3))


def by_hand(task, clipping, num_steps, rate=0.1) -> dict[str, np.ndarray]:
    """Plain descent on dense mean gradients of the whole batch, clipped by TensorFlow's own functions."""
    keras.utils.set_random_seed(0)
    model = task.build_model()
    batch = tf.nest.map_structure(tf.constant, task.examples)
    for _ in range(num_steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.losses(model(batch.features, training=True), batch))
        found = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, model.trainable_variables)]
        if clipping.global_norm:
            found, _ = tf.clip_by_global_norm(found, clipping.global_norm)
        if clipping.norm:
            found = [tf.clip_by_norm(gradient, clipping.norm) for gradient in found]
        if clipping.value:
            found = [tf.clip_by_value(gradient, -clipping.value, clipping.value) for gradient in found]
        for variable, gradient in zip(model.trainable_variables, found, strict=True):
            variable.assign_sub(rate * gradient)
    return {variable.path: variable.numpy() for variable in model.trainable_variables}


def opposed_task() -> TinyTask:
    """outputs = w * x of one weight: the two examples' gradients are 100 and -98, their mean is 1."""
    head = {"use_bias": False, "kernel_initializer": "zeros", "name": "head"}
    return TinyTask(
        build=lambda: stacked((1,), layers.Dense(1, **head)),
        examples=Batch(np.array([[100.0], [-98.0]], np.float32), np.zeros((2, 1), np.float32)),
        losses=lambda outputs, batch: tf.reduce_sum(outputs, 1),
    )


@pytest.mark.parametrize("accumulation", first_quick([2, 1]))
@pytest.mark.parametrize(
    "clipping", first_quick([Clipping(value=2.0), Clipping(norm=2.0), Clipping(global_norm=2.0)]), ids=str
)
def test_the_mean_gradient_is_clipped(clipping, accumulation):
    """If each part were clipped, to 2 and -2, the mean would be 0 instead of 1."""
    num_towers = 2 // accumulation
    options = {"rule": SGD(), "clipping": clipping, "accumulation": accumulation, "rate": 1.0}
    strategy = trainer_of(opposed_task(), num_towers, **options)
    report = strategy.run_steps(1)
    assert report.gradient_norm == pytest.approx(1.0)
    assert parameters_of(strategy)["head/kernel"] == pytest.approx(-1.0)


def test_the_reported_norm_is_before_clipping():
    report = trainer_of(dense_task(), clipping=Clipping(global_norm=1e-3)).run_steps(1)
    assert report.gradient_norm > 0.05


# --- batch statistics


def norm_task() -> TinyTask:
    def build():
        norm = layers.BatchNormalization(momentum=0.0, name="norm")
        return stacked((4,), norm, layers.Dense(NUM_CLASSES, name="logits"))

    return TinyTask(build=build, examples=vectors(10))


@pytest.mark.parametrize("batch_stats", first_quick(["synced", "average", "first"], 2))
def test_moving_mean_of_each_policy(batch_stats):
    """With momentum 0 the moving mean is the last step's mean. Towers have 5, 3 and 2 examples."""
    strategy = trainer_of(norm_task(), 3, shares=(5, 3, 2), batch_stats=batch_stats)
    strategy.run_steps(1)
    state = {name: variable.numpy() for name, variable in strategy.engine.state().items()}
    features = vectors(10).features
    means = {"average": features.mean(0), "first": features[:5].mean(0), "synced": features.mean(0)}
    np.testing.assert_allclose(state["norm/moving_mean"], means[batch_stats], rtol=1e-5, atol=1e-6)
    parts = np.split(features, np.cumsum(sizes(10, (5, 3, 2)))[:-1])
    variances = {
        "average": sum(part.var(0) * len(part) for part in parts) / 10,
        "first": parts[0].var(0),
        "synced": features.var(0),
    }
    np.testing.assert_allclose(state["norm/moving_variance"], variances[batch_stats], rtol=1e-5)


def test_microbatches_follow_each_other_in_the_moving_mean():
    strategy = trainer_of(norm_task(), 1, accumulation=2)
    strategy.run_steps(1)
    state = strategy.engine.state()["norm/moving_mean"].numpy()
    np.testing.assert_allclose(state, vectors(10).features[5:].mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_fused_batch_norm_off_gives_the_same_numbers():
    found = []
    for fused in (True, False):
        strategy = trainer_of(norm_task(), 2, fused_batch_norm=fused)
        strategy.run_steps(5)
        found.append(parameters_of(strategy))
    assert_close(found[1], found[0])


# --- other options


@pytest.mark.full
def test_xla_gives_the_same_numbers():
    """For several towers; `tracing/test_drawn_numbers.py` compares those of one tower."""
    found = []
    for xla in (False, True):
        strategy = trainer_of(dense_task(8, batch_size=6), 3, xla=xla)
        with recorded_graphs() as graphs:
            strategy.run_steps(4)
        assert any(node.attr["_XlaMustCompile"].b for node in graphs.nodes) is xla
        found.append(parameters_of(strategy))
    assert_close(found[1], found[0])


def test_xla_compiles_no_evaluation_which_keeps_its_kernels():
    devices = dataclasses.replace(cpus(1), input_on_towers=True)
    engine = build_strategy("towers", norm_task(), devices, StepOptions(xla=True)).engine
    assert engine.evaluation_kernels.values_on_host and engine.evaluation_kernels.wide_ids
    assert not engine.kernels.values_on_host and not engine.kernels.wide_ids


def test_xla_with_synced_statistics():
    with refused("xla=True with batch_stats='synced'", "batch_stats='average'"):
        trainer_of(norm_task(), 2, xla=True, batch_stats="synced")


def test_each_step_uses_its_own_rate():
    strategy = trainer_of(opposed_task(), 2, rule=SGD(), schedule=lambda step: 10.0**step)
    found = []
    for _ in range(3):
        found.append(strategy.run_steps(1).learning_rate)
        found.append(float(parameters_of(strategy)["head/kernel"][0, 0]))
    assert found == pytest.approx([1.0, -1.0, 10.0, -11.0, 100.0, -111.0])


def test_weight_decay_of_a_rule():
    rule = Momentum(weight_decay=0.5)
    strategy = trainer_of(dense_task(), rule=rule)
    plain = trainer_of(dense_task(), rule=Momentum())
    start = parameters_of(plain)
    strategy.run_steps(1)
    plain.run_steps(1)
    for name, value in parameters_of(strategy).items():
        decayed = 0.1 * 0.5 * start[name] if value.ndim > 1 else 0.0
        np.testing.assert_allclose(value, parameters_of(plain)[name] - decayed, rtol=1e-5, atol=1e-6)


def synchronized_task() -> TinyTask:
    """A batch norm that asks for the statistics of the whole batch."""

    def build():
        norm = layers.BatchNormalization(synchronized=True, name="norm")
        return stacked((4,), norm, layers.Dense(NUM_CLASSES))

    return TinyTask(build=build, examples=vectors(8))


@pytest.mark.parametrize("batch_stats", ["average", "first"])
def test_synchronized_batch_norm_needs_synced_statistics(batch_stats):
    with refused("layer 'norm' has synchronized=True", f"batch_stats={batch_stats!r}", "batch_stats='synced'"):
        trainer_of(synchronized_task(), 2, batch_stats=batch_stats)


@pytest.mark.parametrize("num_towers, batch_stats", first_quick([(1, "average"), (2, "synced")]))
def test_synchronized_batch_norm(num_towers, batch_stats):
    strategy = trainer_of(synchronized_task(), num_towers, batch_stats=batch_stats)
    strategy.run_steps(1)
    assert strategy.checkpointables()["state"]["norm/moving_mean"].numpy() == pytest.approx(
        0.01 * vectors(8).features.mean(0), rel=1e-5
    )


@pytest.mark.full
def test_six_engines_in_a_process_bring_no_warning_of_retracing(caplog):
    for _ in range(6):
        strategy = trainer_of(dense_task(), num_towers=1)
        strategy.run_steps(2)
    assert not [line for line in caplog.messages if "retracing" in line]
