"""One worker of a ring: makes every exchange of TABLE and saves the results.

python -m tests.strategies.ring.exchange_program FOLDER WAY
    with TF_CONFIG set; WAY is 'tcp' or 'tensorflow'; writes the pickles FOLDER/RANK, and then FOLDER/RANK.waited
"""

import dataclasses
import os
import pathlib
import pickle
import sys
import time

import numpy as np
import tensorflow as tf

from launch.membership.tf_config import cluster_from
from strategies.ring.exchange.collectives import HostExchange, WireOptions, WorkerExchange
from strategies.ring.exchange.joining import Ring, join_ring
from strategies.ring.exchange.tcp_connect import connected_tcp_ring
from towers.device_setup import configure_devices

BYTES_PER_PACK = (1, 100, 4 * 2**20)
GRADIENT_SHAPES = ((3, 4), (50,), (), (7, 3, 2), (1000,))
# Several gradients in float32, one in float64.
GRADIENT_DTYPES = (np.float32, np.float32, np.float32, np.float32, np.float64)
# Number of rows of a sparse gradient, by rank.
NUM_ROWS = (2, 0, 3)
DENSE_SHAPE = (6, 2)
NUM_ROUNDED = 100_000
LATE_SECONDS = 3.0
# Longer than LATE_SECONDS, and shorter than the heartbeats need to detect that a worker has ended.
_LONGEST_STAY_SECONDS = 8.0


def drawn(rank: int) -> np.random.Generator:
    return np.random.default_rng(100 + rank)


def gradients_of(rank: int) -> list[np.ndarray]:
    """Dense gradients of all magnitudes."""
    draw = drawn(rank)
    return [
        (draw.normal(size=shape) * 10 ** draw.uniform(-3, 3, size=shape)).astype(dtype)
        for shape, dtype in zip(GRADIENT_SHAPES, GRADIENT_DTYPES, strict=True)
    ]


def rounded_of(rank: int) -> np.ndarray:
    """Numbers for a short wire, of magnitudes at which float16 has its full precision."""
    draw = drawn(rank)
    return (draw.choice([-1, 1], NUM_ROUNDED) * 2 ** draw.uniform(-4, 4, NUM_ROUNDED)).astype(np.float32)


def rows_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [n, 2] and indices [n] of a sparse gradient; no two workers have the same n."""
    draw, count = drawn(rank), NUM_ROWS[rank]
    return draw.normal(size=(count, DENSE_SHAPE[1])).astype(np.float32), draw.integers(0, DENSE_SHAPE[0], count)


def numbers_of(rank: int) -> dict[str, np.ndarray]:
    """Numbers for the host's exchange, such that a lossy way of sending would change them."""
    payload = np.array([0x7FF8000000000001 + rank], np.uint64).view(np.float64)
    return {
        "float64": np.array([-0.0, 0.1 + rank, np.inf, 1e308, 5e-324, *payload]),
        "int64": np.array([2**62 + rank, -(2**63), 2**53 + 1, rank, -1]),
    }


def variables_of(rank: int) -> list[np.ndarray]:
    """Variables of all kinds that a checkpoint holds, one of them large."""
    payload = np.array([0x7FC00001 + rank], np.uint32).view(np.float32)
    return [
        np.concatenate([payload, np.array([-0.0, 1.5 + rank], np.float32)]),
        np.array(-0.0 if rank == 0 else 7.0),
        np.array([[2**62 + rank, -1]]),
        np.array([True, False]) ^ bool(rank),
        drawn(rank).normal(size=(1500, 1000)).astype(np.float32),
    ]


@dataclasses.dataclass(frozen=True)
class Way:
    """This worker's ring, and whether it exchanges by TCP or by TensorFlow."""

    ring: Ring
    by_tcp: bool

    @property
    def rank(self) -> int:
        return self.ring.rank

    def worker_exchange(self, **wire) -> WorkerExchange:
        return self._exchange(WorkerExchange, wire)

    def host_exchange(self, **wire) -> HostExchange:
        return self._exchange(HostExchange, wire)

    def _exchange(self, kind, wire):
        ring, options = self.ring, WireOptions(**wire)
        common = {"num_workers": ring.num_workers, "rank": ring.rank, "options": options}
        tcp = None
        if self.by_tcp:
            first = HostExchange(**common, channel=ring.next_channel())
            seconds = options.timeout_seconds
            tcp = connected_tcp_ring(ring.members, ring.rank, first, timeout_seconds=seconds)
        return kind(**common, channel=ring.next_channel(), tcp=tcp)


def summed_gradients(way: Way, own, **wire) -> list[np.ndarray]:
    """The gradients' sums by a new exchange, in a graph, as in a step."""
    exchange = way.worker_exchange(**wire)
    return tf.function(lambda: exchange.sum_gradients(own))()


def dense(way: Way) -> dict[int, list[np.ndarray]]:
    own = [tf.constant(gradient) for gradient in gradients_of(way.rank)]
    return {
        size: [value.numpy() for value in summed_gradients(way, own, bytes_per_pack=size)]
        for size in BYTES_PER_PACK
    }


def rounded(way: Way) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums over each short wire: of float32 numbers, which are rounded, and of float64 numbers, which are not."""
    own = [tf.constant(rounded_of(way.rank)), tf.constant(rounded_of(way.rank), tf.float64)]
    return {
        precision: tuple(value.numpy() for value in summed_gradients(way, own, precision=precision))
        for precision in ("bfloat16", "float16")
    }


def sparse(way: Way) -> list[np.ndarray]:
    """A sparse gradient summed between two dense ones: [values, indices, first dense, last dense]."""
    values, indices = map(tf.constant, rows_of(way.rank))
    rows = tf.IndexedSlices(values, indices, tf.constant(DENSE_SHAPE, tf.int64))
    first, found, last = summed_gradients(way, [tf.constant([1.0]), rows, tf.constant([2.0])])
    return [found.values.numpy(), found.indices.numpy(), first.numpy(), last.numpy()]


def mixed(way: Way) -> list[np.ndarray]:
    """Tensors of several precisions in one call; each is summed in its own precision."""
    exchange = way.worker_exchange(precision="bfloat16")
    own = [tf.constant(gradient) for gradient in gradients_of(way.rank)]
    counts = tf.constant([way.rank + 2**24, 1])
    return [value.numpy() for value in tf.function(lambda: exchange.sum([own[0], counts, *own[1:]]))()]


def host(way: Way) -> dict[str, list[np.ndarray]]:
    """Gathers each kind of number three times, in turns."""
    exchange = way.host_exchange()
    own = numbers_of(way.rank)
    turns = [{dtype: exchange.gather(dtype, own[dtype][turn:][:3], dtype) for dtype in own} for turn in range(3)]
    return {dtype: [turn[dtype] for turn in turns] for dtype in own}


def given(way: Way) -> list[np.ndarray]:
    exchange = way.host_exchange()
    variables = [tf.Variable(value) for value in variables_of(way.rank)]
    exchange.broadcast(variables)
    return [variable.numpy() for variable in variables]


def halves(way: Way) -> tuple[np.ndarray, np.ndarray]:
    """This worker's part of a sum, and all parts joined; twice, as in two steps."""
    exchange, own = way.worker_exchange(), tf.constant(rounded_of(way.rank))
    sizes = sizes_of_parts(way.ring.num_workers)

    @tf.function
    def step():
        part = exchange.reduce_scatter(own, sizes)
        return part, exchange.all_gather(part, sizes)

    step()
    return tuple(value.numpy() for value in step())


def sizes_of_parts(num_workers: int) -> list[int]:
    """Lengths of the ranks' parts of `rounded_of`; that of rank 1 is empty."""
    return [NUM_ROUNDED, 0] if num_workers == 2 else [30_000, 0, NUM_ROUNDED - 30_000]


def given_in_turn(way: Way) -> list[np.ndarray]:
    """Variables after two broadcasts; each variable comes from one rank, the ranks in turn."""
    exchange = way.host_exchange()
    variables = [tf.Variable(value) for value in variables_of(way.rank)]
    roots = [index % way.ring.num_workers for index in range(len(variables))]
    for _ in range(2):
        exchange.broadcast(variables, roots=roots)
    return [variable.numpy() for variable in variables]


TABLE = {
    "dense": dense,
    "rounded": rounded,
    "sparse": sparse,
    "mixed": mixed,
    "host": host,
    "given": given,
    "halves": halves,
    "given_in_turn": given_in_turn,
}


def attend(way: Way) -> HostExchange:
    """An exchange with a timeout of a few seconds, after one collective that all workers have joined."""
    exchange = way.host_exchange(timeout_seconds=LATE_SECONDS)
    exchange.gather("all come", [1.0])
    return exchange


def waited(exchange: HostExchange) -> tuple[str, float]:
    """(error, seconds) of a collective that the last worker never joins."""
    began = time.monotonic()
    try:
        exchange.gather("not all come", [1.0])
    except (tf.errors.OpError, OSError) as error:
        return type(error).__name__, time.monotonic() - began
    return "nothing", time.monotonic() - began


def write(file: pathlib.Path, found) -> None:
    """Writes the file atomically, because other workers check whether it exists."""
    unfinished = file.with_name(f"new-{file.name}")
    unfinished.write_bytes(pickle.dumps(found))
    unfinished.rename(file)


def stay_until_all_waited(folder: pathlib.Path, num_waiting: int) -> None:
    """Keeps this worker alive: its closed connections, or the heartbeats, would end the others' waits too soon.

    A worker that crashes while it waits writes no file.
    """
    deadline = time.monotonic() + _LONGEST_STAY_SECONDS
    while time.monotonic() < deadline and len(list(folder.glob("[0-9]*.waited"))) < num_waiting:
        time.sleep(0.01)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    configure_devices(num_towers=1, kind="cpu", threads_per_tower=1)
    ring = join_ring(cluster_from(os.environ["TF_CONFIG"]), startup_timeout_seconds=60)
    way = Way(ring, by_tcp=sys.argv[2] == "tcp")
    write(folder / str(way.rank), {name: exchange(way) for name, exchange in TABLE.items()})
    exchange = attend(way)
    if way.rank < ring.num_workers - 1:
        write(folder / f"{way.rank}.waited", waited(exchange))
    stay_until_all_waited(folder, ring.num_workers - 1)
    sys.stdout.flush()
    # A normal exit would hang: after an aborted collective, TensorFlow's shutdown waits for the other workers.
    os._exit(0)


if __name__ == "__main__":
    main()
