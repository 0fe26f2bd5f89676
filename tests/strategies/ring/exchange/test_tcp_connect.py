"""The connection from the previous rank is found among strangers, without waiting for any of them."""

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from strategies import door
from strategies.ring.exchange import tcp_connect

TOKEN = b"0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def connect(listener: socket.socket, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(listener.getsockname())
    connection.sendall(sent)
    return connection


def reset(connection: socket.socket) -> None:
    """Closes a connection with an error."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def accepted(listener: socket.socket, seconds: float = 5.0) -> socket.socket:
    return tcp_connect._accepted(listener, TOKEN, time.monotonic() + seconds)


def test_strangers_neither_fail_it_nor_keep_it_waiting(listener):
    with contextlib.ExitStack() as opened:
        for sent in (b"", b"0123", b"x" * 16, b"GET / HTTP/1.1\r\n\r\n"):
            opened.enter_context(connect(listener, sent))
        connect(listener).close()
        reset(connect(listener, b"0123"))
        member = opened.enter_context(connect(listener, TOKEN + b"and more"))
        began = time.monotonic()
        found = opened.enter_context(accepted(listener))
        assert time.monotonic() - began < 2
        assert found.getpeername() == member.getsockname()
        found.settimeout(5.0)
        assert found.recv(100) == b"and more"


def test_a_stranger_may_reset_its_connection_when_it_is_read_already(listener):
    with door.Door(listener, TOKEN) as opened:
        stranger = connect(listener, b"0123")
        for _ in range(3):
            assert opened.let_in(0.1) is None
        reset(stranger)
        assert opened.let_in(1.0) is None
        with connect(listener, TOKEN) as member:
            found = [opened.let_in(1.0) for _ in range(2)]
            assert [one and one.getpeername() for one in found] == [None, member.getsockname()]
            found[1].close()


def test_a_crowd_does_not_keep_a_member_out(listener, monkeypatch):
    monkeypatch.setattr(door, "_MOST_STRANGERS", 4)
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(connect(listener))
        member = opened.enter_context(connect(listener, TOKEN))
        assert opened.enter_context(accepted(listener)).getpeername() == member.getsockname()


@contextlib.contextmanager
def no_more_files():
    """This process can open no file, until the end of the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_can_open_no_file_tries_again_in_a_while(listener):
    with door.Door(listener, TOKEN) as opened, connect(listener, TOKEN) as member:
        began = time.process_time()
        with no_more_files():
            until = time.monotonic() + 1
            while time.monotonic() < until:
                assert opened.let_in(0.5) is None
        assert time.process_time() - began < 0.5
        found = [opened.let_in(1.0) for _ in range(2)]
        assert [one and one.getpeername() for one in found] == [None, member.getsockname()]
        found[1].close()


def test_a_stranger_makes_room_for_a_member_if_no_file_can_be_opened(listener):
    with connect(listener), door.Door(listener, TOKEN) as opened:
        assert opened.let_in(1.0) is None
        with connect(listener, TOKEN) as member, no_more_files():
            found = [opened.let_in(1.0) for _ in range(3)]
            assert [one and one.getpeername() for one in found] == [None, None, member.getsockname()]
            found[2].close()


def test_a_member_that_never_connects(listener):
    with connect(listener), pytest.raises(TimeoutError, match="the previous worker did not connect"):
        accepted(listener, 0.2)
