"""The shares of a global batch of all towers of a ring."""

import numpy as np

from strategies.ring.exchange.collectives import HostExchange
from towers.split import checked_shares


def all_shares(
    host: HostExchange, own: tuple[float, ...], worker_shares: tuple[float, ...] | None
) -> list[tuple[float, ...]]:
    """The shares of all towers, worker by worker: each worker's share, divided like the shares of its towers."""
    counts = host.gather("towers", [len(own)], np.int64)[:, 0]
    of_workers = checked_shares(
        worker_shares or tuple(map(float, counts)), host.num_workers, "worker_shares", of="worker"
    )
    filled = host.gather("shares", np.pad(own, (0, max(counts) - len(own))))
    return [
        tuple(float(of_worker * share / row[:count].sum()) for share in row[:count])
        for of_worker, row, count in zip(of_workers, filled, counts, strict=True)
    ]
