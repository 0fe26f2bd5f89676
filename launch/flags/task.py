"""Flags of the built-in tasks and networks."""

import math

from absl import flags

from launch.flags.belonging import needs, serves
from launch.flags.checks import listed_in_help, number_of_threads, positive
from launch.flags.devices import own_input_threads
from launch.flags.paths import define_path
from models.data.augment import FILLS, FLIPS
from models.data.drawn_clicks import DrawnClicks
from models.data.drawn_text import DrawnText
from models.data.tfds_images import NotPrepared, NotReadableByRecord
from models.tasks import CLICKS, TEXT, build_task, default_network, is_augmented, networks_of, task_names
from towers.errors import UserError
from towers.task import Task

FLAGS = flags.FLAGS
# A larger value would be no limit, and its number of bytes might overflow a float.
_MOST_GIB = 2.0**30
_IMAGE_TASKS = tuple(task for task in task_names() if task not in (CLICKS, TEXT))


def _no_augmentation() -> str:
    """Why the flags of augmentation have no effect; '' if they have one."""
    if is_augmented(FLAGS.task, FLAGS.augment):
        return ""
    decider = f"task={FLAGS.task}" if FLAGS.augment is None else "noaugment"
    return f"with --{decider}: training images are not augmented; use --augment"


flags.DEFINE_string(
    "task",
    "shapes",
    f"Data set to train on: {', '.join(task_names())}. shapes: images that are drawn on the fly, without a "
    "download. clicks: a recommender's ids and numbers, drawn on the fly; see the --click flags. text: texts of a "
    "random Markov chain, drawn on the fly; see the --text flags. tfds:NAME: any prepared image set of TensorFlow "
    "Datasets, as tfds:mnist.",
)
flags.DEFINE_string(
    "model",
    None,
    f"Network to train: {', '.join(networks_of('shapes'))}; for --task={CLICKS} {', '.join(networks_of(CLICKS))}; "
    f"for --task={TEXT} {', '.join(networks_of(TEXT))}. Default: {default_network('shapes')}; for --task={CLICKS} "
    f"{default_network(CLICKS)}; for --task={TEXT} {default_network(TEXT)}.",
)
define_path(
    "data_dir",
    None,
    "Folder with prepared TensorFlow Datasets; required for every task except shapes, clicks and text.",
)
flags.DEFINE_integer(
    "batch_size",
    128,
    "Number of examples in a global batch, over all towers and workers; with asynchronous parameter servers, in "
    "one update.",
)
flags.DEFINE_integer(
    "eval_batch_size",
    None,
    "Number of examples in an evaluation batch, over all towers and workers. Default: --batch_size, so that "
    "evaluation uses the kernels that training compiled.",
)
flags.DEFINE_bool(
    "augment", None, "Crop and mirror training images at random. Default: yes, except for --task=shapes."
)
flags.DEFINE_integer("crop_padding", 4, "Pixels of padding on each side before a random crop.")
flags.DEFINE_enum(
    "crop_fill", "black", FILLS, "Content of the padding before a random crop: black, or the image's reflection."
)
flags.DEFINE_enum(
    "flip",
    "random",
    FLIPS,
    "How training images are mirrored. random: each with probability 1/2. alternating: each in every second "
    "epoch.",
)
flags.DEFINE_float(
    "label_smoothing",
    0.0,
    "Fraction of the label's probability that is spread evenly over all classes; from 0 to below 1.",
)
flags.DEFINE_integer(
    "image_size",
    None,
    "For --task=tfds:NAME: side in pixels to which images are resized. Default: the data set's own size; 64 if "
    "its images differ in size.",
)
flags.DEFINE_float(
    "cache_gib",
    2.0,
    "Memory limit in GiB for one decoded split of a data set. A larger split is read from disk, record by record.",
)
flags.DEFINE_integer(
    "input_threads",
    None,
    "Number of threads that prepare batches. Default: one for each 16 of this process's cores, two for each of "
    "its GPUs (but at most half as many as cores), at least 2. Raise it if training waits for data.",
)
flags.DEFINE_integer(
    "click_tables", 8, "For --task=clicks: number of embedding tables; an example has an id for each."
)
flags.DEFINE_integer("click_rows", 1_000, "For --task=clicks: number of rows of each table.")
flags.DEFINE_integer("click_width", 16, "For --task=clicks: number of elements of each row.")
flags.DEFINE_integer("click_examples", 200_000, "For --task=clicks: number of training examples.")
flags.DEFINE_integer(
    "text_tokens", 32, "For --task=text: size of the vocabulary, the padding token included. At least 4."
)
flags.DEFINE_integer(
    "text_length", 64, "For --task=text: number of tokens of the longest texts; the shortest have half as many."
)
flags.DEFINE_integer("text_examples", 10_000, "For --task=text: number of training texts.")
flags.DEFINE_float(
    "text_dropout", 0.0, "For --task=text: dropout rate of the transformer, from 0 to below 1. 0: no dropout."
)
flags.register_validator("text_tokens", lambda tokens: tokens >= 4, message="give 4 or more")
flags.register_validator("text_dropout", lambda rate: 0 <= rate < 1, message="give a rate from 0 to below 1")
positive("text_length", "text_examples")
positive("click_tables", "click_rows", "click_width", "click_examples")
positive("batch_size", "eval_batch_size", "image_size", "cache_gib")
number_of_threads("input_threads")
serves("task", (CLICKS,), "click_tables", "click_rows", "click_width", "click_examples")
serves("task", (TEXT,), "text_tokens", "text_length", "text_examples", "text_dropout")
serves("task", _IMAGE_TASKS, "augment", "crop_padding", "crop_fill", "flip", "label_smoothing")
serves("task", tuple(task for task in _IMAGE_TASKS if task != "shapes"), "image_size", "data_dir", "cache_gib")
needs(_no_augmentation, "crop_padding", "crop_fill", "flip")
listed_in_help(__name__)


def task_from_flags() -> Task:
    """The task that the flags name.

    Raises:
      UserError: the task refuses a flag, or the data set is not prepared.
    """
    try:
        return _built_task()
    except NotPrepared as error:
        if error.name.split(":")[0] != "cifar10":
            raise
        archive = f"--archive=cifar-10-binary.tar.gz --data_dir={error.data_dir or 'D'}"
        raise UserError(f"{error}, or type python -m launch.import_cifar {archive}") from error
    except NotReadableByRecord as error:
        enough = math.ceil(error.decoded_bytes / 2**30 * 10) / 10
        raise UserError(
            f"{error.what}, more than --cache_gib={FLAGS.cache_gib:g}: only tfrecord files can be read by record; "
            f"use --cache_gib={enough:g}, or prepare the set with file_format='tfrecord'"
        ) from error


def _built_task() -> Task:
    if FLAGS.model is None:
        # Sets the flag, so that the files of the run name the network.
        FLAGS.model = default_network(FLAGS.task)
    return build_task(
        FLAGS.task,
        network=FLAGS.model,
        batch_size=FLAGS.batch_size,
        eval_batch_size=FLAGS.eval_batch_size,
        data_dir=FLAGS.data_dir,
        seed=FLAGS.seed,
        augment=FLAGS.augment,
        crop_padding=FLAGS.crop_padding,
        crop_fill=FLAGS.crop_fill,
        flip=FLAGS.flip,
        label_smoothing=FLAGS.label_smoothing,
        num_input_threads=FLAGS.input_threads or own_input_threads(),
        cache_bytes=int(min(FLAGS.cache_gib, _MOST_GIB) * 2**30),
        image_size=FLAGS.image_size,
        clicks=DrawnClicks(
            num_tables=FLAGS.click_tables, num_rows=FLAGS.click_rows, num_train=FLAGS.click_examples
        ),
        click_width=FLAGS.click_width,
        text=DrawnText(num_tokens=FLAGS.text_tokens, length=FLAGS.text_length, num_train=FLAGS.text_examples),
        text_dropout=FLAGS.text_dropout,
    )
