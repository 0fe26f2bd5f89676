"""What the benchmark measures in each of its fresh processes: the work, and the time it took."""

import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

from launch import training
from launch.environment import cluster_of_this_process
from models.networks import build_network
from models.own_task import OwnTask
from strategies.callbacks import Callback
from strategies.progress_display import ProgressDisplay
from strategies.trainer import Trainer
from strategies.trainer_options import TrainerOptions

FLAGS = flags.FLAGS
TINY = "tiny"
# Steps of parameter servers are so short that a few say nothing.
_SERVERS_WARM_UP_STEPS = 20


def measured_task() -> OwnTask:
    """One batch of random images, again and again, already in memory: the same work as the peers do."""
    generator = np.random.default_rng(0)
    batch = FLAGS.measured_batch
    images = generator.random((batch, 32, 32, 3), np.float32)
    labels = generator.integers(0, 10, batch)
    data = tf.data.Dataset.from_tensors((images, labels))
    if FLAGS.slow_seconds and is_first_worker():
        data = data.map(slowed)
    return OwnTask(
        model=tiny_network if FLAGS.network == TINY else _named_network,
        train_data=data,
        eval_data=data,
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size=batch,
    )


def is_first_worker() -> bool:
    cluster = cluster_of_this_process()
    return cluster is not None and cluster.this.name == "worker:0"


def slowed(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """As a slow disk would."""

    def wait(given):
        time.sleep(FLAGS.slow_seconds)
        return given

    late = tf.numpy_function(wait, [labels], labels.dtype)
    return images, tf.ensure_shape(late, labels.shape)


def _named_network() -> keras.Model:
    return build_network(FLAGS.network, image_shape=(32, 32, 3), num_classes=10)


def tiny_network() -> keras.Model:
    """The smallest network of the peers, where exchange is all that takes time."""
    inputs = layers.Input((32, 32, 3))
    hidden = layers.ReLU()(layers.Conv2D(8, 3, 4, padding="same", use_bias=False)(inputs))
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(hidden)))


def measure_step() -> dict:
    """Steps one at a time; the first one traces and compiles."""
    FLAGS.steps = FLAGS.measured_steps + 3
    strategy = training.build_strategy(measured_task())
    started = time.perf_counter()
    strategy.run_steps(1)
    first_seconds = time.perf_counter() - started
    strategy.run_steps(2)
    seconds = [strategy.run_steps(1).seconds for _ in range(FLAGS.measured_steps)]
    return {
        "images_per_second": FLAGS.measured_batch / statistics.median(seconds),
        "first_step_seconds": first_seconds,
    }


class TimedEngine:
    """An engine that keeps the time spent in its steps, each waited for."""

    def __init__(self, engine):
        self._engine, self.seconds = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train(self, batch, rate):
        started = time.perf_counter()
        outcome = self._engine.train(batch, rate)
        float(outcome.loss_sum)
        self.seconds.append(time.perf_counter() - started)
        return outcome


class ReportTimes(Callback):
    """When each report came, and of which step."""

    def __init__(self):
        self.reports: list[tuple[int, float]] = []

    def steps(self, report):
        self.reports.append((report.step, time.perf_counter()))


def measure_trainer() -> dict:
    """The same steps under a Trainer with its files and reports: all that it adds, in the same steps."""
    FLAGS.steps = FLAGS.measured_steps + 3
    strategy = training.build_strategy(measured_task())
    strategy.engine = engine = TimedEngine(strategy.engine)
    times = ReportTimes()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainerOptions(steps=FLAGS.steps, directory=folder, evaluate_every_epochs=None)
        Trainer(strategy, options, callbacks=[ProgressDisplay(), times]).fit()
    (first, begun), (last, ended) = times.reports[2], times.reports[-1]
    bare_seconds = sum(engine.seconds[first:last])
    return {
        "images_per_second": FLAGS.measured_batch * (last - first) / (ended - begun),
        "first_step_seconds": engine.seconds[0],
        "loop_over_step": (ended - begun) / bare_seconds,
    }


def measure_servers() -> dict:
    """Steps of workers and servers, counted by the chief, which this is; its first ones are not measured."""
    FLAGS.steps = _SERVERS_WARM_UP_STEPS + FLAGS.measured_steps
    strategy = training.build_strategy(measured_task())
    strategy.run_steps(_SERVERS_WARM_UP_STEPS)
    report = strategy.run_steps(FLAGS.measured_steps)
    counted = strategy.step - _SERVERS_WARM_UP_STEPS
    strategy.finish(completed=True)
    return {
        "images_per_second": FLAGS.measured_batch * report.num_steps / report.seconds,
        "steps_per_second": report.num_steps / report.seconds,
        "counted_steps": counted,
        "worker_steps": {worker.name: worker.steps for worker in report.servers.workers},
    }
