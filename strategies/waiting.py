"""Waiting at the start until all processes of a cluster listen on their addresses."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Sequence

from strategies.cluster import Member
from strategies.door import Door
from strategies.errors import PeerLost
from towers.errors import UserError

_PROBE_SECONDS = 0.2
_CONNECT_SECONDS = 0.3
_ANSWER_SECONDS = 1.0
# A process that listens and sends nothing for this long is of another kind.
_SILENT_SECONDS = 10.0
# A process of the other kind reconnects repeatedly for this long; a stranger that knows its first bytes does not.
_INSISTS_SECONDS, _LONGEST_GAP_SECONDS = 3.0, 1.5
_LONGEST_WORD = 64
# Number of connections that the kernel queues until they are accepted: many workers connect at the same moment.
_KEPT_CONNECTIONS = 1024
# The default of `other_kind`: no process sends these bytes first.
_NOBODY = b"\0"


def wait_for_all(
    this: Member,
    others: Sequence[Member],
    timeout_seconds: float,
    *,
    word: str = "",
    other_kind: bytes = _NOBODY,
) -> None:
    """Listens on this member's address until every other member listens on its own.

    Connections of strangers are ignored meanwhile, unless connections that begin with `other_kind` keep coming.

    Args:
      this: this process.
      others: the processes to wait for.
      timeout_seconds: seconds to wait.
      word: the text that this process sends to whoever connects, and expects from the others: all must have the
        same. A server of TensorFlow is accepted too, because a restarted process finds the others' servers. ''
        expects nothing.
      other_kind: the first bytes of a process that was started without the word.

    Raises:
      UserError: this member's address is in use, or another process expects another word.
      PeerLost: some members did not start in time; the message names them.
    """
    missing, deadline = list(others), time.monotonic() + timeout_seconds
    silent_since: dict[Member, float] = {}
    with listening(this) as listener, _Doorkeeper(listener, word, other_kind) as door:
        while missing := [member for member in missing if not _is_there(member, word)]:
            left = deadline - time.monotonic()
            if left <= 0:
                named = ", ".join(f"{member.name} ({member.address})" for member in missing)
                raise PeerLost(
                    f"{named} did not start within startup_timeout_seconds={timeout_seconds:g}: "
                    "start it, or correct its address in TF_CONFIG"
                )
            if word:
                _check_word(this, missing, word, door, silent_since)
            time.sleep(min(_PROBE_SECONDS, left))


def _check_word(this, missing, word, door: "_Doorkeeper", silent_since: dict[Member, float]) -> None:
    """Raises UserError if another process was started with another word."""
    advice = "start all processes of the cluster with the same engine"
    if door.is_pressed:
        raise UserError(f"{this.name}: a process connected that does not use engine={word!r}: {advice}")
    for member in missing:
        if not listens(member.address):
            silent_since.pop(member, None)
        elif time.monotonic() - silent_since.setdefault(member, time.monotonic()) > _SILENT_SECONDS:
            raise UserError(f"{member.name} ({member.address}) does not use engine={word!r}: {advice}")


def _is_there(member: Member, word: str) -> bool:
    if not word:
        return listens(member.address)
    answer = _first_words(member.address, _PROBE_SECONDS)
    return answer == word.encode() or _is_of_grpc(answer)


def grpc_answers(address: str) -> bool | None:
    """Whether the gRPC server at 'host:port' is alive; None if nothing listens there.

    The kernel accepts connections even to a suspended process. A live server sends first, from its own threads,
    whatever its program computes.
    """
    answer = _first_words(address, _CONNECT_SECONDS)
    return None if answer is None else _is_of_grpc(answer)


def _first_words(address: str, connect_seconds: float) -> bytes | None:
    """The first bytes from 'host:port': b'' for nothing in time, None if nothing listens there."""
    try:
        with _connected(address, connect_seconds) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            with contextlib.suppress(TimeoutError):
                return connection.recv(_LONGEST_WORD)
            return b""
    except OSError:
        return None


def _is_of_grpc(answer: bytes | None) -> bool:
    # A gRPC server begins with an HTTP/2 frame, whose length has three bytes, the first of them 0.
    return answer is not None and answer[:1] == b"\0"


class _Doorkeeper:
    """Context manager: sends the word to whoever connects to a listening socket, without waiting for anyone.

    Attributes:
      is_pressed: whether connections with the bytes of another kind of process keep coming.
    """

    def __init__(self, listener: socket.socket, word: str, other_kind: bytes):
        self._door = Door(listener, other_kind, greeting=word.encode())
        self.is_pressed = False
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._is_over = False

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over = True
        self._thread.join()

    def _answer_all(self) -> None:
        first = last = -math.inf
        with self._door as door:
            while not self._is_over:
                if (found := door.let_in(_PROBE_SECONDS)) is not None:
                    found.close()
                    now = time.monotonic()
                    first, last = (now if now - last > _LONGEST_GAP_SECONDS else first), now
                    self.is_pressed = last - first >= _INSISTS_SECONDS


def listening(member: Member) -> socket.socket:
    """A socket that listens where the member's server will listen. The kernel accepts connections to it.

    Raises:
      UserError: the socket cannot listen there, usually because another program does.
    """
    listener = socket.socket(member.family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # On every interface, like TensorFlow's server, which ignores the host in the address.
        listener.bind(("", member.port))
        listener.listen(_KEPT_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{member.name}: cannot listen on port {member.port} of {member.address} ({error.strerror}); "
            "end the program that uses it, or choose another port for all workers"
        ) from error
    return listener


def listens(address: str, timeout_seconds: float = _CONNECT_SECONDS) -> bool:
    """Whether 'host:port' accepts a TCP connection."""
    try:
        with _connected(address, timeout_seconds):
            return True
    except OSError:
        return False


def _connected(address: str, timeout_seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds)
