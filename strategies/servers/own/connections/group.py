"""The connections of one process to all servers."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from strategies.cluster import Member
from strategies.errors import PeerLost
from strategies.run_settings import Plain
from strategies.servers.own.connections.entrance import check_secret, introduce
from strategies.servers.wire import Connection, Content, Message, Refused
from towers.errors import UserError

_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
# How often connections are checked for servers that may have vanished.
_LOOK_SECONDS = 1.0


class Group:
    """Connections to all servers of a run, by index. Several threads may ask; only one may use `start_asking_all`.

    Attributes:
      servers: the servers as members of the cluster.
      connections: one connection to each server.
    """

    def __init__(self, servers: Sequence[Member], connections: Sequence[Connection]):
        self.servers, self.connections = servers, connections
        # One lock for each server, held from a request to its reply.
        self._turns, self._is_over = [threading.Lock() for _ in servers], threading.Event()
        # The error that `show_life` found; after a request without a reply the connections are useless.
        self._failure: PeerLost | None = None

    @classmethod
    def connected(
        cls,
        servers: Sequence[Member],
        this: Member,
        *,
        settings: Mapping[str, Plain],
        secret: str,
        cluster: int = 0,
        admit_anyone: bool = False,
        startup_timeout_seconds: float,
        timeout_seconds: float,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> "Group":
        """Connects to all servers, and waits until each of them listens.

        Args:
          servers: the servers to connect to.
          this: this process.
          settings: the settings that must be the same in all processes, by name; {} checks nothing.
          secret: the servers' secret.
          cluster: for a worker, checksum of the addresses of its chief and servers; 0 checks nothing.
          admit_anyone: whether the secret may be '' although other machines can reach a server.
          startup_timeout_seconds: seconds to wait for the servers to listen.
          timeout_seconds: seconds that a connected server may be silent before it counts as lost.
          gives_up: returns whether to stop waiting.

        Raises:
          PeerLost: a server did not listen in time; the message names it.
          UserError: this process has other settings or another secret than a server, lacks a secret where one is
            needed, or is a second chief or a worker of another cluster.
        """
        check_secret(servers, secret, admit_anyone=admit_anyone)
        deadline = time.monotonic() + startup_timeout_seconds

        def introduced(connection: Connection, server: Member) -> None:
            introduce(connection, this, server, settings=settings, secret=secret, cluster=cluster)

        connections = []
        with contextlib.ExitStack() as to_close:
            for server in servers:
                found = _introduced(
                    server, introduced, deadline, startup_timeout_seconds, timeout_seconds, gives_up
                )
                connections.append(to_close.enter_context(contextlib.closing(found)))
            to_close.pop_all()
        found = cls(servers, connections)
        threading.Thread(target=found._end_unanswered, daemon=True).start()
        return found

    def ask(self, server: int, what: str, arrays: Sequence[np.ndarray] = (), **fields) -> tuple[Message, list]:
        """One server's reply to the request named `what`.

        Raises:
          PeerLost: the server is lost or silent.
          RunEnded: the server has ended with the run.
        """
        (reply,) = self.ask_each(what, {server: ({}, arrays)}, **fields)
        return reply

    def ask_in_turn(
        self, server: int, *requests: tuple[Mapping, Sequence[np.ndarray]]
    ) -> list[tuple[Message, list]]:
        """One server's replies to several requests, all sent before the first reply is read; raises as `ask`."""
        with self._turns[server]:
            self._guarded(server, lambda c: c.send_all(requests))
            return self._replies([server] * len(requests))

    def ask_all(self, what: str, **fields) -> list[tuple[Message, list]]:
        """Every server's reply to the same request; raises as `ask`."""
        return self.ask_each(what, self._to_all(), **fields)

    def start_asking_all(self, what: str, **fields) -> Callable[[], list[tuple[Message, list]]]:
        """Sends a request to every server; returns a function that waits for the replies."""
        return self._start_asking(what, self._to_all(), **fields)

    def _to_all(self) -> dict[int, Content]:
        """The same request to every server, without individual fields or arrays."""
        return {server: ({}, ()) for server in range(len(self.servers))}

    def ask_each(self, what: str, requests: Mapping[int, Content], **fields) -> list[tuple[Message, list]]:
        """The replies of some servers, each to its own request; all are sent before the first reply is read.

        Args:
          what: name of the request.
          requests: each server's own fields and arrays, by the server's index.
          **fields: fields that all these requests share.

        Raises:
          UserError, Refused: a server raised it; the other servers' replies have been read.
          PeerLost: as `ask`.
        """
        with contextlib.ExitStack() as turns:
            # Always in the same order: otherwise two threads could deadlock.
            for server in sorted(requests):
                turns.enter_context(self._turns[server])
            return self._start_asking(what, requests, **fields)()

    def _start_asking(self, what, requests, **fields) -> Callable[[], list[tuple[Message, list]]]:
        for server, (own, arrays) in requests.items():
            self._guarded(server, lambda c, own=own, arrays=arrays: c.send({"ask": what, **fields, **own}, arrays))
        return lambda: self._replies(requests)

    def _replies(self, servers: Iterable[int]) -> list[tuple[Message, list]]:
        """Reads all replies, even after an error: an unread reply would be taken for the next request's reply."""
        replies, first_error = [], None
        for server in servers:
            try:
                replies.append(self._guarded(server, lambda c: c.answer()))
            except (UserError, Refused) as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return replies

    def show_life(self, every_seconds: float) -> None:
        """Until `close`, tells the servers regularly that this process is alive, even while it sends no requests.

        If a server is lost meanwhile, the next request raises the error.
        """
        threading.Thread(target=self._show_life, args=[every_seconds], daemon=True).start()

    def _show_life(self, every_seconds: float) -> None:
        while not self._is_over.wait(every_seconds):
            for server, turn in enumerate(self._turns):
                # A thread that now asks this server also shows that the process is alive.
                if turn.acquire(blocking=False):
                    try:
                        self._start_asking("alive", {server: ({}, ())})()
                    except PeerLost as error:
                        self._failure = error
                        return
                    finally:
                        turn.release()

    def _end_unanswered(self) -> None:
        """Until `close`: ends a connection whose machine vanished while a request was sent to it."""
        while not self._is_over.wait(_LOOK_SECONDS):
            for connection in self.connections:
                if connection.is_unanswered():
                    connection.end()

    def check(self, server: int) -> None:
        """Raises PeerLost if the server has closed its connection since its last reply."""
        self._guarded(server, lambda c: c.check())

    def _guarded(self, server: int, act):
        if self._failure is not None:
            raise self._failure
        try:
            return act(self.connections[server])
        except OSError as error:
            self._raise_run_ended(server)
            # When one server ends, the others end soon after. It is unknown which was first, so all are named.
            indices = [index for index in range(len(self.servers)) if index == server or self._is_closed(index)]
            lost = [f"{self.servers[index].name} ({self.servers[index].address})" for index in indices]
            were = "were" if len(lost) > 1 else "was"
            what = "silent for too long" if isinstance(error, TimeoutError) else "lost"
            raise PeerLost(
                f"{', '.join(lost)} {were} {what}: restart all processes; they resume from the last checkpoint"
            ) from error

    def _raise_run_ended(self, server: int) -> None:
        """Raises RunEnded if the server said so before it closed its connection."""
        if self._is_closed(server):
            with contextlib.suppress(OSError):
                while True:
                    self.connections[server].answer()

    def _is_closed(self, server: int) -> bool:
        try:
            self.connections[server].check()
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Closes all connections; before the end of the run the servers then count this process as lost."""
        self._is_over.set()
        for connection in self.connections:
            connection.close()


def _introduced(
    server: Member,
    introduced: Callable[[Connection, Member], None],
    deadline: float,
    waited: float,
    timeout_seconds: float,
    gives_up: Callable[[], bool],
) -> Connection:
    while True:
        # The deadline also applies to a server that accepts the connection and then is silent.
        left = max(deadline - time.monotonic(), _RETRY_SECONDS)
        try:
            with contextlib.ExitStack() as on_error:
                address = (server.host, server.port)
                connected = socket.create_connection(address, timeout=min(left, _CONNECT_SECONDS))
                connection = Connection(connected, min(left, timeout_seconds))
                on_error.callback(connection.close)
                introduced(connection, server)
                connection.let_in(timeout_seconds)
                on_error.pop_all()
                return connection
        except Refused as error:
            raise UserError(f"{server.name} ({server.address}) refused this process: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline or gives_up():
                raise PeerLost(
                    f"{server.name} ({server.address}) could not be reached within {waited:g} seconds "
                    f"({error}): start it, or raise startup_timeout_seconds"
                ) from error
            time.sleep(_RETRY_SECONDS)
