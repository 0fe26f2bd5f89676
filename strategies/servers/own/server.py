"""The process of a parameter server: answers requests, detects lost members, and handles the end of the run."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from strategies.cluster import CHIEF, WORKER, Member
from strategies.errors import PeerLost
from strategies.run_settings import Plain
from strategies.servers.one_chief import refusal_of_second
from strategies.servers.own.connections.entrance import Entrance, check_secret
from strategies.servers.own.connections.listener import Listener
from strategies.servers.own.connections.open_connections import OpenConnections
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.wire import Connection, Content, Handler, Message, Refused
from towers.errors import UserError

log = logging.getLogger(__name__)

# The longest time to wait, after the run's end, for workers to learn of it.
_LAST_SECONDS = 10.0
# The same for processes that are not let in yet: a late worker takes milliseconds, a stranger may stay silent.
_LAST_INTRODUCTION_SECONDS = 1.0
# The longest time to wait for sends that the system normally accepts at once: a few bytes to each worker.
_LAST_WORD_SECONDS = 1.0
# A connected process must be let in within this time.
_INTRODUCTION_SECONDS = 10.0
_TICK_SECONDS = 0.2


class Server:
    """Answers requests until the chief ends the run."""

    def __init__(
        self,
        member: Member,
        store: StoreHandlers,
        *,
        settings: Mapping[str, Plain],
        secret: str,
        cluster: int = 0,
        admit_anyone: bool = False,
        coordination: Coordination | None = None,
        timeout_seconds: float | None = None,
    ):
        """Args:
        member: this process.
        store: this server's keys and values.
        settings: the settings that must be the same in all processes, by name.
        secret: the secret that a process must know to connect; '' lets in processes that have none.
        cluster: checksum of the addresses of chief and servers; 0 lets in the workers of any cluster.
        admit_anyone: whether the secret may be '' although other machines can reach the server.
        coordination: answers the requests that server 0 alone answers; None on other servers.
        timeout_seconds: seconds that the chief may be silent before it counts as lost; None for no limit. A chief
          that calls `Group.show_life` is silent only if it hangs.

        Raises:
          UserError: the port is taken, this process may not listen on it, or anyone who connects would be let in.
        """
        check_secret([member], secret, admit_anyone=admit_anyone)
        self.member = member
        self._store, self._coordination = store, coordination
        self._timeout_seconds = timeout_seconds
        self._startup_timeout_seconds = 0.0
        self._stop_asked: Callable[[], bool] = lambda: False
        self._entrance = Entrance(
            member, settings=settings, secret=secret, cluster=cluster, refusal_of_chief=self._refusal_of_chief
        )
        # Without a secret only this machine's processes may connect; `check_secret` ensures that.
        self._listener = Listener(member, for_other_machines=bool(secret) or admit_anyone)
        self._requests: Mapping[str, Handler] = {
            "figures": self._figures,
            "alive": lambda message, arrays: ({}, ()),
            # `_answer_all` acts on it.
            "end": lambda message, arrays: ({}, ()),
            **store.requests,
            **({} if coordination is None else coordination.requests),
        }
        self._connections = OpenConnections()
        self._workers: dict[int, Connection] = {}
        # Held while a worker's connection is recorded as lost or as new: a late loss must not undo a new
        # connection.
        self._members_lock = threading.Lock()
        self._numbers = itertools.count()
        self._end: str | None = None
        # The chief's process; None until it connects. It never changes while this server runs.
        self._chief_lock = threading.Lock()
        self._chief: str | None = None
        self._chief_is_lost, self._how_lost = False, "lost"
        self._refusal: str | None = None
        self._startup_error: UserError | None = None

    def serve(self, startup_timeout_seconds: float, *, stop_asked: Callable[[], bool] = lambda: False) -> str:
        """Answers all processes; returns how the run ended: 'done' or 'interrupted'.

        Args:
          startup_timeout_seconds: seconds to wait for the chief to connect.
          stop_asked: whether this process was asked to stop. A connected chief requests this, and stops all
            processes when everything is saved.

        Raises:
          PeerLost: the chief did not connect in time, or was lost before the end.
          UserError: a process was started with other settings.
        """
        self._startup_timeout_seconds, self._stop_asked = startup_timeout_seconds, stop_asked
        threading.Thread(target=self._listener.accept_all, args=(self._start_serving,), daemon=True).start()
        deadline = time.monotonic() + startup_timeout_seconds
        try:
            while self._end is None:
                time.sleep(_TICK_SECONDS)
                if self._startup_error is not None:
                    raise self._startup_error
                if self._chief_is_lost:
                    advice = "restart all processes; they resume from the last checkpoint"
                    raise PeerLost(f"the chief was {self._how_lost}: {advice}")
                if self._chief is None and stop_asked():
                    return "interrupted"
                if self._chief is None and time.monotonic() > deadline:
                    raise PeerLost(
                        f"the chief did not connect within {startup_timeout_seconds:g} seconds: start it, or "
                        "raise startup_timeout_seconds"
                    )
                self._drop_overdue()
            self._wait_for_the_others()
        finally:
            self._close()
        if self._refusal is not None:
            raise UserError(self._refusal)
        return self._end

    def _drop_overdue(self) -> None:
        """Ends the connections of workers that have held a step for too long, and those of vanished machines.

        Their processes then count as lost.
        """
        for connection in self._connections.all():
            if connection.is_unanswered():
                connection.end()
        # While a loss is being recorded, its worker is still overdue but may have a new connection: check next
        # time.
        if self._coordination is not None and self._members_lock.acquire(blocking=False):
            try:
                for worker in self._coordination.overdue() & self._workers.keys():
                    self._workers[worker].end()
            finally:
                self._members_lock.release()

    def _wait_for_the_others(self) -> None:
        """Waits for the workers: they learn of the end from their next request, then close their connections."""
        now = time.monotonic()
        deadline, introduced_by = now + _LAST_SECONDS, now + _LAST_INTRODUCTION_SECONDS
        while (self._connections.has_members() and now < deadline) or (
            self._connections.all() and now < introduced_by
        ):
            time.sleep(0.01)
            now = time.monotonic()

    def _tell_the_others(self) -> None:
        """Tells the workers that still compute how the run ended: the serving threads send it before they close.

        A worker reads this message instead of its next reply, even long after this process has ended.
        """
        for connection in self._connections.all():
            connection.end_reading()
        deadline = time.monotonic() + _LAST_WORD_SECONDS
        while self._connections.has_members() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _close(self) -> None:
        self._listener.close()
        if self._coordination is not None:
            self._coordination.close()
        if self._end is not None:
            self._tell_the_others()
        for connection in self._connections.all():
            connection.end()

    def _start_serving(self, accepted: socket.socket) -> None:
        """Serves a connection in a separate thread; cleans up if that fails."""
        connection = Connection(accepted, _INTRODUCTION_SECONDS)
        self._connections.add(connection)
        try:
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
        except BaseException:
            self._connections.remove(connection)
            raise

    def _serve_one(self, connection: Connection) -> None:
        peer = None
        try:
            peer = self._entrance.let_in(connection)
            if peer is not None:
                connection.let_in(self._first_request_seconds if peer.role == CHIEF else None)
                self._connections.let_in(connection, peer)
                number = next(self._numbers)
                self._replace_worker(connection, peer, number)
                self._answer_all(connection, number, self._timeout_seconds if peer.role == CHIEF else None)
        except OSError as error:
            # The connection is lost; `_note_loss` below handles that. A TimeoutError with an error number comes
            # from the system: the other machine vanished.
            is_silent = isinstance(error, TimeoutError) and error.errno is None
            if peer is not None and peer.role == CHIEF and is_silent:
                self._how_lost = f"silent for {connection.timeout_seconds:g} seconds"
        except UserError as error:
            # Before the run this server would wait in vain for the refused chief. During a run the refused process
            # is a second chief, which does not affect the run.
            if self._chief is None:
                self._startup_error = error
        except Exception:
            # No thread waits for this one, so it logs the error; closing the connection ends the client's wait.
            log.exception("a request of %s could not be answered", peer and peer.name)
        finally:
            self._tell_end(peer, connection)
            # First, because `serve` may return once no known connection is left.
            connection.close()
            self._connections.remove(connection)
            self._note_loss(peer, connection)

    def _tell_end(self, peer: Member | None, connection: Connection) -> None:
        """Tells a worker that still computes how the run ended; all other workers have already left."""
        if peer is not None and peer.role == WORKER and self._end is not None and self._refusal is None:
            with contextlib.suppress(OSError):
                connection.send({"run_ended": self._end})

    def _refusal_of_chief(self, process: str) -> str | None:
        """Why this process may not be the chief; None if it is the chief from now on."""
        with self._chief_lock:
            if self._chief_is_lost:
                raise ConnectionError("this server ends, because it has lost its chief")
            if self._chief is not None:
                return refusal_of_second(self.member.name, self._chief)
            self._chief = process
            return None

    @property
    def _first_request_seconds(self) -> float | None:
        """Seconds to wait for the chief's first request: the chief may wait for servers that start later."""
        return None if self._timeout_seconds is None else max(self._timeout_seconds, self._startup_timeout_seconds)

    def _answer_all(self, connection: Connection, number: int, timeout_seconds: float | None) -> None:
        """Answers requests; from the first one to the next the other side may be silent for `timeout_seconds`."""
        replies: list[Content] = []
        while True:
            message, arrays = connection.receive()
            if connection.timeout_seconds != timeout_seconds:
                connection.let_in(timeout_seconds)
            message["connection"] = number
            if message["ask"] == "end":
                # A process that connects from now on belongs to the next run.
                self._listener.close()
                self._refusal = message.get("why")
                self._end = message["how"]
            try:
                reply = self._handler(message)(message, arrays)
            except UserError as error:
                reply = {"user_error": str(error)}, ()
            except Refused as error:
                reply = {"refused": str(error)}, ()
            except PeerLost as error:
                reply = {"peer_lost": str(error)}, ()
            replies.append(reply)
            # Requests that were sent together are answered together: each separate reply would wake the client.
            if not connection.has_more:
                connection.send_all(replies)
                replies.clear()

    def _handler(self, message: Message) -> Handler:
        name = message["ask"]
        if name not in self._requests:
            raise Refused(f"there is no request {name!r}")
        return self._requests[name]

    def _figures(self, message, arrays):
        traffic = self._connections.traffic()._asdict()
        counts = {"pulls": self._store.pulls, "pushes": self._store.pushes}
        return {**counts, **traffic, "stop_asked": self._stop_asked()}, ()

    def _replace_worker(self, connection: Connection, peer: Member, number: int) -> None:
        """Counts the earlier connection of a worker that connects again as lost: the worker has restarted."""
        if peer.role != WORKER or self._coordination is None:
            return
        with self._members_lock:
            before = self._workers.get(peer.index)
            if before is not None:
                before.end()
                self._lose_worker(peer.index, before)
            self._workers[peer.index] = connection
            self._coordination.connected(peer.index, number)

    def _note_loss(self, peer: Member | None, connection: Connection) -> None:
        if peer is None or self._end is not None:
            return
        if peer.role == CHIEF:
            self._chief_is_lost = True
        elif peer.role == WORKER and self._coordination is not None:
            with self._members_lock:
                self._lose_worker(peer.index, connection)

    def _lose_worker(self, worker: int, connection: Connection) -> None:
        """Counts a worker's connection as lost, but only once, and not if the worker has connected again."""
        if self._workers.get(worker) is connection:
            del self._workers[worker]
            if self._end is None:
                self._coordination.lost(worker)
