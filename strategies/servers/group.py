"""The connections of a chief or a worker to all servers."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from strategies.cluster import Member
from strategies.errors import PeerLost
from strategies.servers.wire import Connection, Content, Message, Refused
from towers.errors import UserError

_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 5.0


class Group:
    """All servers of a run, in order.

    Attributes:
      servers: who they are.
      connections: one to each.
    """

    def __init__(self, servers: Sequence[Member], connections: Sequence[Connection]):
        self.servers, self.connections = servers, connections

    @classmethod
    def connected(
        cls,
        servers: Sequence[Member],
        this: Member,
        *,
        settings: Mapping[str, int],
        secret: str,
        startup_timeout_seconds: float,
        timeout_seconds: float,
    ) -> "Group":
        """Waits for all servers to come.

        Args:
          servers: whom to connect to.
          this: who connects.
          settings: a checksum of each setting that all must have alike; {} for none.
          secret: as the servers'.
          startup_timeout_seconds: how long to wait for each.
          timeout_seconds: how long one may be silent from then on.

        Raises:
          PeerLost: one did not come; it is named.
          UserError: this process was started with other settings, or another secret.
        """
        deadline = time.monotonic() + startup_timeout_seconds
        hello = {"role": this.role, "index": this.index, "settings": dict(settings), "secret": secret}
        connections = []
        with contextlib.ExitStack() as to_close:
            for server in servers:
                found = _introduced(server, hello, deadline, startup_timeout_seconds, timeout_seconds)
                connections.append(to_close.enter_context(contextlib.closing(found)))
            to_close.pop_all()
        return cls(servers, connections)

    def ask(self, server: int, what: str, arrays: Sequence[np.ndarray] = (), **question) -> tuple[Message, list]:
        """One server's answer.

        Raises:
          PeerLost: it is gone or silent.
        """
        (answer,) = self.ask_each(what, {server: ({}, arrays)}, **question)
        return answer

    def ask_in_turn(
        self, server: int, *questions: tuple[Mapping, Sequence[np.ndarray]]
    ) -> list[tuple[Message, list]]:
        """One server's answers to several questions, all sent before the first answer is read; raises as `ask`."""
        self._guarded(server, lambda c: c.send_all(questions))
        return self._answers([server] * len(questions))

    def ask_all(self, what: str, **question) -> list[tuple[Message, list]]:
        """Every server's answer to the same question; raises as `ask`."""
        return self.asked_all(what, **question)()

    def asked_all(self, what: str, **question) -> Callable[[], list[tuple[Message, list]]]:
        """Asks as `ask_all`; the answers are waited for when what it returns is called."""
        return self._asked_each(what, {place: ({}, ()) for place in range(len(self.servers))}, **question)

    def ask_each(self, what: str, questions: Mapping[int, Content], **question) -> list[tuple[Message, list]]:
        """The answers of some servers, each to its own question; all are asked before the first answer is read.

        Raises:
          UserError, Refused: one server's words; the others' answers have been read.
          PeerLost: as `ask`.
        """
        return self._asked_each(what, questions, **question)()

    def _asked_each(self, what, questions, **question) -> Callable[[], list[tuple[Message, list]]]:
        for server, (own, arrays) in questions.items():
            self._guarded(
                server, lambda c, own=own, arrays=arrays: c.send({"ask": what, **question, **own}, arrays)
            )
        return lambda: self._answers(questions)

    def _answers(self, servers: Iterable[int]) -> list[tuple[Message, list]]:
        """All are read, also after one said no: the next question must not get an answer to this one."""
        answers, no = [], None
        for server in servers:
            try:
                answers.append(self._guarded(server, lambda c: c.answer()))
            except (UserError, Refused) as error:
                no = no or error
        if no is not None:
            raise no
        return answers

    def check(self, server: int) -> None:
        """Raises PeerLost if the server has closed its connection since its last answer."""
        self._guarded(server, lambda c: c.check())

    def _guarded(self, server: int, act):
        try:
            return act(self.connections[server])
        except OSError as error:
            # One server's end is soon the others': whose came first can't be told, but it is among them.
            places = [place for place in range(len(self.servers)) if place == server or self._is_closed(place)]
            lost = [f"{self.servers[place].name} ({self.servers[place].address})" for place in places]
            were = "were" if len(lost) > 1 else "was"
            what = "silent for too long" if isinstance(error, TimeoutError) else "lost"
            raise PeerLost(
                f"{', '.join(lost)} {were} {what}: start all again, they go on from the last checkpoint"
            ) from error

    def _is_closed(self, server: int) -> bool:
        try:
            self.connections[server].check()
        except OSError:
            return True
        return False

    def close(self) -> None:
        """The servers take it for a loss, unless the run has ended."""
        for connection in self.connections:
            connection.close()


def _introduced(
    server: Member, hello: Message, deadline: float, waited: float, timeout_seconds: float
) -> Connection:
    while True:
        # Also who accepts and then says nothing did not come.
        left = max(deadline - time.monotonic(), _RETRY_SECONDS)
        try:
            connected = socket.create_connection((server.host, server.port), timeout=min(left, _CONNECT_SECONDS))
            connection = Connection(connected, min(left, timeout_seconds))
            connection.ask(hello)
            connected.settimeout(timeout_seconds)
            return connection
        except Refused as error:
            raise UserError(f"{server.name} ({server.address}) lets this process not in: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"{server.name} ({server.address}) did not come within {waited:g} seconds "
                    f"({error}): start it, or raise --startup_timeout_seconds"
                ) from error
            time.sleep(_RETRY_SECONDS)
