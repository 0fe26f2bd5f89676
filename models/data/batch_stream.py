"""Which examples are in global batch k: a pure function of (seed, k).

Epochs lie end to end. Epoch e visits the examples in a permutation drawn from (seed, e), in batches of
batch_size; its last batch holds what is left. With 5 examples in batches of 2:

    k          0     1     2     3     4     5
    epoch      0     0     0     1     1     1
    examples  [3 0] [4 2] [1]   [1 4] [0 3] [2]

So a stream starts anywhere at once, and readers that divide each batch see together what one would see.
The permutation is computed for each position alone, without a shuffle buffer.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from towers.errors import UserError
from towers.task import InputShard

PREFETCHED_BATCHES = 3

# TensorFlow's index_shuffle runs its cipher for 4 rounds: too few. Over 50,000 examples two epochs then
# correlate with r = 0.75; from 8 rounds on they are as independent as true shuffles (TensorFlow 2.21).
SHUFFLE_ROUNDS = 16


class BatchSlice(NamedTuple):
    """A reader's part of a global batch.

    Attributes:
      number: int64 scalar, k.
      indices: int64 [n], the examples in order.
      begin, end: int32 scalars, positions of the part in the global batch; n = end - begin.
    """

    number: tf.Tensor
    indices: tf.Tensor
    begin: tf.Tensor
    end: tf.Tensor


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of its own for each use of the user's seed: 63 bits of SHA-256, the same on every machine."""
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def batches_per_epoch(num_examples: int, batch_size: int) -> int:
    """ceil(N / batch_size)."""
    return -(-num_examples // batch_size)


def shuffled(positions: tf.Tensor, *, seed: int, epoch: tf.Tensor, num_examples: int) -> tf.Tensor:
    """The examples at `positions`, int64 [n], of the epoch's permutation of 0 .. N - 1: int64 [n]."""
    # The kernel takes no empty vector, as a reader's part of a short batch may be: one is added and cut off.
    examples = tf.raw_ops.RandomIndexShuffle(
        index=tf.concat([positions, [0]], axis=0),
        seed=tf.stack([tf.constant(seed >> 32, tf.int64), tf.constant(seed & 0xFFFFFFFF, tf.int64), epoch]),
        max_index=tf.constant(num_examples - 1, tf.int64),
        rounds=SHUFFLE_ROUNDS,
    )
    return examples[:-1]


def train_stream(
    make_batch: Callable[[BatchSlice], Any],
    *,
    num_examples: int,
    batch_size: int,
    seed: int,
    shard: InputShard,
    num_threads: int = 2,
) -> tf.data.Dataset:
    """Endless global batches, every shard.stride-th from shard.first_batch on, as the shard's reader sees them.

    Args:
      make_batch: what to yield for a slice; it runs in the graph and must depend on the slice alone.
      num_examples: N.
      batch_size: examples of a full global batch.
      seed: the user's seed.
      shard: which part of each batch, and where to start.
      num_threads: batches that are made at once, in a thread pool of the stream's own.

    Raises:
      UserError: nothing to read, or a batch size or shares that cannot be.
    """
    _check_sizes(num_examples, batch_size)
    per_epoch = batches_per_epoch(num_examples, batch_size)
    order_seed = derived_seed(seed, "order")

    def slice_of(number: tf.Tensor) -> BatchSlice:
        part = _ordered_slice(number, number % per_epoch, num_examples, batch_size, shard)
        indices = shuffled(part.indices, seed=order_seed, epoch=number // per_epoch, num_examples=num_examples)
        return part._replace(indices=indices)

    numbers = tf.data.Dataset.counter(start=shard.first_batch, step=shard.stride)
    return _mapped(numbers, lambda number: make_batch(slice_of(number)), num_threads)


def eval_stream(
    make_batch: Callable[[BatchSlice], Any],
    *,
    num_examples: int,
    batch_size: int,
    shard: InputShard,
    num_threads: int = 2,
) -> tf.data.Dataset:
    """One pass in order from batch shard.first_batch on, nothing in it dropped; arguments as `train_stream`."""
    _check_sizes(num_examples, batch_size)

    def slice_of(number: tf.Tensor) -> BatchSlice:
        return _ordered_slice(number, number, num_examples, batch_size, shard)

    numbers = tf.data.Dataset.range(shard.first_batch, batches_per_epoch(num_examples, batch_size), shard.stride)
    return _mapped(numbers, lambda number: make_batch(slice_of(number)), num_threads)


def with_own_threads(dataset: tf.data.Dataset, num_threads: int) -> tf.data.Dataset:
    """`dataset` in order, in a thread pool of its own: it must not take the cores that train."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = num_threads
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    # The stream is divided by its InputShard: a tf.distribute strategy must not divide it again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _mapped(numbers: tf.data.Dataset, make: Callable[[tf.Tensor], Any], num_threads: int) -> tf.data.Dataset:
    make = tf.autograph.experimental.do_not_convert(make)
    batches = numbers.map(make, num_parallel_calls=num_threads, deterministic=True)
    return with_own_threads(batches.prefetch(PREFETCHED_BATCHES), num_threads)


def _ordered_slice(
    number: tf.Tensor, number_in_epoch: tf.Tensor, num_examples: int, batch_size: int, shard: InputShard
) -> BatchSlice:
    """The shard's part of a batch of an epoch in its stored order."""
    start = number_in_epoch * batch_size
    length = tf.cast(tf.minimum(num_examples - start, batch_size), tf.int32)
    begin, end = shard.bounds(length)
    indices = start + tf.range(tf.cast(begin, tf.int64), tf.cast(end, tf.int64))
    return BatchSlice(number=number, indices=indices, begin=begin, end=end)


def _check_sizes(num_examples: int, batch_size: int) -> None:
    if num_examples < 1:
        raise UserError(f"{num_examples} examples: there is nothing to read; give at least one")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: a batch holds at least one example; use --batch_size=128 or so")
