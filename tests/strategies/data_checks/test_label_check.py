"""Labels out of range are named although the step, as on a GPU, only computes NaN as their loss."""

import numpy as np
import pytest
import tensorflow as tf

from strategies.data_checks.label_check import labels_out_of_range
from strategies.errors import NonFiniteStep
from strategies.registry import build_strategy
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, cross_entropy, dense_network, vectors
from tests.towers.user_errors import refused
from towers.devices import Devices
from towers.options import StepOptions
from towers.task import InputShard

WRONG_STEP = 2


def as_on_gpu(outputs, batch):
    """The cross-entropy; in a graph NaN for a label out of range, as by TensorFlow's kernel for GPUs."""
    if tf.executing_eagerly():
        return cross_entropy(outputs, batch)
    is_class = (batch.labels >= 0) & (batch.labels < NUM_CLASSES)
    known = cross_entropy(outputs, batch._replace(labels=tf.where(is_class, batch.labels, 0)))
    return tf.where(is_class, known, np.nan)


def strategy_of(mode="towers", labels=(), infinite=(), **options):
    """For 5 batches of 8; `labels`: pairs (index of an example, label); `infinite`: indices of examples."""
    examples = vectors(40)
    examples.features[list(infinite)] = np.inf
    for index, label in labels:
        examples.labels[index] = label
    task = TinyTask(build=dense_network, examples=examples, batch_size=8, losses=as_on_gpu)
    return build_strategy(mode, task, cpus(2), StepOptions(**options))


IN_WRONG_STEP = [(8 * WRONG_STEP + 3, NUM_CLASSES + 4)]
WORDS = (f"label {NUM_CLASSES + 4} is out of range", f"labels 0..{NUM_CLASSES - 1}; correct the labels")


@pytest.mark.parametrize("mode, options", [("towers", {"accumulation": 2}), ("ring", {})])
def test_training_names_the_label(mode, options):
    strategy = strategy_of(mode, IN_WRONG_STEP, **options)
    with refused(f"step {WRONG_STEP}: ", *WORDS):
        strategy.run_steps(5)


def test_evaluation_names_the_label():
    with refused("evaluation: ", *WORDS):
        strategy_of(labels=IN_WRONG_STEP).evaluate()


def test_a_skipped_step_names_the_label_where_a_gpu_computes(monkeypatch):
    assert strategy_of(labels=IN_WRONG_STEP, on_nan="skip").run_steps(5).skipped == 1
    monkeypatch.setattr(Devices, "on_cpu", property(lambda self: False))
    with refused(f"step {WRONG_STEP}: ", *WORDS):
        strategy_of(labels=IN_WRONG_STEP, on_nan="skip").run_steps(5)


def test_a_deterministic_loss_looks_labels_up_as_ids():
    def looked_up(outputs, batch):
        return -tf.gather(tf.nn.log_softmax(outputs), batch.labels, batch_dims=1)

    model, examples = dense_network(), vectors(8)
    examples.labels[3] = NUM_CLASSES + 4
    task = TinyTask(build=lambda: model, examples=examples, losses=looked_up)
    batch = tf.nest.map_structure(tf.constant, examples)
    assert WORDS[0] in str(labels_out_of_range(task, model, batch, "step 0"))


def test_another_cause_is_not_taken_for_labels():
    with pytest.raises(NonFiniteStep, match="holds NaN or infinite features"):
        strategy_of(infinite=[8 * WRONG_STEP]).run_steps(5)


def test_a_label_beside_features_that_towers_prepare():
    task = small_task()
    batch = next(iter(task.unprepared_dataset("train", InputShard())))
    wrong = batch._replace(labels=tf.fill(batch.labels.shape, tf.cast(99, batch.labels.dtype)))
    model = task.build_model()
    assert labels_out_of_range(task, model, batch, "step 0") is None
    assert "label 99 is out of range" in str(labels_out_of_range(task, model, wrong, "step 0"))
