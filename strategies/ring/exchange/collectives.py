"""Collectives over the workers of a ring: sums and gathers in graphs, and exchanges of the hosts' numbers.

All workers build the same graphs. A collective finds its counterparts by two keys: the group's, and its own. Each
channel numbers its own collectives, so a worker may trace its graphs in any order.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from strategies.ring.exchange.tcp_ring import TcpRing
from strategies.wire_precisions import WIRE_PRECISIONS
from towers import gradients, packing
from towers.errors import UserError

# A group consists of devices, so each channel needs its own group, with a unique key: tf.distribute counts its
# keys from 1, towers of one process count from 1,000,000.
_FIRST_GROUP_KEY = 2_000_000

ALGORITHMS = ("auto", "tcp", "ring", "nccl")

# The default size of a pack, and the smallest part of it for each worker.
_PACK_BYTES, _CHUNK_BYTES = 4 * 2**20, 512 * 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireOptions:
    """How gradients are sent.

    Attributes:
      bytes_per_pack: size of the packs; the gradients of a pack share one collective. None: see `pack_bytes`.
      precision: 'float32' sends gradients as computed; 'bfloat16' and 'float16' halve the bytes. With W workers
        each element of the sum then has an error of at most W units of rounding (2^-8 in bfloat16, 2^-11 in
        float16) times the sum of the W magnitudes: one for the casts, and one for each of the W - 1 sums. In
        float16, values below 6e-5 lose more digits, and sums above 65504 become infinite.
      algorithm: how gradients are summed. 'tcp' is our own ring (`strategies.ring.exchange.tcp_ring`), for CPUs;
        'ring' and 'nccl' are TensorFlow's; 'auto' is tcp for gradients on a CPU (our engine), and nccl for GPUs.
      timeout_seconds: a collective that waits longer fails.

    Raises:
      UserError: an option is unknown or out of range.
    """

    bytes_per_pack: int | None = None
    precision: str = "float32"
    algorithm: str = "auto"
    timeout_seconds: float = 600.0

    def __post_init__(self):
        if self.bytes_per_pack is not None and self.bytes_per_pack < 1:
            raise UserError(f"bytes_per_pack={self.bytes_per_pack}: it must be above 0; omit it for the default")
        if self.precision not in WIRE_PRECISIONS:
            known = ", ".join(WIRE_PRECISIONS)
            raise UserError(f"wire_precision={self.precision!r} is unknown: use one of {known}")
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"all_reduce={self.algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}")
        if not self.timeout_seconds > 0:
            raise UserError(f"collective_timeout_seconds={self.timeout_seconds:g}: it must be above 0")

    def pack_bytes(self, num_workers: int) -> int:
        """Bytes of a pack.

        By default 4 MiB, but with more than eight workers 512 KiB for each: a ring cuts a pack into one chunk for
        each worker and takes 2 * (workers - 1) rounds, and a short chunk takes no less time than the latency.
        """
        return self.bytes_per_pack or max(_PACK_BYTES, num_workers * _CHUNK_BYTES)


class WorkerExchange:
    """One channel between the workers. All workers get sums with the same bits."""

    def __init__(
        self, num_workers: int, rank: int, options: WireOptions, *, channel: int, tcp: TcpRing | None = None
    ):
        """Args:
        num_workers: number of workers.
        rank: index of this worker.
        options: how gradients are sent; everything else is sent in its own precision.
        channel: a number that is unique among the exchanges of this process.
        tcp: the connections; None for TensorFlow's collectives.
        """
        self._tcp = tcp
        self.num_workers, self.rank, self.options, self.channel = num_workers, rank, options, channel
        self._group_key = _FIRST_GROUP_KEY + channel
        self._purpose = f"of channel {channel}"
        self._keys = itertools.count(1)

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Each tensor's sum over the workers, in its own precision; one collective per dtype. In a graph."""
        found: list[tf.Tensor] = list(values)
        if self.num_workers == 1:
            return found
        for dtype in dict.fromkeys(value.dtype for value in values):
            indices = [index for index, value in enumerate(values) if value.dtype == dtype]
            own = [values[index] for index in indices]
            parts = packing.parted(self._reduced(packing.joined(own)), own)
            for index, part in zip(indices, parts, strict=True):
                found[index] = part
        return found

    @property
    def sends_any_number_of_rows(self) -> bool:
        """Whether the number of rows of sparse gradients may differ between steps.

        TensorFlow's collectives keep the shape of their first call.
        """
        return self._tcp is not None or self.num_workers == 1

    def sum_gradients(self, own: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """The gradients' sums over the workers: dense ones packed, sparse ones gathered row by row. In a graph."""
        found = list(own)
        if self.num_workers == 1:
            return found
        dense = [index for index, gradient in enumerate(own) if not isinstance(gradient, tf.IndexedSlices)]
        for dtype in dict.fromkeys(own[index].dtype for index in dense):
            self._sum_dense(found, [index for index in dense if own[index].dtype == dtype])
        for index, gradient in enumerate(own):
            if isinstance(gradient, tf.IndexedSlices):
                found[index] = self._gathered_rows(gradient)
        return found

    def _sum_dense(self, found, indices) -> None:
        """Replaces this worker's gradients of one dtype, at `indices` of `found`, by their sums."""
        sizes = [found[index].shape.num_elements() * found[index].dtype.size for index in indices]
        for pack in packing.packs(sizes, self.options.pack_bytes(self.num_workers)):
            chosen = [indices[position] for position in pack]
            own = [found[index] for index in chosen]
            summed = packing.parted(self._reduced_on_wire(packing.joined(own)), own)
            for index, value in zip(chosen, summed, strict=True):
                found[index] = value

    def _reduced_on_wire(self, vector: tf.Tensor) -> tf.Tensor:
        wire = self._wire_of(vector)
        if self._tcp is not None:
            return self._reduced_by_tcp(vector, wire)
        return tf.cast(self._reduced(tf.cast(vector, wire)), vector.dtype)

    def reduce_scatter(self, vector: tf.Tensor, sizes: Sequence[int], purpose: str = "") -> tf.Tensor:
        """This worker's part of the sum of all workers' gradient vectors, in the precision of the wire.

        Args:
          vector: [sum(sizes)].
          sizes: number of elements of each worker's part, in order.
          purpose: identifies the call, so that workers with different calls fail; the same on all workers.

        Returns:
          [sizes[rank]]. In a graph.
        """
        if self.num_workers == 1:
            return vector
        if self._tcp is None:
            return tf.split(self._reduced_on_wire(vector), list(sizes))[self.rank]
        wire = self._wire_of(vector).as_numpy_dtype

        def reduce_scatter(own):
            return self._tcp.reduce_scatter(own, sizes, wire, purpose=f"{self._purpose} {purpose}")

        return tf.ensure_shape(tf.numpy_function(reduce_scatter, [vector], vector.dtype), [sizes[self.rank]])

    def all_gather(self, own: tf.Tensor, sizes: Sequence[int], purpose: str = "") -> tf.Tensor:
        """All workers' vectors, joined by rank, unchanged: [sum(sizes)]. In a graph.

        Args:
          own: this worker's [sizes[rank]].
          sizes: the lengths of all workers' vectors.
          purpose: as for `reduce_scatter`.
        """
        if self.num_workers == 1:
            return own
        if self._tcp is None:
            rows = self.gather(tf.pad(own, [[0, max(sizes) - sizes[self.rank]]])[tf.newaxis])
            return tf.concat([rows[rank, :size] for rank, size in enumerate(sizes)], 0)

        def all_gather(given):
            return self._tcp.all_gather_parts(given, sizes, purpose=f"{self._purpose} {purpose}")

        return tf.ensure_shape(tf.numpy_function(all_gather, [own], own.dtype), [sum(sizes)])

    def _wire_of(self, vector: tf.Tensor) -> tf.DType:
        """The number format in which a vector of gradients is sent."""
        wire = WIRE_PRECISIONS[self.options.precision]
        return vector.dtype if wire is None or vector.dtype != tf.float32 else wire

    def _reduced_by_tcp(self, vector: tf.Tensor, wire: tf.DType) -> tf.Tensor:
        """The sum by a stateful call: TensorFlow runs these in the order of creation, the same on every worker."""

        def all_reduce(own):
            return self._tcp.all_reduce(own, wire.as_numpy_dtype, purpose=self._purpose)

        summed = tf.numpy_function(all_reduce, [vector], vector.dtype)
        return tf.ensure_shape(summed, vector.shape)

    def _gathered_by_tcp(self, value: tf.Tensor) -> tf.Tensor:
        def all_gather(own):
            return self._tcp.all_gather(own, purpose=self._purpose)

        gathered = tf.numpy_function(all_gather, [tf.reshape(value, [-1])], value.dtype)
        return tf.reshape(gathered, tf.concat([[-1], tf.shape(value)[1:]], 0))

    def _gathered_rows(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """All workers' rows. A gather needs equal lengths, so shorter ones are padded and cut afterwards."""
        lengths = self.gather(tf.shape(gradient.indices))
        longest = tf.reduce_max(lengths)
        kept = tf.reshape(tf.sequence_mask(lengths, longest), [-1])
        missing = longest - tf.shape(gradient.indices)[0]

        def gathered(rows):
            padding = [[0, missing]] + [[0, 0]] * (rows.shape.rank - 1)
            return tf.boolean_mask(self.gather(tf.pad(rows, padding)), kept)

        return tf.IndexedSlices(gathered(gradient.values), gathered(gradient.indices), gradient.dense_shape)

    def gather(self, value: tf.Tensor) -> tf.Tensor:
        """Every worker's [n, ...] as [workers * n, ...], by rank. The shape must be the same on all workers."""
        if self.num_workers == 1:
            return tf.convert_to_tensor(value)
        if self._tcp is not None:
            return self._gathered_by_tcp(value)
        return tf.raw_ops.CollectiveGatherV2(input=value, ordering_token=[], **self._attributes())

    def _reduced(self, vector: tf.Tensor) -> tf.Tensor:
        if self._tcp is not None:
            return self._reduced_by_tcp(vector, vector.dtype)
        return tf.raw_ops.CollectiveReduceV2(
            input=vector, merge_op="Add", final_op="Id", ordering_token=[], **self._attributes()
        )

    def _attributes(self) -> dict:
        return _attributes(self.num_workers, self._group_key, next(self._keys), self.options)


class HostExchange:
    """Exchanges the hosts' numbers between steps. All workers make the same calls in the same order."""

    def __init__(
        self, num_workers: int, rank: int, options: WireOptions, *, channel: int, tcp: TcpRing | None = None
    ):
        """Arguments as for `WorkerExchange`. The numbers are on CPUs."""
        self.num_workers, self.rank, self._tcp = num_workers, rank, tcp
        self._options = dataclasses.replace(options, algorithm="ring")
        self._group_key = _FIRST_GROUP_KEY + channel
        self._keys = itertools.count(1)
        self._key_of: dict[str, int] = {}

    def gather(self, purpose: str, values: Sequence[float] | np.ndarray, dtype=np.float64) -> np.ndarray:
        """Every worker's [n] as [workers, n], on every worker.

        Args:
          purpose: a name for this exchange; n is the same in all calls with the same name.
          values: this worker's n numbers.
          dtype: number format in which they are sent.
        """
        own = np.asarray(values, dtype)
        if self.num_workers == 1:
            return own[np.newaxis]
        if self._tcp is not None:
            return self._tcp.all_gather(own, purpose=purpose)
        with tf.device("/device:CPU:0"):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=own,
                ordering_token=[],
                **_attributes(self.num_workers, self._group_key, self._key_for(purpose), self._options),
            )
        return gathered.numpy().reshape(self.num_workers, -1)

    def gather_texts(self, purpose: str, text: str) -> list[str]:
        """Every worker's text, of any length, by rank; arguments as for `gather`, once for each purpose."""
        own = np.frombuffer(text.encode(), np.uint8).astype(np.float64)
        lengths = self.gather(f"lengths of {purpose}", [len(own)], np.int64)[:, 0]
        padded = self.gather(purpose, np.pad(own, (0, max(lengths) - len(own))))
        return [bytes(row[:length].astype(np.uint8)).decode() for row, length in zip(padded, lengths, strict=True)]

    def broadcast(self, variables: Sequence[tf.Variable], *, roots: Sequence[int] | None = None) -> None:
        """Sets every worker's variables to the exact values of one worker.

        Args:
          variables: anything with `shape`, `dtype`, `numpy()` (called only on its root) and `assign(value)`.
          roots: for each variable the rank that has its value; None for rank 0.
        """
        if self.num_workers == 1:
            return
        roots = [0] * len(variables) if roots is None else roots
        for index, (variable, root) in enumerate(zip(variables, roots, strict=True)):
            own = variable.numpy() if self.rank == root else None
            value = self.sent(own, variable.shape, variable.dtype, root=root, purpose=f"variable {index}")
            if self.rank != root:
                variable.assign(value)

    def sent(
        self, own: np.ndarray | None, shape: Sequence[int], dtype: tf.DType, *, root: int, purpose: str
    ) -> np.ndarray:
        """One worker's exact value, on all workers.

        Args:
          own: the value, on the worker `root`; not used on others.
          shape, dtype: shape and dtype of the value.
          root: rank of the worker that has it.
          purpose: a name for this exchange; the shape is the same in all calls with the same name and root.
        """
        if self.num_workers == 1:
            return own
        shape = tf.TensorShape(shape)
        if self._tcp is not None:
            given = np.empty(shape.num_elements(), dtype.as_numpy_dtype) if self.rank != root else np.ravel(own)
            return self._tcp.broadcast(given, root=root, purpose=f"of {purpose}").reshape(shape)
        key = self._key_for(f"of {purpose} from {root}")
        attributes = _attributes(self.num_workers, self._group_key, key, self._options)
        with tf.device("/device:CPU:0"):
            if self.rank == root:
                tf.raw_ops.CollectiveBcastSendV2(input=tf.constant(own), **attributes)
                return own
            return tf.raw_ops.CollectiveBcastRecvV2(T=dtype, shape=shape, **attributes).numpy()

    def _key_for(self, purpose: str) -> int:
        """The instance key of a purpose, which reuses it, because TensorFlow never forgets a key."""
        if purpose not in self._key_of:
            self._key_of[purpose] = next(self._keys)
        return self._key_of[purpose]


def _attributes(num_workers: int, group_key: int, instance_key: int, options: WireOptions) -> dict:
    return {
        "group_size": num_workers,
        "group_key": group_key,
        "instance_key": instance_key,
        "communication_hint": "auto" if options.algorithm == "tcp" else options.algorithm,
        "timeout_seconds": options.timeout_seconds,
    }
