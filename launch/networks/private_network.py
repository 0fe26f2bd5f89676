"""A private network for this process and the processes that it starts: the loopback interface only.

TensorFlow's server has no authentication and listens on every interface. In a private network namespace (see
Linux's namespaces(7)) the only interface is the loopback, so nothing else on this machine or outside can reach it.
"""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct

from towers.errors import UserError

# From <linux/sched.h> and <linux/sockios.h>.
_NEW_USERS, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_FLAGS_OF_AN_INTERFACE = "16sH14x"
# The exit code of the child for an error without a number; numbers of errors are below it.
_UNKNOWN_ERROR = 255
_CONNECT_SECONDS = 5.0


def enter_private_network() -> None:
    """Moves this process, and all that it starts later, into a network that has only a loopback interface.

    Must be called before any thread is started. A child tries every step first: if the namespace were
    created but its loopback interface could not be brought up, this process would have no network at all.

    Raises:
      OSError: the system has no network namespaces or does not permit one; nothing is changed then.
      UserError: the system permitted it to the child but not to this process, which must end now.
    """
    _try_in_a_child()
    try:
        _enter()
    except OSError as error:
        raise UserError(
            f"a private network could be created once but not twice ({error.strerror or error}): use "
            "--noprivate_network"
        ) from error


def _try_in_a_child() -> None:
    """Raises the OSError that entering a private network raises in a child of this process."""
    child = os.fork()
    if child == 0:
        code = _UNKNOWN_ERROR
        try:
            _enter()
            _check_loopback()
            code = 0
        except OSError as error:
            code = error.errno or _UNKNOWN_ERROR
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == _UNKNOWN_ERROR or code < 0:
        raise OSError("only Linux has network namespaces")
    if code != 0:
        raise OSError(code, os.strerror(code))


def _check_loopback() -> None:
    """Raises OSError unless a connection over the loopback interface is possible."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=_CONNECT_SECONDS).close()


def _enter() -> None:
    users, groups = os.getuid(), os.getgid()
    try:
        _unshare(_NEW_NETWORK)
    except OSError:
        # A user who is not root may create a network namespace inside a new user namespace, as its administrator.
        _unshare(_NEW_USERS | _NEW_NETWORK)
        own = pathlib.Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{users} {users} 1")
        (own / "gid_map").write_text(f"{groups} {groups} 1")
    _raise_loopback()


def _unshare(flags: int) -> None:
    try:
        call = ctypes.CDLL(None, use_errno=True).unshare
    except AttributeError:
        raise OSError("only Linux has network namespaces") from None
    if call(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_FLAGS_OF_AN_INTERFACE, b"lo", 0))
        _, now = struct.unpack(_FLAGS_OF_AN_INTERFACE, flags)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_FLAGS_OF_AN_INTERFACE, b"lo", now | _UP))
