"""The chief's connection to the servers and workers of ParameterServerStrategy."""

import concurrent.futures
import faulthandler
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import tensorflow as tf
from absl import logging

from strategies.cluster import CHIEF, SERVER, WORKER, Cluster, Member
from strategies.data_checks.data_errors import known_cause, user_error_in
from strategies.distribute import server_vectors
from strategies.distribute.host_functions import call
from strategies.engines import TENSORFLOW
from strategies.errors import PeerLost
from strategies.servers.wire import MAGIC
from strategies.waiting import listens, wait_for_all
from towers.errors import UserError

TEXT, BOOL = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.bool)
# With TensorFlow's default on two cores, a coordinator and its servers can deadlock for lack of threads.
INTER_OP_THREADS = 16
_RETRY_SECONDS = 0.1
# An upper bound of the time that TensorFlow itself needs to connect.
_CONNECT_SECONDS = 60.0
# TensorFlow's errors if a process is lost.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


class CoordinatorConnection:
    """TensorFlow's strategy and coordinator, created once per process.

    Attributes:
      servers, workers: the other processes.
      strategy, coordinator: TensorFlow's.
    """

    def __init__(self, cluster: Cluster, *, startup_timeout_seconds: float):
        """Waits for all other processes. Create it before TensorFlow computes anything.

        Raises:
          PeerLost: a process did not start in time; the message names it.
          UserError: TensorFlow already runs.
        """
        self.servers, self.workers = cluster.members(SERVER), cluster.members(WORKER)
        wait_for_all(
            cluster.this,
            [*self.servers, *self.workers],
            startup_timeout_seconds,
            word=TENSORFLOW,
            other_kind=MAGIC,
        )
        try:
            tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
        except RuntimeError as error:
            raise UserError(
                "strategy 'ps': TensorFlow already runs in this process; join before the first tensor"
            ) from error
        # TensorFlow's log messages contain nothing that a user could act on. `WorkerWatch` warns of lost workers.
        tf.get_logger().setLevel("CRITICAL")
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.WARNING)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({role: list(found) for role, found in cluster.addresses.items()}),
            task_type=CHIEF,
            task_id=0,
            rpc_layer="grpc",
        )
        self.strategy, self.coordinator = _within(
            max(startup_timeout_seconds, _CONNECT_SECONDS),
            lambda: _connected(resolver, len(self.servers)),
            [*self.servers, *self.workers],
        )
        logging.set_verbosity(verbosity)
        self._runs = 0

    def ask(self, member: Member, name: str, *inputs, output: tf.TensorSpec = TEXT):
        """Calls a host function of a server or worker; a text that it returns is parsed as JSON.

        Raises:
          PeerLost: the process is lost.
          UserError: the function raised it.
        """
        device = f"/job:{member.role}/replica:0/task:{member.index}/device:CPU:0"
        with lost_named([member]), tf.device(device):
            (found,) = call(name, [tf.convert_to_tensor(value) for value in inputs], [output])
            value = found.numpy()
        return json.loads(value) if output is TEXT else value

    def descriptions(self, timeout_seconds: float) -> dict[str, Mapping]:
        """The description of each server and worker at the start of a run, by its name.

        Args:
          timeout_seconds: seconds to wait until all processes take part.

        Raises:
          PeerLost: a process was lost, or did not take part in time.
        """
        self._runs += 1
        deadline = time.monotonic() + timeout_seconds
        members = (*self.servers, *self.workers)
        found: dict[str, Mapping] = {}
        # Each round asks all of them, so that they prepare their descriptions at the same time.
        while missing := [member for member in members if member.name not in found]:
            if time.monotonic() > deadline:
                first = missing[0]
                raise PeerLost(
                    f"{first.name} ({first.address}) did not join within {timeout_seconds:g} seconds: restart all "
                    "processes"
                )
            described = {member.name: self._description(member) for member in missing}
            found |= {name: one for name, one in described.items() if one is not None}
            if len(found) < len(members):
                time.sleep(_RETRY_SECONDS)
        return {member.name: found[member.name] for member in members}

    @contextmanager
    def telling_all(self) -> Iterator[None]:
        """Context manager: a UserError ends all servers and workers with the same line as the chief."""
        try:
            yield
        except UserError as error:
            for member in (*self.servers, *self.workers):
                with suppress(PeerLost, UserError, tf.errors.OpError):
                    self.ask(member, "refuse", str(error), output=BOOL)
            raise

    def _description(self, member: Member) -> Mapping | None:
        """The description of a process; None while it prepares this run."""
        try:
            described = self.ask(member, "describe")
        except tf.errors.OpError as error:
            if "Could not find callback" not in str(error):
                raise
            return None
        return described if described.get("run") == self._runs else None


def _connected(resolver, num_servers: int):
    partitioner = server_vectors.partitioner(num_servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def _within(seconds: float, connect: Callable[[], object], members: Sequence[Member]):
    """The result of `connect`, within a time limit.

    All members listened a moment ago. If one is lost now, TensorFlow waits forever, in a thread that ends with the
    process.

    Raises:
      PeerLost: it took longer; the message names the members that do not listen.
    """
    connecting: concurrent.futures.Future = concurrent.futures.Future()

    def run():
        try:
            connecting.set_result(connect())
        except BaseException as error:  # `result` raises it
            connecting.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    # If TensorFlow holds Python's lock, no exception can be raised.
    faulthandler.dump_traceback_later(seconds + _CONNECT_SECONDS, exit=True)
    try:
        return connecting.result(seconds)
    except TimeoutError as error:
        raise _loss(members) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def lost_named(members: Sequence[Member]) -> Iterator[None]:
    """Context manager: turns errors about lost processes into `PeerLost`, a user's mistake into UserError."""
    try:
        yield
    except tf.errors.OpError as error:
        if (found := user_error_in(error) or known_cause(error, "training")) is not None:
            raise found from error
        if not isinstance(error, _LOST):
            raise
        raise _loss(members) from error


def _loss(members: Sequence[Member]) -> PeerLost:
    """The error that names the members that do not listen, or all members if all listen."""
    lost = [member for member in members if not listens(member.address)] or members
    named = ", ".join(f"{member.name} ({member.address})" for member in lost)
    return PeerLost(f"{named} was lost: restart all processes; they resume from the last checkpoint")
