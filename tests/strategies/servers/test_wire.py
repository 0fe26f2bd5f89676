"""Messages on real connections arrive as they were sent, and each failure raises an error that names it."""

import contextlib
import json
import math
import struct
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from strategies.servers.wire import Connection, Refused
from tests.strategies.servers.at_once import Started, at_once, connections, let_in, loopback
from tests.towers.user_errors import refused

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
SHORT_FLOATS = ["float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
DTYPES = ["bool", *INTEGERS, *SHORT_FLOATS, "float32", "float64", "complex64", "complex128"]
SHAPES = [(), (0,), (7,), (3, 0, 2), (2, 3, 5)]


def drawn(shape, dtype) -> np.ndarray:
    """Random bits; for bool, random False and True."""
    draw, dtype = np.random.default_rng(3), np.dtype(dtype)
    if dtype.kind == "b":
        return draw.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw.bytes(count), dtype).reshape(shape)


def assert_same_bits(found, sent) -> None:
    assert len(found) == len(sent)
    for one, other in zip(found, sent, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


class TestMessages:
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
    def test_arrays_of_every_shape(self, dtype):
        sent = [drawn(shape, dtype) for shape in SHAPES]
        with connections() as (here, there):
            here.send({"ask": "push"}, sent)
            message, found = there.receive()
        assert message == {"ask": "push"}
        assert_same_bits(found, sent)

    def test_a_large_message(self):
        """In both directions, larger than the buffers of both ends."""
        sent = [drawn((5_000_011,), "float32"), drawn((), "bool"), drawn((1001, 1003), "float64")]

        def echo():
            there.send(*there.receive())

        with connections() as (here, there):
            (_, found), _ = at_once(lambda: here.ask({}, sent), echo)
        assert_same_bits(found, sent)

    def test_an_array_that_is_not_contiguous(self):
        matrix = drawn((6, 8), "float32")
        with connections() as (here, there):
            here.send({}, [matrix.T, matrix[::2, 1::3]])
            assert_same_bits(there.receive()[1], [matrix.T, matrix[::2, 1::3]])

    def test_every_json_type(self):
        sent = {"none": None, "list": [1, 2.5, "drei"], "object": {"a": {"b": []}}, "most": 2**63, "inf": math.inf}
        with connections() as (here, there):
            here.send(sent)
            assert there.receive() == (sent, [])

    def test_several_in_order(self):
        with connections() as (here, there):
            for number in range(5):
                here.send({"number": number}, [np.full(number, number)])
            for number in range(5):
                message, (found,) = there.receive()
                assert message == {"number": number}
                assert found.tolist() == [number] * number

    def test_received_arrays_are_writable(self):
        with connections() as (here, there):
            here.send({}, [np.zeros(3)])
            _, (found,) = there.receive()
        found += 1

    def test_both_ends_count_the_same_bytes(self):
        with connections() as (here, there):
            here.send({"text": "ä"}, [np.zeros(1000), np.zeros(0)])
            there.receive()
            assert here.sent_bytes == there.received_bytes > 8000
            assert (there.sent_bytes, here.received_bytes) == (0, 0)


class TestReplies:
    def test_a_reply(self):
        with connections() as (here, there):
            there.send({"version": 3}, [np.arange(4)])
            message, (found,) = here.ask({"ask": "pull"})
            assert (message, found.tolist()) == ({"version": 3}, [0, 1, 2, 3])
            assert there.receive() == ({"ask": "pull"}, [])

    def test_a_user_error(self):
        with connections() as (here, there):
            there.send({"user_error": "rate=-1: give 0 or more"})
            with refused("rate=-1: give 0 or more"):
                here.ask({"ask": "push"})

    def test_a_refusal(self):
        with connections() as (here, there):
            there.send({"refused": "there is no such key"})
            with pytest.raises(Refused, match="no such key"):
                here.ask({"ask": "pull"})

    def test_the_connection_works_after_a_refusal(self):
        with connections() as (here, there):
            there.send({"refused": "no"})
            there.send({"yes": True})
            with pytest.raises(Refused):
                here.ask({})
            assert here.ask({}) == ({"yes": True}, [])


def message_of(text: bytes, magic: bytes = b"TOW1") -> bytes:
    return struct.pack("<4sI", magic, len(text)) + text


FOREIGN = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a wrong magic": message_of(b'{"": []}', b"TOW0"),
    "too long": struct.pack("<4sI", b"TOW1", 2**32 - 1),
    "no json": message_of(b"{"),
    "no text": message_of(b"\xff\xfe"),
    "a list": message_of(b"[]"),
    "a number": message_of(b"7"),
    "no arrays": message_of(b"{}"),
    "an unknown dtype": message_of(b'{"": [["object", [2]]]}'),
    "a negative shape": message_of(b'{"": [["float32", [-2]]]}'),
    "a shape without end": message_of(b'{"": [["float32", [1000000000, 1000000000, 1000000000]]]}'),
    "more than there is": message_of(b'{"": [["float32", [1000000000000000]]]}'),
    "too deep": message_of(b'{"a": ' + b"[" * 100 + b"]" * 100 + b', "": []}'),
    "deeper than Python": message_of(b"[" * 100_000),
}


class TestBroken:
    @pytest.mark.parametrize("bytes_sent", FOREIGN.values(), ids=FOREIGN.keys())
    def test_foreign_bytes(self, bytes_sent):
        with loopback() as (here, there), pytest.raises(ConnectionError, match="not a message of this program"):
            here.sendall(bytes_sent)
            let_in(there, 5.0).receive()

    def test_the_other_end_is_closed(self):
        with connections() as (here, there):
            there.close()
            with pytest.raises(ConnectionError, match="closed"):
                here.receive()
            with pytest.raises(OSError):
                for _ in range(100):
                    here.send({}, [np.zeros(10**6)])

    @pytest.mark.parametrize("count", [3, 8, 20, 60])
    def test_it_is_closed_in_the_middle_of_a_message(self, count):
        whole = message_of(b'{"": [["float64", [10]]]}') + bytes(80)
        with loopback() as (here, there), pytest.raises(ConnectionError, match="closed"):
            here.sendall(whole[:count])
            here.close()
            let_in(there, 5.0).receive()

    def test_this_end_is_ended_while_a_thread_waits(self):
        def wait():
            with pytest.raises(OSError):
                here.receive()

        with connections() as (here, _):
            number = here._socket.fileno()
            at_once(wait, here.end)
            assert here._socket.fileno() == number, "another connection with this number would be waited on"

    def test_closing_twice(self):
        with connections() as (here, _):
            here.close()
            here.close()

    def test_silence(self):
        with connections(0.2) as (here, there), pytest.raises(TimeoutError):
            here.ask({"ask": "pull"})

    def test_silence_in_the_middle_of_a_message(self):
        with loopback() as (here, there), pytest.raises(TimeoutError):
            here.sendall(message_of(b'{"": [["float64", [10]]]}') + bytes(79))
            let_in(there, 0.2).receive()

    def test_the_other_side_does_not_read(self):
        with connections(0.2) as (here, _), pytest.raises(TimeoutError):
            here.send({}, [np.zeros(10**7)])

    def test_the_other_side_reads_slowly(self):
        """Only silence is limited: a long message over a slow network may take longer."""
        with loopback() as (here, there):
            sender, began = let_in(here, 0.5), time.monotonic()
            sending = Started(lambda: sender.send({}, [np.zeros(2**24, np.uint8)]))
            there.settimeout(0.1)
            while sending.is_running:
                with contextlib.suppress(TimeoutError):
                    there.recv(2**17)
                time.sleep(0.01)
            sending.result()
            assert time.monotonic() - began > 0.5


class TestStrangers:
    """Until the other side is let in, it may send little and has little time."""

    @pytest.mark.parametrize("described", [["float32", [2**31]], ["float32", [1]]])
    def test_no_array_is_received(self, described):
        with loopback() as (here, there):
            here.sendall(message_of(json.dumps({"": [described]}).encode()))
            tracemalloc.start()
            with pytest.raises(ConnectionError, match="not let in"):
                Connection(there, 5.0).receive()
            assert tracemalloc.get_traced_memory()[1] < 2**20
            tracemalloc.stop()

    def test_a_shape_of_too_large_a_number(self):
        with loopback() as (here, there), pytest.raises(ConnectionError, match="not a message of this program"):
            here.sendall(message_of(json.dumps({"": [["float32", [10**400, 0.5]]]}).encode()))
            Connection(there, 5.0).receive()

    def test_a_long_text(self):
        text = json.dumps({"name": "a" * 17_000, "": []}).encode()
        with loopback() as (here, there), pytest.raises(ConnectionError, match="not a message of this program"):
            here.sendall(message_of(text))
            Connection(there, 5.0).receive()
        with loopback() as (here, there):
            here.sendall(message_of(text))
            assert let_in(there).receive()[0] == {"name": "a" * 17_000}

    def test_one_byte_now_and_then_does_not_prolong_it(self):
        def drip():
            for byte in message_of(b'{"": []}'):
                with contextlib.suppress(OSError):
                    here.sendall(bytes([byte]))
                time.sleep(0.05)

        with loopback() as (here, there):
            stranger = Connection(there, 0.2)
            dripping = Started(drip)
            with pytest.raises(TimeoutError):
                stranger.receive()
            assert dripping.is_running

    def test_brackets_within_texts_are_not_deep(self):
        sent = {"key": "[" * 1000, "list": [[]] * 1000}
        with connections() as (here, there):
            here.send(sent)
            assert there.receive()[0] == sent
