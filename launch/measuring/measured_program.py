"""The measurements that the benchmark runs, each in a fresh process."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import flags

from launch import training
from launch.measuring.measured_kernels import measure_kernels
from launch.membership.this_process import cluster_of_this_process
from models.data.drawn_text import DrawnText
from models.data.image_store import ImageSet, ImageStore
from models.image_task import ImageTask
from models.networks.registry import build_network
from models.networks.transformer import TRANSFORMERS, transformer
from models.own_task import OwnTask
from strategies.callbacks import Callback
from strategies.contract import StepReport, Strategy
from strategies.reports.progress_display import ProgressDisplay
from strategies.servers.report_section import SECTION
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from towers.engine import Engine
from towers.errors import UserError
from towers.task import InputShard

FLAGS = flags.FLAGS
# Steps in a call on GPUs, where steps are short: a Trainer does several in a call too.
_GPU_CALL_STEPS = 10
_MOST_WARM_UP_STEPS = 1 + _GPU_CALL_STEPS
# Steps of parameter servers are so short that the warm-up needs many.
_TRAINER_WARM_UP_STEPS = 3
_SERVERS_WARM_UP_STEPS, _SERVERS_WARM_UP_SECONDS = 20, 5.0
# Steps per --measured_steps, and the warm-up, in which the length of an execution is chosen.
_SHORT_FACTOR, _SHORT_WARM_UP_SECONDS = 50, 4.0
# Length of the run, for the schedule.
_MOST_SHORT_STEPS = 1_000_000
# Batches to measure per --measured_steps: a batch takes much less time than a step.
_INPUT_FACTOR = 10
_TEXT = DrawnText()


def measured_task() -> OwnTask:
    """A task whose data is one random batch in memory, repeated. The peers do the same work."""
    batch = FLAGS.measured_batch
    data = tf.data.Dataset.from_tensors(_drawn_batch(batch))
    if FLAGS.slow_seconds and is_first_worker():
        data = data.map(slowed)
    return OwnTask(
        model=_network,
        train_data=data,
        eval_data=data,
        losses=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size=batch,
    )


def _drawn_batch(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, or tokens and the tokens that follow."""
    generator = np.random.default_rng(0)
    if FLAGS.network in TRANSFORMERS:
        tokens = generator.integers(1, _TEXT.num_tokens, (batch, _TEXT.length + 1))
        return tokens[:, :-1].astype(np.int32), tokens[:, 1:]
    return generator.random((batch, 32, 32, 3), np.float32), generator.integers(0, 10, batch)


def is_first_worker() -> bool:
    cluster = cluster_of_this_process()
    return cluster is not None and cluster.this.name == "worker:0"


def slowed(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The batch, delayed by --slow_seconds, as a slow disk would do."""

    def wait(given):
        time.sleep(FLAGS.slow_seconds)
        return given

    late = tf.numpy_function(wait, [labels], labels.dtype)
    return images, tf.ensure_shape(late, labels.shape)


def _network() -> keras.Model:
    if FLAGS.network in TRANSFORMERS:
        return transformer(TRANSFORMERS[FLAGS.network], num_tokens=_TEXT.num_tokens, length=_TEXT.length)
    return build_network(FLAGS.network, image_shape=(32, 32, 3), num_classes=10)


def measure_step() -> dict:
    """Measures steps one at a time, after a first step that traces and compiles; on GPUs several in each call.

    As under a Trainer, the next call begins on a GPU before the last one is reported, so steps don't wait for it.
    """
    FLAGS.steps = FLAGS.measured_steps + _MOST_WARM_UP_STEPS
    strategy = training.build_strategy(measured_task())
    first_seconds = first_step_seconds(strategy)
    # An execution of several steps is traced in the first call that has several.
    strategy.run_steps(max(2, steps_of_a_call(strategy)))
    cpu_seconds = time.process_time()
    reports = reports_of_steps(strategy, FLAGS.measured_steps)
    cpu_seconds = time.process_time() - cpu_seconds
    seconds = [report.seconds / steps for report, steps in reports]
    return {
        "images_per_second": FLAGS.measured_batch / statistics.median(seconds),
        "cpu_seconds_per_step": cpu_seconds / FLAGS.measured_steps,
        "first_step_seconds": first_seconds,
        "step_jitter": jitter(seconds),
        "time": time_of([report for report, _ in reports]),
    }


def steps_of_a_call(strategy: Strategy) -> int:
    """Number of steps in each measured call."""
    return 1 if strategy.devices.on_cpu else _GPU_CALL_STEPS


def reports_of_steps(strategy: Strategy, count: int) -> list[tuple[StepReport, int]]:
    """Runs `count` steps; returns each call's report and its number of steps."""
    each = steps_of_a_call(strategy)
    calls = [min(each, count - done) for done in range(0, count, each)]
    reports = [strategy.start_steps(steps) for steps in calls]
    while (last := strategy.settle()) is not None:
        reports.append(last)
    return list(zip((report for report in reports if report is not None), calls, strict=True))


def first_step_seconds(strategy: Strategy) -> float:
    """Runs the first step and returns its duration."""
    started = time.perf_counter()
    strategy.run_steps(1)
    return time.perf_counter() - started


def jitter(seconds: Sequence[float]) -> float:
    """(90th percentile - 10th percentile) / median of the steps' durations."""
    tenth, ninetieth = np.quantile(seconds, [0.1, 0.9])
    return float(ninetieth - tenth) / statistics.median(seconds)


def time_of(reports: Sequence[StepReport]) -> dict[str, float]:
    """Shares of the steps' time: waiting for input, computing, and the rest, which is communication.

    With one process communication is 0: copies between its devices count as computing.
    """
    seconds = sum(report.seconds for report in reports)
    workers = [worker for report in reports for worker in _workers(report)]
    if not workers:
        waited = sum(report.input_seconds for report in reports) / seconds
        return {"input": waited, "compute": 1 - waited, "communication": 0.0}
    worker_seconds = seconds * len({worker.name for worker in workers})
    waited = sum(worker.input_seconds for worker in workers) / worker_seconds
    busy = sum(worker.busy_seconds for worker in workers) / worker_seconds
    return {"input": waited, "compute": busy, "communication": max(0.0, 1 - waited - busy)}


def _workers(report: StepReport):
    return report.sections[SECTION].workers if SECTION in report.sections else report.workers


def _time_steps(engine: Engine) -> list[float]:
    """The seconds of each of the engine's training steps from now on, up to its computed loss."""
    train, seconds = engine.train, []

    def timed(batch, rate):
        started = time.perf_counter()
        outcome = train(batch, rate)
        float(outcome.loss_sum)
        seconds.append(time.perf_counter() - started)
        return outcome

    engine.train = timed
    return seconds


class CallTimes(Callback):
    """Records (step, time in seconds) of the start of each call of `run_steps`, and of the last report."""

    def __init__(self):
        self.begun: list[tuple[int, float]] = []
        self.ended = (0, 0.0)

    def before_steps(self, step):
        self.begun.append((step, time.perf_counter()))

    def steps(self, report):
        self.ended = (report.step, time.perf_counter())


def measure_trainer() -> dict:
    """Measures steps under a Trainer with its files and reports, and its time over that of the steps alone."""
    FLAGS.steps = FLAGS.measured_steps + _TRAINER_WARM_UP_STEPS
    if FLAGS.strategy == "towers":
        FLAGS.steps_per_execution = 1  # each step is timed
    strategy = training.build_strategy(measured_task())
    seconds_of_steps = _time_steps(strategy.engine)
    times = CallTimes()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainerOptions(steps=FLAGS.steps, directory=folder, evaluate_every_epochs=None)
        Trainer(strategy, options, callbacks=[ProgressDisplay(), times]).fit()
    # The first steps trace and compile. A Trainer makes several short steps in one call.
    first, begun = next((one for one in times.begun if one[0] >= _TRAINER_WARM_UP_STEPS), times.begun[-1])
    last, ended = times.ended
    bare_seconds = sum(seconds_of_steps[first:last])
    return {
        "images_per_second": FLAGS.measured_batch * (last - first) / (ended - begun),
        "first_step_seconds": seconds_of_steps[0],
        "loop_over_step": (ended - begun) / bare_seconds,
    }


def measure_short_steps() -> dict:
    """Measures steps about as short as a call from Python: many in a call, as a Trainer makes them.

    During the warm-up the strategy chooses the number of steps per execution of a graph.
    """
    steps = _SHORT_FACTOR * FLAGS.measured_steps
    FLAGS.steps = _MOST_SHORT_STEPS
    strategy = training.build_strategy(measured_task())
    first_seconds = first_step_seconds(strategy)
    warm = time.perf_counter()
    while time.perf_counter() - warm < _SHORT_WARM_UP_SECONDS:
        strategy.run_steps(steps)
    cpu_seconds = time.process_time()
    report = strategy.run_steps(steps)
    return {
        "images_per_second": FLAGS.measured_batch * steps / report.seconds,
        "steps_per_second": steps / report.seconds,
        "cpu_seconds_per_step": (time.process_time() - cpu_seconds) / steps,
        "first_step_seconds": first_seconds,
        "time": time_of([report]),
    }


def measure_servers() -> dict:
    """Measures parameter servers from this process, the chief, after warm-up steps.

    Raises:
      UserError: the strategy is not 'ps'.
    """
    if FLAGS.strategy != "ps":
        raise UserError(f"--measure=servers with --strategy={FLAGS.strategy}: it measures --strategy=ps")
    FLAGS.steps = _SERVERS_WARM_UP_STEPS + FLAGS.measured_steps
    strategy = training.build_strategy(measured_task())
    first_seconds = first_step_seconds(strategy)
    strategy.run_steps(_SERVERS_WARM_UP_STEPS - 1)
    warm = time.perf_counter()
    # After the first closures the chief may change their number of steps, and then traces another graph.
    while time.perf_counter() - warm < _SERVERS_WARM_UP_SECONDS:
        strategy.run_steps(_SERVERS_WARM_UP_STEPS)
    before = strategy.step
    report = strategy.run_steps(FLAGS.measured_steps)
    counted = strategy.step - before
    strategy.finish(completed=True)
    return {
        "images_per_second": FLAGS.measured_batch * report.num_steps / report.seconds,
        "steps_per_second": report.num_steps / report.seconds,
        "counted_steps": counted,
        "first_step_seconds": first_seconds,
        "time": time_of([report]),
        "worker_steps": {worker.name: worker.steps for worker in report.sections[SECTION].workers},
    }


def measure_input() -> dict:
    """Measures the input stream alone: images of CIFAR-10's size, shuffled, cropped and flipped."""
    draw, count = np.random.default_rng(0), 50_000
    images, labels = draw.integers(0, 256, (count, 32, 32, 3), np.uint8), draw.integers(0, 10, count)
    store = ImageStore(images=images, labels=labels, num_classes=10, name="drawn")
    drawn = ImageSet(
        name="drawn",
        image_shape=(32, 32, 3),
        num_classes=10,
        num_examples={"train": count, "eval": count},
        open_store=lambda split: store,
    )
    task = ImageTask(name="drawn", images=drawn, network="resnet20", batch_size=FLAGS.measured_batch)
    batches = iter(task.dataset("train", InputShard()))
    next(batches)
    started = time.perf_counter()
    for _ in range(_INPUT_FACTOR * FLAGS.measured_steps):
        next(batches)
    seconds = time.perf_counter() - started
    return {"images_per_second": _INPUT_FACTOR * FLAGS.measured_steps * FLAGS.measured_batch / seconds}


MEASUREMENTS: Mapping[str, Callable[[], dict]] = {
    "step": measure_step,
    "trainer": measure_trainer,
    "short_steps": measure_short_steps,
    "servers": measure_servers,
    "input": measure_input,
    "kernels": measure_kernels,
}
