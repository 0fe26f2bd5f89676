"""What workers send each other: collectives over all of them, each worker one member.

Every worker builds the same graphs and meets its partners by keys: the group's, and one for each collective. A
channel numbers its own collectives, so that graphs may be traced in any order on any worker.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from strategies.ring.tcp_ring import TcpRing
from towers import gradients, packing
from towers.errors import UserError

# A group is of devices, so each channel has one of its own, with a key beyond those of others: tf.distribute
# counts from 1, towers in one process from 1,000,000.
_FIRST_GROUP_KEY = 2_000_000

ALGORITHMS = ("auto", "tcp", "ring", "nccl")
WIRE_PRECISIONS = {"float32": None, "bfloat16": tf.bfloat16, "float16": tf.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireOptions:
    """How gradients cross the wire.

    Attributes:
      bytes_per_pack: gradients of about so many bytes share one collective.
      precision: 'float32' as computed; 'bfloat16' and 'float16' halve the bytes. With W workers each element of
        the sum then has an error of at most W units of rounding (2^-8 in bfloat16, 2^-11 in float16) times the
        sum of the W magnitudes: one for the casts, and one for each of the W - 1 sums. In float16 what is below
        6e-5 loses digits beyond that, and sums above 65504 are infinite.
      algorithm: of gradients: 'tcp' is our own ring (`strategies.ring.tcp_ring`), for CPUs; 'ring' and 'nccl' are
        TensorFlow's; 'auto' is tcp where the gradients are on a CPU, or else TensorFlow's own choice.
      timeout_seconds: a collective that waits longer ends with an error.
    """

    bytes_per_pack: int = 4 * 2**20
    precision: str = "float32"
    algorithm: str = "auto"
    timeout_seconds: float = 600.0

    def __post_init__(self):
        if self.bytes_per_pack < 1:
            raise UserError(f"bytes_per_pack={self.bytes_per_pack}: give a number above 0; 4194304 is the default")
        if self.precision not in WIRE_PRECISIONS:
            known = ", ".join(WIRE_PRECISIONS)
            raise UserError(f"wire_precision={self.precision!r} is unknown: use one of {known}")
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"all_reduce={self.algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}")
        if not self.timeout_seconds > 0:
            raise UserError(f"collective_timeout_seconds={self.timeout_seconds:g}: give a number above 0")


class WorkerExchange:
    """One channel between the workers. Sums have the same bits on all of them."""

    def __init__(
        self, num_workers: int, rank: int, options: WireOptions, *, channel: int, tcp: TcpRing | None = None
    ):
        """Args:
        num_workers: how many take part.
        rank: which of them this is, from 0.
        options: of gradients; the rest is sent as it is.
        channel: a number that no other exchange of this process has.
        tcp: what numbers travel by; None for TensorFlow's collectives.
        """
        self._tcp = tcp
        self.num_workers, self.rank, self.options, self.channel = num_workers, rank, options, channel
        self._group_key = _FIRST_GROUP_KEY + channel
        self._keys = itertools.count(1)

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Each tensor's sum over the workers, in its own precision, one collective a dtype. In a graph."""
        found: list[tf.Tensor] = list(values)
        if self.num_workers == 1:
            return found
        for dtype in dict.fromkeys(value.dtype for value in values):
            places = [place for place, value in enumerate(values) if value.dtype == dtype]
            own = [values[place] for place in places]
            parts = packing.parted(self._reduced(packing.joined(own)), own)
            for place, part in zip(places, parts, strict=True):
                found[place] = part
        return found

    def sum_gradients(self, own: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """The gradients' sums over the workers: dense ones packed, sparse ones gathered row by row. In a graph."""
        found = list(own)
        if self.num_workers == 1:
            return found
        dense = [place for place, gradient in enumerate(own) if not isinstance(gradient, tf.IndexedSlices)]
        for dtype in dict.fromkeys(own[place].dtype for place in dense):
            self._sum_dense(found, [place for place in dense if own[place].dtype == dtype])
        for place, gradient in enumerate(own):
            if isinstance(gradient, tf.IndexedSlices):
                found[place] = self._gathered_rows(gradient)
        return found

    def _sum_dense(self, found, places) -> None:
        """Puts sums where `found` holds this worker's gradients of one dtype."""
        sizes = [found[place].shape.num_elements() * found[place].dtype.size for place in places]
        for pack in packing.packs(sizes, self.options.bytes_per_pack):
            own = [found[places[number]] for number in pack]
            summed = packing.parted(self._reduced_on_wire(packing.joined(own)), own)
            for number, value in zip(pack, summed, strict=True):
                found[places[number]] = value

    def _reduced_on_wire(self, vector: tf.Tensor) -> tf.Tensor:
        wire = WIRE_PRECISIONS[self.options.precision]
        if wire is None or vector.dtype != tf.float32:
            return self._reduced(vector)
        if self._tcp is not None:
            return self._reduced_by_tcp(vector, wire)
        return tf.cast(self._reduced(tf.cast(vector, wire)), tf.float32)

    def _reduced_by_tcp(self, vector: tf.Tensor, wire: tf.DType) -> tf.Tensor:
        """A stateful call: TensorFlow keeps such calls in the order they stand in, on every worker the same."""

        def all_reduce(own):
            return self._tcp.all_reduce(own, wire.as_numpy_dtype)

        summed = tf.numpy_function(all_reduce, [vector], vector.dtype)
        return tf.ensure_shape(summed, vector.shape)

    def _gathered_by_tcp(self, value: tf.Tensor) -> tf.Tensor:
        gathered = tf.numpy_function(self._tcp.all_gather, [tf.reshape(value, [-1])], value.dtype)
        return tf.reshape(gathered, tf.concat([[-1], tf.shape(value)[1:]], 0))

    def _gathered_rows(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """All workers' rows. A gather wants equal lengths, so shorter ones are filled up and cut again."""
        lengths = self.gather(tf.shape(gradient.indices))
        longest = tf.reduce_max(lengths)
        kept = tf.reshape(tf.sequence_mask(lengths, longest), [-1])
        missing = longest - tf.shape(gradient.indices)[0]

        def gathered(rows):
            padding = [[0, missing]] + [[0, 0]] * (rows.shape.rank - 1)
            return tf.boolean_mask(self.gather(tf.pad(rows, padding)), kept)

        return tf.IndexedSlices(gathered(gradient.values), gathered(gradient.indices), gradient.dense_shape)

    def gather(self, value: tf.Tensor) -> tf.Tensor:
        """[n, ...] of every worker to [workers * n, ...], by rank; n and the rest are the same on all."""
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
    """Numbers of the host, exchanged between steps. Every worker makes the same calls in the same order."""

    def __init__(
        self, num_workers: int, rank: int, options: WireOptions, *, channel: int, tcp: TcpRing | None = None
    ):
        """Arguments as of `WorkerExchange`; what travels here does so over CPUs."""
        self.num_workers, self.rank, self._tcp = num_workers, rank, tcp
        self._options = dataclasses.replace(options, algorithm="ring")
        self._group_key = _FIRST_GROUP_KEY + channel
        self._keys = itertools.count(1)
        self._key_of: dict[str, int] = {}

    def gather(self, purpose: str, values: Sequence[float] | np.ndarray, dtype=np.float64) -> np.ndarray:
        """[n] of every worker to [workers, n], on every worker.

        Args:
          purpose: what it is about; the same purpose has the same n every time.
          values: this worker's n numbers.
          dtype: what they travel as.
        """
        own = np.asarray(values, dtype)
        if self.num_workers == 1:
            return own[np.newaxis]
        if self._tcp is not None:
            return self._tcp.all_gather(own)
        # TensorFlow remembers every key for good, so a purpose keeps its own.
        if purpose not in self._key_of:
            self._key_of[purpose] = next(self._keys)
        with tf.device("/device:CPU:0"):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=own,
                ordering_token=[],
                **_attributes(self.num_workers, self._group_key, self._key_of[purpose], self._options),
            )
        return gathered.numpy().reshape(self.num_workers, -1)

    def give_all(self, variables: Sequence[tf.Variable]) -> None:
        """Sets every worker's variables to those of rank 0, to the last bit."""
        for variable in variables if self.num_workers > 1 else ():
            if self._tcp is not None:
                given = self._tcp.broadcast(np.ravel(variable.numpy()))
                variable.assign(given.reshape(variable.shape))
            else:
                self._give(variable)

    def _give(self, variable: tf.Variable) -> None:
        about = _attributes(self.num_workers, self._group_key, next(self._keys), self._options)
        with tf.device("/device:CPU:0"):
            if self.rank == 0:
                tf.raw_ops.CollectiveBcastSendV2(input=tf.identity(variable), **about)
                return
            given = tf.raw_ops.CollectiveBcastRecvV2(T=variable.dtype, shape=variable.shape, **about)
        variable.assign(given)


def _attributes(num_workers: int, group_key: int, instance_key: int, options: WireOptions) -> dict:
    return {
        "group_size": num_workers,
        "group_key": group_key,
        "instance_key": instance_key,
        "communication_hint": "auto" if options.algorithm == "tcp" else options.algorithm,
        "timeout_seconds": options.timeout_seconds,
    }
