"""One of the two processes of the doctor's self-test: joins the other one and measures all-reduces.

    python -m launch.health.selftest_worker SECONDS
        needs TF_CONFIG; waits up to SECONDS for the other process; worker 0 prints a JSON list of
        [precision, MiB, seconds]

Exit code 0; 5 if the other process did not start in time.
"""

import json
import os
import statistics
import sys
import time

import tensorflow as tf

from launch.binary import PEER_LOST
from launch.membership.tf_config import cluster_from
from strategies.errors import PeerLost
from strategies.ring.exchange.collectives import HostExchange, WireOptions, WorkerExchange
from strategies.ring.exchange.joining import Ring, join_ring
from strategies.ring.exchange.tcp_connect import connected_tcp_ring
from strategies.ring.exchange.tcp_ring import TcpRing
from towers.device_setup import configure_devices

PRECISIONS = ("float32", "bfloat16")
SIZES_MIB = (1, 8, 32)
_WARM_UPS, _REPEATS = 2, 10
_COLLECTIVE_SECONDS = 30.0


def main() -> None:
    """Joins the ring and measures; worker 0 prints the results."""
    configure_devices(num_towers=1, kind="cpu", threads_per_tower=1)
    cluster = cluster_from(os.environ["TF_CONFIG"])
    try:
        ring = join_ring(cluster, startup_timeout_seconds=float(sys.argv[1]))
    except PeerLost as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(PEER_LOST)
    host = HostExchange(ring.num_workers, ring.rank, ring.options.wire, channel=ring.next_channel())
    tcp = connected_tcp_ring(ring.members, ring.rank, host, timeout_seconds=_COLLECTIVE_SECONDS)
    measured = [
        (precision, size_mib, median_seconds(ring, tcp, precision, size_mib))
        for precision in PRECISIONS
        for size_mib in SIZES_MIB
    ]
    if ring.rank == 0:
        print(json.dumps(measured), flush=True)


def median_seconds(ring: Ring, tcp: TcpRing, precision: str, size_mib: int) -> float:
    """Median seconds of one all-reduce of `size_mib` MiB of float32, sent as a gradient is.

    Raises:
      ArithmeticError: the sum is wrong.
    """
    wire = WireOptions(precision=precision, timeout_seconds=_COLLECTIVE_SECONDS)
    exchange = WorkerExchange(ring.num_workers, ring.rank, wire, channel=ring.next_channel(), tcp=tcp)
    # Small whole numbers: their sum is exact in every wire precision.
    own = tf.fill([size_mib * 2**20 // tf.float32.size], float(1 + ring.rank))
    summed = tf.function(lambda: exchange.sum_gradients([own])[0])
    seconds = []
    for _ in range(_WARM_UPS + _REPEATS):
        began = time.perf_counter()
        total = summed()
        seconds.append(time.perf_counter() - began)
    expected = sum(range(1, ring.num_workers + 1))
    if not bool(tf.reduce_all(total == expected)):
        raise ArithmeticError(
            f"all-reduce of {size_mib} MiB in {precision} gave {total.numpy()[:3]}..., expected {expected}"
        )
    return statistics.median(seconds[_WARM_UPS:])


if __name__ == "__main__":
    main()
