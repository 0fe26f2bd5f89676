"""Collectives over TCP between the workers of a ring, for numbers in the host's memory.

TensorFlow's own ring sends through gRPC, which copies each byte several times; here bytes go from the array to the
socket and back. The algorithm is the usual one (Patarasu and Yuan 2009): the vector is cut into W chunks; in W - 1
rounds each chunk goes around the ring and is summed, in W - 1 more rounds the sums go around. With W = 3, each
rank sends:

    rank 0     chunk 0   chunk 2 | chunk 1   chunk 0
    rank 1     chunk 1   chunk 0 | chunk 2   chunk 1
    rank 2     chunk 2   chunk 1 | chunk 0   chunk 2
               partial sums      | complete sums

One rank computes the sum of a chunk and the others copy it, so all have the same bits. The two halves are also
separate calls, a reduce-scatter and an all-gather, with a part of any size for each rank.

A short vector takes half the rounds if each rank sends its own around and sums all of them.

A long vector goes around in parts, whose chunks have the same size for any number of workers: shorter chunks would
take as long as their latency. Each piece of a chunk is sent on as soon as it is summed, so that no hop waits for a
whole chunk.

Each chunk is a frame, see `neighbours.py`.

This ring has its own deadlines and errors, because TensorFlow 2.21 may crash when one of its collectives times
out.

Rates: 0.83 of gloo's at 8 and 32 MiB, twice gloo's at 1 MiB; the difference is due to page faults of new arrays
and one more copy out of TensorFlow's tensors. TensorFlow's ring reaches 0.3 to 0.5 of gloo's, in one piece or in 2
to 16 at once; gather and add, with two workers, is slower still.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from strategies.ring.exchange.neighbours import Neighbours, bytes_of
from towers.split import boundaries, even_shares

# Sums are computed while more bytes arrive, in parts that stay in the cache.
_SUMMED_BYTES = 256 * 1024
# Pieces of a chunk, each sent on before the next one arrives. Shorter ones cost more than they save.
_PASSED_BYTES = 512 * 1024
_CHUNK_BYTES = 2 * 2**20
# Up to this size, sending all ranks' vectors around once is faster than sending chunks around twice: the latency
# determines a round's time.
_GATHERED_BYTES = 8 * 1024


class TcpRing:
    """The collectives of one worker.

    All ranks must make the same calls in the same order, with vectors of the same length and dtype. A call raises
    TimeoutError if the others do not send or do not read, ConnectionError if one of them is lost, and OutOfStep if
    the previous rank makes another call. A `purpose` says what a call is for; it is the same on all ranks.
    """

    def __init__(self, neighbours: Neighbours):
        """Args:
        neighbours: the connections of this worker, which nothing else uses.
        """
        self._neighbours = neighbours
        self._rank, self._num_workers = neighbours.rank, neighbours.num_workers

    @property
    def failure(self) -> OSError | None:
        """Error of the last call that failed; None if none has."""
        return self._neighbours.failure

    def all_reduce(self, own: np.ndarray, wire: np.dtype, *, purpose: str = "") -> np.ndarray:
        """The sum of all ranks' `own` [n].

        Args:
          own: vector of numbers.
          wire: number format that is sent; sums are computed in own's dtype and rounded to it before each hop.
          purpose: what the call is for.
        """
        with self._call(f"sum {purpose}"):
            if own.nbytes <= _GATHERED_BYTES and wire == own.dtype:
                of_all = self._gathered(own, [len(own)] * self._num_workers)
                return of_all.reshape(self._num_workers, len(own)).sum(axis=0, dtype=own.dtype)
            total = np.empty_like(own)
            for part in _parts(own, self._num_workers * _CHUNK_BYTES):
                self._reduce_part(own[part], total[part], wire)
            self._neighbours.wait_until_sent()
        return total

    def reduce_scatter(
        self, own: np.ndarray, sizes: Sequence[int], wire: np.dtype, *, purpose: str = ""
    ) -> np.ndarray:
        """This rank's part of the sum of all ranks' `own` [n].

        Together with `all_gather_parts` it sends as many bytes as `all_reduce`.

        Args:
          own, wire, purpose: as for `all_reduce`.
          sizes: number of elements of each rank's part, in order; their sum is n.

        Returns:
          [sizes[rank]], rounded to the wire's number format.
        """
        ends = np.cumsum([0, *sizes])
        received = np.empty(len(own), wire)
        with self._call(f"scatter {purpose}"):
            for chunks in _chunks_by_round(ends, max(1, _CHUNK_BYTES // own.itemsize)):
                # A rank ends with the sum of the chunk after the one that it sends first.
                self._sum_chunks(own, received, [chunks[-1], *chunks[:-1]], passes_on=False)
            self._neighbours.wait_until_sent()
        return received[ends[self._rank] : ends[self._rank + 1]].astype(own.dtype, copy=False)

    def all_gather(self, own: np.ndarray, *, purpose: str = "") -> np.ndarray:
        """Every rank's `own` [n], as [ranks, n]."""
        joined = self.all_gather_parts(own, [len(own)] * self._num_workers, purpose=purpose)
        return joined.reshape(self._num_workers, len(own))

    def all_gather_parts(self, own: np.ndarray, sizes: Sequence[int], *, purpose: str = "") -> np.ndarray:
        """Every rank's `own`, joined in order.

        Args:
          own: this rank's [sizes[rank]].
          sizes: the length of each rank's vector; the same on all ranks.
          purpose: what the call is for.
        """
        with self._call(f"gather {purpose}"):
            return self._gathered(own, sizes)

    def broadcast(self, own: np.ndarray, *, root: int = 0, purpose: str = "") -> np.ndarray:
        """The exact `own` [n] of rank `root`. On other ranks `own` only gives length and dtype."""
        value = own if self._rank == root else np.empty_like(own)
        with self._call(f"broadcast {purpose}"):
            if self._rank == root:
                self._neighbours.send(value)
            else:
                self._relay(value, passes_on=(self._rank + 1) % self._num_workers != root)
            self._neighbours.wait_until_sent()
        return value

    @contextlib.contextmanager
    def _call(self, purpose: str) -> Iterator[None]:
        """Context manager: one call of all ranks."""
        # No warnings: a sum that is not finite is detected later, in the mean gradients.
        with self._neighbours.call(purpose), np.errstate(over="ignore", invalid="ignore"):
            yield

    def _reduce_part(self, own: np.ndarray, total: np.ndarray, wire: np.dtype) -> None:
        chunks = [
            slice(*ends) for ends in itertools.pairwise(boundaries(len(own), even_shares(self._num_workers)))
        ]
        # In the wire's own dtype, bytes are received directly into the result; else into a buffer.
        received = total if wire == own.dtype else np.empty(len(own), wire)
        self._sum_chunks(own, received, chunks, passes_on=True)
        # A chunk's sum overwrites what was sent of the chunk; it cannot arrive before that was sent.
        for hop in range(self._num_workers - 1):
            chunk = chunks[(self._rank - hop) % self._num_workers]
            self._relay(received[chunk], passes_on=hop < self._num_workers - 2)
        if received is not total:
            total[:] = received

    def _gathered(self, own: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Every rank's vector of the current call, as `all_gather_parts`."""
        ends = np.cumsum([0, *sizes])
        parts = [slice(*bounds) for bounds in itertools.pairwise(ends)]
        joined = np.empty(ends[-1], own.dtype)
        joined[parts[self._rank]] = own
        self._neighbours.send(own)
        for hop in range(1, self._num_workers):
            part = parts[(self._rank - hop) % self._num_workers]
            self._relay(joined[part], passes_on=hop < self._num_workers - 1)
        self._neighbours.wait_until_sent()
        return joined

    def _sum_chunks(
        self, own: np.ndarray, received: np.ndarray, chunks: Sequence[slice], *, passes_on: bool
    ) -> None:
        """Each chunk goes around the ring once and is summed. Rank r sends chunk r and ends with chunk r + 1.

        Args:
          own: this rank's numbers.
          received: gets partial sums, and the complete sum of one chunk, in the wire's dtype.
          chunks: one for each rank.
          passes_on: whether the complete sum is sent on, piece by piece.
        """
        count = self._num_workers
        self._neighbours.send(own[chunks[self._rank]].astype(received.dtype, copy=False))
        for hop in range(1, count):
            chunk = chunks[(self._rank - hop) % count]
            self._relay(received[chunk], add=own[chunk], passes_on=passes_on or hop < count - 1)

    def _relay(self, received: np.ndarray, *, add: np.ndarray | None = None, passes_on: bool = True) -> None:
        """Receives a frame from the previous rank, adds `add`, and sends each piece of it to the next rank."""
        head, length = self._neighbours.expect(received), _PASSED_BYTES // received.itemsize
        # An empty frame has one empty piece.
        for start in range(0, max(1, len(received)), length):
            piece = slice(start, start + length)
            self._receive_sum(received[piece], None if add is None else add[piece])
            if passes_on:
                self._neighbours.send_bytes(bytes_of(received[piece]), head if start == 0 else b"")

    def _receive_sum(self, received: np.ndarray, add: np.ndarray | None) -> None:
        """Receives numbers and adds `add` to them."""
        view, item = bytes_of(received), received.itemsize
        for start in range(0, len(received), _SUMMED_BYTES // item):
            part = slice(start, min(len(received), start + _SUMMED_BYTES // item))
            self._neighbours.receive(view[part.start * item : part.stop * item])
            if add is not None:
                add_to(received[part], add[part])


def add_to(received: np.ndarray, own: np.ndarray) -> None:
    """Adds `own` to `received`: summed in own's dtype, then rounded to that of `received`."""
    if received.dtype == np.float16:
        # NumPy converts float16 one number at a time, TensorFlow in vectors. The addition is NumPy's, because each
        # array that TensorFlow takes, and `Tensor.numpy`, is a copy.
        with tf.init_scope(), tf.device("/device:CPU:0"):
            total = np.asarray(tf.cast(received, own.dtype)) + own
            received[:] = np.asarray(tf.cast(total, received.dtype))
        return
    np.add(received.astype(own.dtype, copy=False), own, out=received, casting="unsafe")


def _parts(vector: np.ndarray, part_bytes: int) -> Iterator[slice]:
    """Slices of at most so many bytes each."""
    length = max(1, part_bytes // vector.itemsize)
    return (slice(start, start + length) for start in range(0, len(vector), length))


def _chunks_by_round(ends: Sequence[int], length: int) -> Iterator[list[slice]]:
    """The ranks' parts of a vector in rounds: each round has the next `length` elements of every part."""
    for offset in range(0, max(end - begin for begin, end in itertools.pairwise(ends)), length):
        yield [
            slice(min(begin + offset, end), min(begin + offset + length, end))
            for begin, end in itertools.pairwise(ends)
        ]
