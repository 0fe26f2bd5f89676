"""Decides which examples are in global batch k: a pure function of (seed, k).

Epochs follow each other without a gap. Epoch e visits the examples in a permutation drawn from (seed, e), in
batches of batch_size; its last batch holds the remaining examples. With 5 examples in batches of 2:

    k          0     1     2     3     4     5
    epoch      0     0     0     1     1     1
    examples  [3 0] [4 2] [1]   [1 4] [0 3] [2]

So a stream can start at any batch without reading those before it, and the parts of several readers make up the
batches that one reader would see. The permutation is computed position by position, without a shuffle buffer.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from towers.errors import UserError
from towers.task import InputShard

PREFETCHED_BATCHES = 3

# The default of TensorFlow's index_shuffle, 4 rounds of its cipher, is too few: over 50,000 examples two epochs
# then correlate with r = 0.75. From 8 rounds on, they are as independent as true shuffles (TensorFlow 2.21).
SHUFFLE_ROUNDS = 16


class BatchSlice(NamedTuple):
    """A reader's part of a global batch.

    Attributes:
      batch_index: int64 scalar, index k of the global batch.
      indices: int64 [n], indices of the part's examples, in order.
      begin, end: int32 scalars; the part is positions begin .. end - 1 of the global batch, n = end - begin.
    """

    batch_index: tf.Tensor
    indices: tf.Tensor
    begin: tf.Tensor
    end: tf.Tensor


def derived_seed(seed: int, purpose: str) -> int:
    """A separate seed for each purpose of the user's seed: 63 bits of SHA-256, the same on every machine."""
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def batches_per_epoch(num_examples: int, batch_size: int) -> int:
    """ceil(num_examples / batch_size)."""
    return -(-num_examples // batch_size)


def shuffled(positions: tf.Tensor, *, seed: int, epoch: tf.Tensor, num_examples: int) -> tf.Tensor:
    """The examples at `positions`, int64 [n], of the epoch's permutation of 0 .. N - 1: int64 [n]."""
    # The kernel refuses an empty vector, but a reader's part of a short batch can be empty: a 0 is added and
    # removed.
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
    """The reader's parts of every shard.stride-th global batch from shard.first_batch on, without end.

    Args:
      make_batch: function from a `BatchSlice` to a batch. It runs in the graph, and its result must depend on the
        slice alone.
      num_examples: number of examples in the set.
      batch_size: examples in a full global batch.
      seed: the user's seed.
      shard: the reader's part of each batch, and the first batch.
      num_threads: batches prepared at the same time, in a thread pool that only this stream uses.

    Raises:
      UserError: there are no examples, the batch size is below 1, or the shares are invalid.
    """
    _check_sizes(num_examples, batch_size)
    per_epoch = batches_per_epoch(num_examples, batch_size)
    order_seed = derived_seed(seed, "order")

    def slice_of(batch_index: tf.Tensor) -> BatchSlice:
        part = _ordered_slice(batch_index, batch_index % per_epoch, num_examples, batch_size, shard)
        epoch = batch_index // per_epoch
        indices = shuffled(part.indices, seed=order_seed, epoch=epoch, num_examples=num_examples)
        return part._replace(indices=indices)

    batch_indices = tf.data.Dataset.counter(start=shard.first_batch, step=shard.stride)
    return _mapped(batch_indices, lambda batch_index: make_batch(slice_of(batch_index)), num_threads)


def eval_stream(
    make_batch: Callable[[BatchSlice], Any],
    *,
    num_examples: int,
    batch_size: int,
    shard: InputShard,
    num_threads: int = 2,
) -> tf.data.Dataset:
    """One pass over all examples in their stored order, from batch shard.first_batch on.

    Arguments and errors are those of `train_stream`.
    """
    _check_sizes(num_examples, batch_size)

    def slice_of(batch_index: tf.Tensor) -> BatchSlice:
        return _ordered_slice(batch_index, batch_index, num_examples, batch_size, shard)

    num_batches = batches_per_epoch(num_examples, batch_size)
    batch_indices = tf.data.Dataset.range(shard.first_batch, num_batches, shard.stride)
    return _mapped(batch_indices, lambda batch_index: make_batch(slice_of(batch_index)), num_threads)


def with_own_threads(dataset: tf.data.Dataset, num_threads: int) -> tf.data.Dataset:
    """`dataset`, deterministic and in its own thread pool, so that it leaves the other cores to training."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = num_threads
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    # The InputShard already divides the stream: a tf.distribute strategy must not divide it again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _mapped(batch_indices: tf.data.Dataset, make: Callable[[tf.Tensor], Any], num_threads: int) -> tf.data.Dataset:
    make = tf.autograph.experimental.do_not_convert(make)
    batches = batch_indices.map(make, num_parallel_calls=num_threads, deterministic=True)
    return with_own_threads(batches.prefetch(PREFETCHED_BATCHES), num_threads)


def _ordered_slice(
    batch_index: tf.Tensor, index_in_epoch: tf.Tensor, num_examples: int, batch_size: int, shard: InputShard
) -> BatchSlice:
    """The shard's part of a batch of an epoch that visits the examples in their stored order."""
    start = index_in_epoch * batch_size
    length = tf.cast(tf.minimum(num_examples - start, batch_size), tf.int32)
    begin, end = shard.bounds(length)
    indices = start + tf.range(tf.cast(begin, tf.int64), tf.cast(end, tf.int64))
    return BatchSlice(batch_index=batch_index, indices=indices, begin=begin, end=end)


def _check_sizes(num_examples: int, batch_size: int) -> None:
    if num_examples < 1:
        raise UserError(f"{num_examples} examples: must be at least 1; pass data that is not empty")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1; use for example batch_size=128")
