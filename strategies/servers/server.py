"""A parameter server's process: who connects to it, and how it ends."""

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Mapping

from strategies.cluster import CHIEF, WORKER, Member
from strategies.errors import PeerLost
from strategies.servers.coordination import Coordination
from strategies.servers.handlers import StoreHandlers
from strategies.servers.wire import Connection, Content, Message, Refused
from towers.errors import UserError

log = logging.getLogger(__name__)

# After the end, for the others to hear of it.
_LAST_SECONDS = 10.0
_TICK_SECONDS = 0.2


class Server:
    """Answers until the chief says that the run is over."""

    def __init__(
        self,
        member: Member,
        store: StoreHandlers,
        *,
        settings: Mapping[str, int],
        secret: str,
        coordination: Coordination | None = None,
    ):
        """Args:
        member: this process.
        store: what it keeps.
        settings: a checksum of each setting that all must have alike, by what it is.
        secret: who connects must know it.
        coordination: of server 0.

        Raises:
          UserError: its port is taken, or it may not listen there.
        """
        self.member = member
        self._store, self._coordination = store, coordination
        self._settings, self._secret = dict(settings), secret
        self._listener = _listening(member)
        self._lock = threading.Lock()
        self._connections: dict[Connection, Member | None] = {}
        self._workers: dict[int, Connection] = {}
        self._closed_sent = self._closed_received = 0
        self._end: str | None = None
        self._chief_was_here = self._chief_is_lost = False

    def serve(self, startup_timeout_seconds: float) -> str:
        """Answers everyone; how the run ended: 'done' or 'interrupted'.

        Raises:
          PeerLost: the chief never came, or was lost before the end.
        """
        threading.Thread(target=self._accept_all, daemon=True).start()
        deadline = time.monotonic() + startup_timeout_seconds
        try:
            while self._end is None:
                time.sleep(_TICK_SECONDS)
                if self._chief_is_lost:
                    raise PeerLost("the chief was lost: start all again, they go on from the last checkpoint")
                if not self._chief_was_here and time.monotonic() > deadline:
                    raise PeerLost(f"the chief did not come within {startup_timeout_seconds:g} seconds")
                self._drop_overdue()
            self._wait_for_the_others()
        finally:
            self._close()
        return self._end

    def _drop_overdue(self) -> None:
        """Takes workers that are silent in the middle of a step for lost."""
        overdue = set() if self._coordination is None else self._coordination.overdue()
        with self._lock:
            dropped = [
                connection
                for connection, peer in self._connections.items()
                if peer is not None and peer.role == WORKER and peer.index in overdue
            ]
        for connection in dropped:
            connection.close()

    def _wait_for_the_others(self) -> None:
        """Workers hear of the end when they next ask, and then close their connections."""
        deadline = time.monotonic() + _LAST_SECONDS
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.01)

    def _close_listener(self) -> None:
        # A thread that waits in accept keeps the port until it is woken.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _close(self) -> None:
        self._close_listener()
        if self._coordination is not None:
            self._coordination.close()
        for connection in list(self._connections):
            connection.close()

    def _accept_all(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                # Who came is gone already, or there are too many for now.
                time.sleep(_TICK_SECONDS)
                continue
            connection = Connection(accepted, None)
            with self._lock:
                self._connections[connection] = None
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: Connection) -> None:
        peer = None
        try:
            peer = self._introduced(connection)
            if peer is not None:
                with self._lock:
                    self._connections[connection] = peer
                self._replace_worker(connection, peer)
                self._answer_all(connection, peer)
        except OSError:
            pass  # it is gone, which is dealt with below
        except Exception:
            # Nobody waits for this thread: what is wrong must be seen, and the asker must not wait in vain.
            log.exception("a question of %s could not be answered", peer and peer.name)
        finally:
            with self._lock:
                del self._connections[connection]
                self._closed_sent += connection.sent_bytes
                self._closed_received += connection.received_bytes
            connection.close()
            self._note_loss(peer, connection)

    def _introduced(self, connection: Connection) -> Member | None:
        """Who is there; None if it may not come in."""
        message, _ = connection.receive()
        if not hmac.compare_digest(_bytes(str(message.get("secret"))), _bytes(self._secret)):
            connection.send({"refused": "another secret: all processes of a run are started with the same"})
            return None
        peer = Member(message["role"], message["index"])
        theirs = message["settings"]
        for what, checksum in self._settings.items() if theirs else ():
            if theirs.get(what) != checksum:
                text = f"{peer.name} was started with another {what} than {self.member.name}"
                connection.send({"user_error": f"{text}: give all processes the same flags"})
                return None
        self._chief_was_here = self._chief_was_here or peer.role == CHIEF
        connection.send({})
        return peer

    def _answer_all(self, connection: Connection, peer: Member) -> None:
        answers: list[Content] = []
        while True:
            message, arrays = connection.receive()
            if message["ask"] == "end":
                # Whoever comes from now on is of the next run.
                self._close_listener()
                self._end = message["how"]
            try:
                answer, found = self._handler(message)(message, arrays)
            except UserError as error:
                answer, found = {"user_error": str(error)}, ()
            except Refused as error:
                answer, found = {"refused": str(error)}, ()
            except PeerLost as error:
                answer, found = {"peer_lost": str(error)}, ()
            answers.append((answer, found))
            # Who asked in one breath is answered in one: it would be woken for each.
            if not connection.has_more:
                connection.send_all(answers)
                answers.clear()

    def _handler(self, message: Message):
        name = message["ask"]
        if name == "figures":
            return self._figures
        for handlers in (self._coordination, self._store):
            if handlers is not None and not name.startswith("_") and hasattr(handlers, name):
                return getattr(handlers, name)
        if name == "end":
            return lambda message, arrays: ({}, ())
        raise Refused(f"there is no question {name!r}")

    def _figures(self, message, arrays):
        with self._lock:
            sent = self._closed_sent + sum(connection.sent_bytes for connection in self._connections)
            received = self._closed_received + sum(connection.received_bytes for connection in self._connections)
        counts = {"pulls": self._store.pulls, "pushes": self._store.pushes}
        return {**counts, "sent_bytes": sent, "received_bytes": received}, ()

    def _replace_worker(self, connection: Connection, peer: Member) -> None:
        """A worker that comes again has lost what it had, also where its old connection still seems to stand."""
        if peer.role != WORKER or self._coordination is None:
            return
        with self._lock:
            before = self._workers.get(peer.index)
        if before is not None:
            before.close()
            self._note_loss(peer, before)
        with self._lock:
            self._workers[peer.index] = connection

    def _note_loss(self, peer: Member | None, connection: Connection) -> None:
        if peer is None or self._end is not None:
            return
        if peer.role == CHIEF:
            self._chief_is_lost = True
        elif peer.role == WORKER and self._coordination is not None:
            with self._lock:
                # Only once, and not the loss of one that has come again.
                was_its = self._workers.get(peer.index) is connection
                if was_its:
                    del self._workers[peer.index]
            if was_its:
                self._coordination.lost(peer.index)


def _bytes(text: str) -> bytes:
    """Of any text, also what an environment variable holds that is no UTF-8."""
    return text.encode(errors="surrogatepass")


def _listening(member: Member) -> socket.socket:
    """On the member's own address, where that is an interface of this machine, or else on all of them."""
    try:
        return socket.create_server((member.host, member.port), family=member.family)
    except PermissionError as error:
        raise UserError(
            f"{member.name} can't listen on {member.address}: {error.strerror}; give it a port above 1023"
        ) from error
    except OSError as first:
        try:
            return socket.create_server(("", member.port), family=member.family)
        except OSError as error:
            raise UserError(
                f"{member.name} can't listen on {member.address}: {error.strerror or first.strerror}; "
                "end what uses the port, or give it another"
            ) from error
