"""The shares of a global batch of all towers of a ring."""

import numpy as np

from strategies.ring.exchange.collectives import HostExchange
from towers.split import checked_shares, given_shares


def all_shares(
    host: HostExchange, own: tuple[float, ...], worker_shares: tuple[float, ...] | None
) -> tuple[list[tuple[float, ...]], str]:
    """The shares of all towers, worker by worker: each worker's share, divided like the shares of its towers.

    With them the shares that all workers were given, for messages.
    """
    counts = host.gather("towers", [len(own)], np.int64)[:, 0]
    of_workers = checked_shares(
        worker_shares or tuple(map(float, counts)), host.num_workers, "worker_shares", of="worker"
    )
    filled = host.gather("shares", np.pad(own, (0, max(counts) - len(own))))
    rows = [row[:count] for row, count in zip(filled, counts, strict=True)]
    shares = [
        tuple(float(of_worker * share / row.sum()) for share in row)
        for of_worker, row in zip(of_workers, rows, strict=True)
    ]
    given = [given_shares("worker_shares", worker_shares or ())]
    given += [given_shares("tower_shares", row) for row in rows]
    return shares, " and ".join(dict.fromkeys(filter(None, given)))
