"""How a server and a client introduce themselves. Each proves that it knows the run's secret, which is never sent.

    client                                               server
      a number drawn for this connection           ->
                                                   <-      another one
      role, index, process, settings, cluster,
      HMAC(secret: 'client', both numbers, these)  ->      lets it in, or refuses it
                                                   <-      HMAC(secret: 'server', both numbers)

Later messages are not encrypted: whoever can change bytes on the wire can change the training.
"""

import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping

from strategies.cluster import CHIEF, WORKER, Member
from strategies.run_settings import Plain, check_same
from strategies.servers.one_chief import process_name
from strategies.servers.wire import Connection
from towers.errors import UserError

_NONCE_BYTES = 16
_CLIENT, _SERVER = "client", "server"


def check_secret(servers: Iterable[Member], secret: str, *, admit_anyone: bool) -> None:
    """Raises UserError for a server that other machines can reach and that would let in any process."""
    if secret or admit_anyone:
        return
    for server in servers:
        if not server.is_loopback:
            raise UserError(
                f"{server.name} ({server.address}) can be reached from other machines, and there is no secret: "
                "whoever connects could change the parameters; set the same TOWERS_SECRET for all processes, or "
                "admit_anyone in a network that you trust"
            )


def introduce(
    connection: Connection,
    this: Member,
    server: Member,
    *,
    settings: Mapping[str, Plain],
    secret: str,
    cluster: int = 0,
) -> None:
    """Introduces this process to a server, and checks that the server knows the secret.

    Args:
      connection: to the server.
      this, server: the two processes.
      settings: the settings that must be the same in all processes, by name; {} checks nothing.
      secret: the run's secret.
      cluster: for a worker, checksum of the addresses of its chief and servers; 0 checks nothing.

    Raises:
      Refused: the server does not let this process in.
      UserError: the server was started with other settings, or does not know the secret.
      OSError: as `Connection.ask`.
    """
    own = secrets.token_hex(_NONCE_BYTES)
    reply, _ = connection.ask({"nonce": own})
    nonces = own, _nonce(reply)
    about = {
        **{"role": this.role, "index": this.index, "process": process_name()},
        **{"settings": dict(settings), "cluster": cluster},
    }
    reply, _ = connection.ask({**about, "proof": _proof(secret, _CLIENT, nonces, about)})
    if not _is_same(reply.get("proof"), _proof(secret, _SERVER, nonces)):
        raise UserError(
            f"{server.name} ({server.address}) does not know this run's secret: another program listens there; "
            "end it, or give the server another port"
        )


class Entrance:
    """The server's side of the introduction."""

    def __init__(
        self,
        server: Member,
        *,
        settings: Mapping[str, Plain],
        secret: str,
        cluster: int = 0,
        refusal_of_chief: Callable[[str], str | None] = lambda process: None,
    ):
        """Args:
        server: this process.
        settings: the settings that must be the same in all processes, by name.
        secret: the run's secret.
        cluster: checksum of the addresses of chief and servers; 0 lets in the workers of any cluster.
        refusal_of_chief: given a process's name, why it may not be the chief; None if it is the chief from now on.
        """
        self._refusal_of_chief = refusal_of_chief
        self._server, self._settings, self._secret, self._cluster = server, dict(settings), secret, cluster

    def let_in(self, connection: Connection) -> Member | None:
        """Introduces the other side; returns the member, or None if it is refused.

        Raises:
          UserError: the chief was started with other settings than this server.
          OSError: the connection is lost, or the other side is not a process of this program.
        """
        hello, _ = connection.receive()
        nonces = _nonce(hello), secrets.token_hex(_NONCE_BYTES)
        connection.send({"nonce": nonces[1]})
        claim, _ = connection.receive()
        about = {name: claim.get(name) for name in ("role", "index", "process", "settings", "cluster")}
        if not _is_same(claim.get("proof"), _proof(self._secret, _CLIENT, nonces, about)):
            connection.send({"refused": "its secret differs: start all processes of a run with the same secret"})
            return None
        peer = Member(about["role"], about["index"])
        theirs = about["settings"]
        try:
            check_same({self._server.name: self._settings} | ({peer.name: theirs} if theirs else {}))
        except UserError as error:
            connection.send({"user_error": str(error)})
            if peer.role == CHIEF:
                raise
            return None
        if refusal := self._refusal(peer, about):
            connection.send({"user_error": refusal})
            return None
        try:
            connection.send({"proof": _proof(self._secret, _SERVER, nonces)})
        except OSError:
            # No other chief is let in any more, so this one must count as lost: no error here, the next `receive`
            # fails.
            if peer.role != CHIEF:
                raise
        return peer

    def _refusal(self, peer: Member, about: Mapping[str, object]) -> str | None:
        """Why a second chief, or a worker of another cluster, is refused; None for other members."""
        if peer.role == CHIEF:
            return self._refusal_of_chief(str(about["process"]))
        is_of_another = peer.role == WORKER and about["cluster"] and self._cluster not in (0, about["cluster"])
        if not is_of_another:
            return None
        return (
            f"{peer.name} belongs to another cluster than {self._server.name} ({self._server.address}): its "
            "TF_CONFIG has other addresses of chief or servers; correct them, or give its run servers of its own"
        )


def _nonce(message: Mapping[str, object]) -> str:
    """The random number of the other side; raises ConnectionError if there is none."""
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * _NONCE_BYTES:
        raise ConnectionError("the other side did not introduce itself")
    return nonce


def _proof(secret: str, side: str, nonces: tuple[str, str], about: Mapping[str, object] | None = None) -> str:
    said = json.dumps([side, *nonces, about], sort_keys=True)
    # A secret may be any text, including that of an environment variable that is not valid UTF-8.
    return hmac.new(secret.encode(errors="surrogatepass"), said.encode(), "sha256").hexdigest()


def _is_same(given: object, proof: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof.encode())
