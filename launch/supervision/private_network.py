"""A network of its own for this process and those it starts: the loopback, and nothing else.

TensorFlow's server has no authentication and listens on every interface. In a network namespace of its own (see
Linux's namespaces(7)) that is the loopback alone, so nobody else can reach it, on this machine or from outside.
"""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct

# From <linux/sched.h> and <linux/sockios.h>.
_NEW_USERS, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_FLAGS_OF_AN_INTERFACE = "16sH14x"


def enter_private_network() -> None:
    """From here on this process, and what it starts, has a loopback of its own and no other interface.

    To be called before any thread is started.

    Raises:
      OSError: the system has no such thing, or does not let this user have it; then nothing is changed.
    """
    users, groups = os.getuid(), os.getgid()
    try:
        _unshare(_NEW_NETWORK)
    except OSError:
        # Who is not root may, in a user namespace where it is its own administrator.
        _unshare(_NEW_USERS | _NEW_NETWORK)
        own = pathlib.Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{users} {users} 1")
        (own / "gid_map").write_text(f"{groups} {groups} 1")
    _raise_loopback()


def _unshare(what: int) -> None:
    try:
        call = ctypes.CDLL(None, use_errno=True).unshare
    except AttributeError:
        raise OSError("network namespaces are Linux's alone") from None
    if call(what) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_FLAGS_OF_AN_INTERFACE, b"lo", 0))
        _, now = struct.unpack(_FLAGS_OF_AN_INTERFACE, flags)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_FLAGS_OF_AN_INTERFACE, b"lo", now | _UP))
