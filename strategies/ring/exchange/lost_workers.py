"""Finds which worker of a ring was lost, and makes the error for the user."""

import faulthandler
import re
import sys

import tensorflow as tf

from strategies.cluster import Member
from strategies.errors import PeerLost
from strategies.ring.exchange.joining import Ring
from strategies.ring.exchange.neighbours import NeighbourLost, OutOfStep

# Errors of a collective if another worker is lost, hangs or has given up.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
)


def peer_lost(error: Exception, ring: Ring, at: str) -> PeerLost:
    """The error for the user; after a timeout that names no worker, also prints all threads' stacks.

    Args:
      error: error of an exchange.
      ring: the workers, and which of them this one is.
      at: when it happened, such as 'step 7'.
    """
    waited = isinstance(error, (tf.errors.DeadlineExceededError, TimeoutError))
    lost = _lost_members(error, ring)
    if waited and not lost:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    return PeerLost(_what_was_lost(error, lost, ring, at))


def _lost_members(error: Exception, ring: Ring) -> list[Member]:
    """The workers that the error names."""
    if "CoordinationService/Heartbeat" in str(error):
        return [ring.members[0]]  # receives all heartbeats
    if isinstance(error, NeighbourLost):
        ranks = dict.fromkeys((ring.rank + step) % len(ring.members) for step in error.steps)
        return [ring.members[rank] for rank in sorted(ranks)]
    if isinstance(error, ConnectionError) and "/job:" not in str(error):
        return [ring.members[ring.rank - 1]]  # the sender of the frame
    found = re.findall(r"/job:(\w+)(?:/replica:0)?/task:(\d+)", str(error))
    named = {f"{role}:{index}" for role, index in found} - {ring.members[ring.rank].name}
    return [member for member in ring.members if member.name in named]


def _what_was_lost(error: Exception, lost: list[Member], ring: Ring, at: str) -> str:
    own = ring.members[ring.rank].name
    if isinstance(error, OutOfStep):
        return (
            f"{lost[0].name} ({lost[0].address}) and {own} are out of step at {at}: {error}: restart all workers, "
            "they resume from the last checkpoint"
        )
    if not lost:
        seconds = ring.options.wire.timeout_seconds
        return (
            f"{own}: another worker did not answer at {at} within collective_timeout_seconds={seconds:g}: find "
            "the worker that hangs or ended first"
        )
    written = ", ".join(f"{member.name} ({member.address})" for member in lost)
    were = "were" if len(lost) > 1 else "was"
    return f"{written} {were} lost at {at}: restart all workers, they resume from the last checkpoint"
