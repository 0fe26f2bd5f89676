"""What the workers of a ring compare at the start: settings, and the first batches that they read.

All workers make the same calls in the same order. If one differs from rank 0, all raise the same UserError.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import tensorflow as tf

from strategies.cluster import Member
from strategies.data_checks.batch_checksums import BatchChecksums
from strategies.errors import PeerLost
from strategies.ring import same_batches
from strategies.ring.exchange.collectives import HostExchange
from strategies.run_settings import Plain, check_same
from towers.errors import UserError


def check_same_settings(
    host: HostExchange, members: Sequence[Member], own: Mapping[str, Plain], *, purpose: str = "settings"
) -> None:
    """Raises UserError if a worker was started with other settings than rank 0.

    Args:
      host: the exchange.
      members: the workers, by rank.
      own: this worker's settings, as from `strategies.run_settings.common_settings`.
      purpose: name of the call, unique for each call.
    """
    texts = host.gather_texts(purpose, json.dumps(own))
    with _refusal(host):
        check_same(dict(zip([member.name for member in members], map(json.loads, texts), strict=True)))


def check_same_batches(
    host: HostExchange,
    members: Sequence[Member],
    own: Mapping[str, BatchChecksums],
    *,
    num_compared: int,
    microbatches: int,
) -> None:
    """Raises UserError as `strategies.ring.same_batches.check_same_batches`.

    Args:
      host, members: as for `check_same_settings`.
      own: checksums of this worker's first batches, by split.
      num_compared: the largest number of batches of a split.
      microbatches: how often a worker reads the training data.
    """
    sent = [own.get(split, BatchChecksums()).numbers(num_compared) for split in same_batches.SPLITS]
    found = host.gather("first batches", np.ravel(sent)).reshape(len(members), len(sent), -1)
    with _refusal(host):
        same_batches.check_same_batches([member.name for member in members], found, microbatches=microbatches)


@contextmanager
def _refusal(host: HostExchange) -> Iterator[None]:
    """Context manager for an error that all workers raise: each worker first waits until all have reached it.

    A worker that ended at once would break the connections by which the others get the error.
    """
    try:
        yield
    except UserError:
        with suppress(tf.errors.OpError, OSError, PeerLost):
            host.gather("refusal", [0.0])
        raise
