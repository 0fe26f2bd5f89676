"""The TCP ring: ranks in threads of this process, each with real connections to its neighbours."""

import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from strategies.cluster import Member
from strategies.ring.exchange import neighbours, tcp_ring
from strategies.ring.exchange.joining import Ring, RingOptions
from strategies.ring.exchange.lost_workers import peer_lost
from strategies.ring.exchange.neighbours import Neighbours
from strategies.ring.exchange.tcp_ring import TcpRing
from tests.strategies.ring.threads import at_once, connection, rings
from tests.tiers import first_quick

# Largest relative error of a number that is rounded to each type.
ROUNDING = {np.float64: 2.0**-53, np.float32: 2.0**-24, np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}


def all_reduced(made: list[TcpRing], own: list[np.ndarray], wire) -> list[np.ndarray]:
    """The result of an all-reduce on each rank; all ranks call it at the same time."""
    return at_once(made, lambda ring, rank: ring.all_reduce(own[rank], np.dtype(wire)))


def drawn(num_workers: int, length: int, dtype=np.float32) -> list[np.ndarray]:
    draw = np.random.default_rng(length)
    return [draw.normal(size=length).astype(dtype) for _ in range(num_workers)]


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize("wire", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda wire: wire.__name__)
def test_sums(num_workers, wire):
    """Vectors with fewer elements than ranks, and longer than a part; several on the same connections."""
    with rings(num_workers) as (made, _):
        for length in (0, 1, 2, 7, 1000, 3000, 1_300_001):
            own = drawn(num_workers, length)
            found = all_reduced(made, own, wire)
            exact = np.sum(own, axis=0, dtype=np.float64)
            magnitudes = np.sum(np.abs(own), axis=0, dtype=np.float64)
            allowed = 1.01 * num_workers * ROUNDING[wire] * magnitudes + 1e-6 * (wire is np.float16)
            assert np.all(np.abs(found[0] - exact) <= allowed)
            assert all(one.dtype == np.float32 for one in found)
            assert all(one.tobytes() == found[0].tobytes() for one in found)


@pytest.mark.full
def test_sixty_four_workers():
    """Whole numbers, whose sums are exact in any order."""
    with rings(64, timeout_seconds=50.0) as (made, _):
        for length in (10, 70_001):
            own = [np.arange(length, dtype=np.float32) + rank for rank in range(64)]
            found = all_reduced(made, own, np.float32)
            expected = 64 * np.arange(length) + 64 * 63 / 2
            assert all(np.array_equal(one, expected) for one in found)


# Lengths of the ranks' parts. The last are longer than a chunk.
PART_SIZES = [(1, 0), (0, 0), (3, 5), (700_000, 600_001), (0, 4, 1), (600_000, 1_300_001, 2)]


@pytest.mark.parametrize("sizes", PART_SIZES, ids=str)
@pytest.mark.parametrize("wire", [np.float32, ml_dtypes.bfloat16], ids=lambda wire: wire.__name__)
def test_the_halves_of_a_sum(sizes, wire):
    """Each rank gets its part of the sum, and all get the joined parts."""
    own = drawn(len(sizes), sum(sizes))
    ends = np.cumsum([0, *sizes])
    with rings(len(sizes)) as (made, _):
        parts = at_once(made, lambda ring, rank: ring.reduce_scatter(own[rank], sizes, np.dtype(wire)))
        joined = at_once(made, lambda ring, rank: ring.all_gather_parts(parts[rank], sizes))
    exact, magnitudes = np.sum(own, axis=0, dtype=np.float64), np.sum(np.abs(own), axis=0, dtype=np.float64)
    for rank, part in enumerate(parts):
        here = slice(ends[rank], ends[rank + 1])
        assert part.dtype == np.float32
        assert np.all(np.abs(part - exact[here]) <= 1.01 * len(sizes) * ROUNDING[wire] * magnitudes[here])
    assert all(one.tobytes() == np.concatenate(parts).tobytes() for one in joined)


@pytest.mark.parametrize("num_workers, wire", [(2, np.float32), (3, np.float32), (2, ml_dtypes.bfloat16)])
def test_the_halves_send_the_bytes_of_the_whole(monkeypatch, num_workers, wire):
    """A short wire halves the bytes, if the parts that are gathered afterwards are as short."""
    sent: dict[Neighbours, int] = {}
    send = Neighbours.send_bytes

    def counted(of_ring, view, head):
        sent[of_ring] = sent.get(of_ring, 0) + len(view)
        send(of_ring, view, head)

    monkeypatch.setattr(Neighbours, "send_bytes", counted)
    sizes = [900_000] * num_workers
    own = drawn(num_workers, sum(sizes))
    with rings(num_workers) as (made, _):
        all_reduced(made, own, wire)
        of_sum = [sent.pop(ring._neighbours) for ring in made]
        parts = at_once(made, lambda ring, rank: ring.reduce_scatter(own[rank], sizes, np.dtype(wire)))
        at_once(made, lambda ring, rank: ring.all_gather_parts(parts[rank].astype(wire), sizes))
        of_halves = [sent.pop(ring._neighbours) for ring in made]
    assert of_sum == of_halves == [2 * (num_workers - 1) * np.dtype(wire).itemsize * sizes[0]] * num_workers


@pytest.mark.parametrize("root", range(3))
def test_any_rank_can_be_the_root_of_a_broadcast(root):
    own = drawn(3, 1000)
    with rings(3) as (made, _):
        found = at_once(made, lambda ring, rank: ring.broadcast(own[rank], root=root))
    assert all(one.tobytes() == own[root].tobytes() for one in found)


def test_float64_keeps_its_digits():
    with rings(3) as (made, _):
        own = drawn(3, 1000, np.float64)
        found = all_reduced(made, own, np.float64)
    magnitudes = np.sum(np.abs(own), axis=0)
    assert np.all(np.abs(found[0] - np.sum(own, axis=0)) <= 3 * ROUNDING[np.float64] * magnitudes)


def test_the_inputs_are_not_changed():
    with rings(2) as (made, _):
        own = drawn(2, 100)
        before = [one.copy() for one in own]
        all_reduced(made, own, np.float32)
    for one, same in zip(own, before, strict=True):
        np.testing.assert_array_equal(one, same)


@pytest.fixture
def short_patience(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(neighbours, "PATIENCE_SECONDS", 0.1)


def test_a_worker_that_waits_too_long_raises(short_patience):
    with rings(2, timeout_seconds=0.5) as (made, _):
        with pytest.raises(TimeoutError, match=r"no data for 0\.5 seconds"):
            made[0].all_reduce(drawn(1, 10)[0], np.dtype(np.float32))
        assert isinstance(made[0].failure, TimeoutError)


def together(*acts: Callable[[], object]) -> list[Exception | None]:
    """The error of each call; all calls run at the same time and must end."""
    raised: list = [None] * len(acts)

    def run(index: int) -> None:
        try:
            acts[index]()
        except OSError as error:
            raised[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "a call has not ended"
    return raised


def test_a_worker_that_does_not_read_ends_a_broadcast(short_patience):
    with rings(2, timeout_seconds=0.2) as (made, _):
        (raised,) = together(lambda: made[0].broadcast(np.zeros(20_000_000, np.float32)))
        assert isinstance(raised, TimeoutError)
        assert "the next worker did not read for 0.2 seconds" in str(raised)
        assert made[0].failure is raised


OUT_OF_STEP = {
    "another length": lambda ring: ring.all_reduce(np.zeros(5, np.float32), np.dtype(np.float32), purpose="a"),
    "another dtype": lambda ring: ring.all_reduce(np.zeros(2), np.dtype(np.float64), purpose="a"),
    "another purpose": lambda ring: ring.all_reduce(np.zeros(4, np.float32), np.dtype(np.float32), purpose="b"),
    "another collective": lambda ring: ring.all_gather(np.zeros(2, np.float32), purpose="a"),
}


@pytest.mark.parametrize("other", OUT_OF_STEP.values(), ids=OUT_OF_STEP.keys())
def test_ranks_that_make_different_calls_are_an_error(short_patience, other):
    """Without the check, they would sum each other's bytes."""

    def usual():
        made[0].all_reduce(np.zeros(4, np.float32), np.dtype(np.float32), purpose="a")

    with rings(2, timeout_seconds=0.3) as (made, _):
        raised = together(usual, lambda: other(made[1]))
    assert any(isinstance(error, neighbours.OutOfStep) for error in raised), raised
    assert all(error is not None for error in raised)


def test_a_rank_that_makes_one_call_more_is_an_error(short_patience):
    def reduce(rank: int, times: int) -> None:
        for _ in range(times):
            made[rank].all_gather(np.zeros(1), purpose="move")
        made[rank].all_gather(np.zeros(1), purpose="step")

    with rings(2, timeout_seconds=0.3) as (made, _):
        raised = together(lambda: reduce(0, 1), lambda: reduce(1, 2))
    assert any(isinstance(error, neighbours.OutOfStep) for error in raised), raised


def test_a_waiting_worker_checks_whether_the_others_are_alive(short_patience):
    def gone(rank: int) -> None:
        raise ConnectionError(f"worker:{rank} does not answer")

    with rings(2, check=gone) as (made, _), pytest.raises(ConnectionError, match="worker:1"):
        made[0].all_reduce(drawn(1, 10)[0], np.dtype(np.float32))


def test_checks_grow_with_the_workers_and_not_with_their_square(monkeypatch):
    """Five of six ranks wait. Each checks two ranks at a time, one of them the rank that it waits for."""
    monkeypatch.setattr(neighbours, "PATIENCE_SECONDS", 0.02)
    checked: dict[int, list[int]] = {}

    def wait(rank: int) -> None:
        made[rank]._neighbours._check = checked.setdefault(rank, []).append
        made[rank].all_reduce(np.zeros(10, np.float32), np.dtype(np.float32))

    with rings(6, timeout_seconds=0.5) as (made, _):
        together(*(lambda rank=rank: wait(rank) for rank in range(1, 6)))
    for rank, found in checked.items():
        assert set(found) == set(range(6)) - {rank}, "each other rank is checked now and then"
        assert found.count(rank - 1) >= 5
        assert len(found) < 3 * found.count(rank - 1)


def test_the_frames_of_many_workers_are_as_long_as_those_of_two():
    """If chunks shrank with the number of workers, latency would decide how long they take."""
    lengths = []
    with rings(8) as (made, _):
        heads = made[0]._neighbours._head
        made[0]._neighbours._head = lambda vector: lengths.append(vector.nbytes) or heads(vector)
        own = drawn(8, 2_100_000)
        found = all_reduced(made, own, np.float32)
    np.testing.assert_allclose(found[0], np.sum(own, axis=0), rtol=1e-3, atol=1e-5)
    assert max(lengths) > 2**20


@pytest.mark.parametrize("length, rounds", [(2048, 7), (2049, 14)])
def test_a_short_sum_takes_one_round_a_worker(length, rounds):
    """Longer sums take two rounds a worker, and send less."""
    frames = []
    with rings(8) as (made, _):
        sender = made[3]._neighbours
        send = sender.send_bytes
        sender.send_bytes = lambda view, head: frames.append(head) or send(view, head)
        own = drawn(8, length)
        found = all_reduced(made, own, np.float32)
    assert len(frames) == rounds
    np.testing.assert_allclose(found[0], np.sum(own, axis=0), rtol=1e-3, atol=1e-5)
    assert all(one.tobytes() == found[0].tobytes() for one in found)


def received(end: socket.socket, count: int) -> bytes:
    end.settimeout(5.0)
    found = b""
    while len(found) < count:
        found += end.recv(count - len(found))
    return found


def test_a_piece_of_a_chunk_is_sent_on_before_the_next_one_arrives():
    """Otherwise each hop of a ring would wait for whole chunks."""
    vector, arrived = np.arange(2**19, dtype=np.float32), 600 * 1024
    ends = [connection() for _ in range(3)]
    (of_root, after_root), (before_middle, into_middle), (of_middle, after_middle) = ends
    options = {"timeout_seconds": 20.0, "check": lambda rank: None}
    root = TcpRing(Neighbours(0, 3, of_root, of_root, **options))
    middle = TcpRing(Neighbours(1, 3, of_middle, into_middle, **options))
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for pair in ends:
            opened.callback(lambda pair=pair: [end.close() for end in pair])
        calls = [pool.submit(ring.broadcast, value) for ring, value in ((root, vector), (middle, 0 * vector))]
        sent = received(after_root, arrived)
        before_middle.sendall(sent)
        assert received(after_middle, tcp_ring._PASSED_BYTES) == sent[: tcp_ring._PASSED_BYTES]
        before_middle.sendall(received(after_root, vector.nbytes + neighbours.HEAD.size - arrived))
        received(after_middle, vector.nbytes + neighbours.HEAD.size - tcp_ring._PASSED_BYTES)
        assert all(np.array_equal(call.result(20), vector) for call in calls)


@pytest.mark.parametrize("length", first_quick([10, 100_000]), ids=["sent at once", "sent by a thread"])
def test_both_neighbours_name_the_worker_that_was_lost(monkeypatch, length):
    # The longest wait for the sending thread.
    monkeypatch.setattr(neighbours, "PATIENCE_SECONDS", 0.5)
    members = [Member("worker", index, f"host{index}:1") for index in range(3)]
    lost_by_rank = {}

    def exchange(ring, rank):
        with pytest.raises(ConnectionError) as raised:
            for _ in range(9):
                ring.all_reduce(np.ones(length, np.float32), np.dtype(np.float32))
        lost_by_rank[rank] = str(peer_lost(raised.value, Ring(members, rank, RingOptions()), "step 7"))

    with rings(3) as (made, connections):
        for end in (connections[1][0], connections[0][1]):
            end.close()
        at_once([made[0], made[2]], lambda ring, index: exchange(ring, 2 * index))
    expected = "worker:1 (host1:1) was lost at step 7: restart all workers, they resume from the last checkpoint"
    assert lost_by_rank == {0: expected, 2: expected}


def test_both_neighbours_are_named_if_both_have_ended():
    """One of them ended because the other one did; no other rank can tell which was first."""
    with rings(3) as (made, connections):
        for end in (connections[1][0], connections[0][1], connections[2][0], connections[1][1]):
            end.close()
        members = [Member("worker", index, f"host{index}:1") for index in range(3)]
        with pytest.raises(ConnectionError) as raised:
            made[0].all_reduce(np.ones(3_000_000, np.float32), np.dtype(np.float32))
        line = str(peer_lost(raised.value, Ring(members, 0, RingOptions()), "step 7"))
    assert line.startswith("worker:1 (host1:1), worker:2 (host2:1) were lost at step 7: restart all workers")


def test_a_closed_connection_raises():
    with rings(2) as (made, connections):
        connections[1][0].close()
        with pytest.raises(ConnectionError):
            made[0].all_reduce(drawn(1, 10)[0], np.dtype(np.float32))
        assert isinstance(made[0].failure, ConnectionError)
