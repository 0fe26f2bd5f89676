"""A worker or server of ParameterServerStrategy: TensorFlow's server, and this process's own host functions."""

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context  # the only way to read how this process uses its GPUs

from strategies.cluster import CHIEF, Cluster
from strategies.distribute.coordinator_connection import INTER_OP_THREADS
from strategies.distribute.description import Answer
from strategies.distribute.host_functions import HostFunctions
from strategies.engines import TENSORFLOW
from strategies.errors import PeerLost
from strategies.servers.wire import MAGIC
from strategies.waiting import grpc_answers, wait_for_all
from towers.errors import UserError

_PROBE_SECONDS = 1.0
# Refused connections in a row after which the chief counts as lost.
_REFUSALS = 3


class HelpingProcess:
    """Serves the chief. TensorFlow's server is started once; it may serve several runs, one after another."""

    def __init__(self, cluster: Cluster, *, num_cpus: int, startup_timeout_seconds: float):
        """Waits for all other processes and starts the server.

        Args:
          cluster: all processes, and which of them this one is.
          num_cpus: number of logical CPU devices that this process offers.
          startup_timeout_seconds: seconds to wait for the other processes.

        Raises:
          UserError: this process's address is in use.
          PeerLost: a process did not start in time.
        """
        this = cluster.this
        others = [member for member in cluster.members() if member != this]
        wait_for_all(this, others, startup_timeout_seconds, word=TENSORFLOW, other_kind=MAGIC)
        self._startup_timeout_seconds = startup_timeout_seconds
        (self._chief,) = cluster.members(CHIEF)
        self._server = tf.distribute.Server(
            tf.train.ClusterSpec({role: list(found) for role, found in cluster.addresses.items()}),
            job_name=cluster.role,
            task_index=cluster.index,
            protocol="grpc",
            config=_session_config(num_cpus),
        )
        self._runs = 0
        self._ended, self._how, self._refusal = threading.Event(), "", ""
        self._called_at: float | None = None

    def run(
        self,
        functions: Mapping[str, Callable],
        describe: Callable[[], Mapping],
        *,
        timeout_seconds: float,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> str:
        """Serves until the chief ends the run; returns how it ended: 'done' or 'interrupted'.

        Args:
          functions: functions of this process that graphs may call, by name.
          describe: returns what the chief compares before training. Called once, in a separate thread, when the
            chief first asks; the chief does not ask a process that replaces another one during training.
          timeout_seconds: seconds without a sign of life after which the chief counts as lost.
          stop_asked: whether this process was asked to stop. This ends it only if the chief ended before its first
            call; a running chief decides itself.

        Raises:
          PeerLost: the chief was lost.
          UserError: the chief refused the run.
        """
        self._runs += 1
        self._ended.clear()
        self._how = self._refusal = ""
        self._called_at = None
        own = {"describe": Answer(self._runs, describe).text, "end": self._end, "refuse": self._refuse}
        offered = HostFunctions({name: self._timed(call) for name, call in {**functions, **own}.items()})
        self._wait_for_the_end(timeout_seconds, stop_asked)
        offered.withdraw()
        if self._refusal:
            raise UserError(self._refusal)
        return self._how

    def _timed(self, function):
        def timed(*given):
            self._called_at = time.monotonic()
            return function(*given)

        return timed

    def _end(self, how):
        self._how = how.decode()
        self._ended.set()
        return np.bool_(True)

    def _refuse(self, why):
        self._refusal = why.decode()
        self._ended.set()
        return np.bool_(True)

    def _wait_for_the_end(self, timeout_seconds, stop_asked) -> None:
        """A chief makes no calls during a long evaluation or save; answers of its server show that it is alive."""
        heard_at, refused = time.monotonic(), 0
        named = f"{self._chief.name} ({self._chief.address})"
        while not self._ended.wait(_PROBE_SECONDS):
            lives = grpc_answers(self._chief.address)
            refused = refused + 1 if lives is None else 0
            called_at = self._called_at
            heard_at = max(heard_at, time.monotonic() if lives else 0.0, called_at or 0.0)
            limit = timeout_seconds if called_at else max(timeout_seconds, self._startup_timeout_seconds)
            silent = time.monotonic() - heard_at
            if refused >= _REFUSALS and not called_at and stop_asked():
                self._how = "interrupted"
                return
            if refused >= _REFUSALS and (called_at or silent > limit):
                raise PeerLost(f"{named} was lost: restart all processes; they resume from the last checkpoint")
            if silent > limit:
                raise PeerLost(
                    f"{named} was silent for {limit:g} seconds: find out why it hangs, then restart all processes"
                )


def _session_config(num_cpus: int) -> tf.compat.v1.ConfigProto:
    """Configures a CPU device for each tower, this process's own GPUs with the memory they need, and threads.

    By default a server would start all GPUs of the machine and take all of their memory.
    """
    threads = tf.config.threading
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": num_cpus},
        gpu_options=context.context().config.gpu_options,
        intra_op_parallelism_threads=threads.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(INTER_OP_THREADS, threads.get_inter_op_parallelism_threads()),
    )
    if not tf.config.get_visible_devices("GPU"):
        config.device_count["GPU"] = 0
    return config
