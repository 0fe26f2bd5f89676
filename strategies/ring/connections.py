"""This worker's connections to the others, and the errors for the user if one fails or a worker hangs."""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from strategies.errors import PeerLost
from strategies.ring.exchange.collectives import HostExchange, WorkerExchange
from strategies.ring.exchange.joining import Ring
from strategies.ring.exchange.lost_workers import LOST, peer_lost
from strategies.ring.exchange.tcp_connect import connected_tcp_ring
from strategies.ring.exchange.tcp_ring import TcpRing
from strategies.ring.same_start import check_same_settings
from towers.devices import Devices
from towers.errors import UserError

# A hanging worker ends itself this many seconds after the timeout of the workers that wait for it.
_HANG_EXTRA_SECONDS = 2.0


class Connections:
    """The exchanges of one worker, and their deadlines.

    Attributes:
      host: exchanges numbers in the host's memory, by TensorFlow's collectives until `connect`.
      by_tcp: whether the host exchanges through our own TCP connections.
    """

    def __init__(self, ring: Ring, at: Callable[[], str]):
        """Args:
        ring: the workers.
        at: returns the current position of training, such as 'step 7', for errors.
        """
        self._ring, self._at = ring, at
        self._tcp: TcpRing | None = None
        self.host = self._host_exchange()

    @property
    def by_tcp(self) -> bool:
        return self._tcp is not None

    def connect(self, devices: Devices) -> WorkerExchange:
        """Connects the workers for our own engine.

        Args:
          devices: devices of this worker.

        Raises:
          UserError: the workers' options or devices do not allow it.
          PeerLost: another worker did not answer.
        """
        self._tcp = self._tcp_ring(devices)
        if self._tcp is not None:
            self.host = self._host_exchange()
        ring = self._ring
        return WorkerExchange(
            ring.num_workers, ring.rank, ring.options.wire, channel=ring.next_channel(), tcp=self._tcp
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: turns a collective's failure into `PeerLost`; after a timeout, prints the stacks."""
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            if self._tcp is not None and self._tcp.failure is not None:
                raise self._peer_lost(self._tcp.failure) from error
            if isinstance(error, LOST):
                raise self._peer_lost(error) from error
            raise

    @contextmanager
    def deadline(self) -> Iterator[None]:
        """Context manager: as `watched`, and also ends this process if it hangs."""
        self.start_deadline()
        try:
            with self.watched():
                yield
        finally:
            self.end_deadline()

    def start_deadline(self) -> None:
        """Starts a deadline: if this worker exceeds it, a thread that needs no Python ends the process."""
        if self._ring.num_workers > 1:
            seconds = self._ring.options.wire.timeout_seconds + _HANG_EXTRA_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    def end_deadline(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _host_exchange(self) -> HostExchange:
        ring = self._ring
        return HostExchange(
            ring.num_workers, ring.rank, ring.options.wire, channel=ring.next_channel(), tcp=self._tcp
        )

    def _tcp_ring(self, devices: Devices) -> TcpRing | None:
        """Connections for all numbers in the host's memory: all but synced statistics. None if not used."""
        ring = self._ring
        algorithm, on_cpu = ring.options.wire.algorithm, "CPU" in devices.parameters
        if algorithm == "tcp" and not on_cpu:
            raise UserError(f"all_reduce=tcp: gradients are on {devices.parameters}; use auto or nccl for GPUs")
        if ring.num_workers == 1:
            return None
        by_tcp = on_cpu and algorithm in ("auto", "tcp")
        with self.watched():
            used = {"all_reduce": "tcp" if by_tcp else "ring or nccl"}
            check_same_settings(self.host, ring.members, used, purpose="all_reduce")
        if not by_tcp:
            return None
        try:
            with self.watched():
                return connected_tcp_ring(
                    ring.members, ring.rank, self.host, timeout_seconds=ring.options.wire.timeout_seconds
                )
        except OSError as error:
            raise self._peer_lost(error) from error

    def _peer_lost(self, error: Exception) -> PeerLost:
        return peer_lost(error, self._ring, self._at())
