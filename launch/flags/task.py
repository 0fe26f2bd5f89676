"""Flags of the built-in tasks and networks."""

from absl import flags

from launch.flags.checks import listed_in_help, positive
from models.data.augment import FILLS, FLIPS
from models.networks.registry import network_names
from models.tasks import build_task, task_names
from towers.task import Task

FLAGS = flags.FLAGS

flags.DEFINE_string("task", "shapes", f"What to train: {', '.join(task_names())}.")
flags.DEFINE_string("model", "resnet20", f"Network: {', '.join(network_names())}.")
flags.DEFINE_string("data_dir", None, "Folder of prepared TensorFlow Datasets.")
flags.DEFINE_integer("batch_size", 128, "Examples in a global batch, over all towers.")
flags.DEFINE_integer("eval_batch_size", 500, "Examples in a batch of evaluation.")
flags.DEFINE_bool("augment", None, "Random crops and mirrored images; default: as the task needs.")
flags.DEFINE_integer("crop_padding", 4, "Pixels of padding on each side before a random crop.")
flags.DEFINE_enum("crop_fill", "black", FILLS, "What images are padded with.")
flags.DEFINE_enum("flip", "random", FLIPS, "Mirror training images at random, or each in every second epoch.")
flags.DEFINE_float("label_smoothing", 0.0, "Share of the label spread over all classes.")
flags.DEFINE_integer("image_size", None, "Side in pixels that images of tfds:NAME are resized to.")
flags.DEFINE_float("cache_gib", 2.0, "A split that takes more memory than this is read from disk by record.")
flags.DEFINE_integer("input_threads", 2, "Threads that prepare batches.")
positive("batch_size", "eval_batch_size", "input_threads", "image_size", "cache_gib")
listed_in_help(__name__)


def task_from_flags() -> Task:
    """The task that the flags name."""
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
        num_input_threads=FLAGS.input_threads,
        cache_bytes=int(FLAGS.cache_gib * 2**30),
        image_size=FLAGS.image_size,
    )
