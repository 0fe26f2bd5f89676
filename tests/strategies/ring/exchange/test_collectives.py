"""Exchanges between 2 and 3 real processes: the results on each worker, compared with numpy."""

import itertools
import pickle
import signal

import numpy as np
import pytest
import tensorflow as tf

from strategies.ring.exchange.collectives import HostExchange, WireOptions, WorkerExchange
from tests.launch.workers import Workers
from tests.strategies.ring import exchange_program as program
from tests.towers.user_errors import refused

pytestmark = pytest.mark.timeout(200)

LIMIT_SECONDS = 150
# Time to start threads on a busy machine.
MARGIN_SECONDS = 10.0
# Half the distance between neighbouring numbers above 1.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


# How a collective ends on a timeout: ours raises; TensorFlow 2.21 raises, or crashes while it cleans up.
WAITED = {"tcp": "TimeoutError", "tensorflow": "DeadlineExceededError"}
ENDS_AFTER_WAITING = {"tcp": (0,), "tensorflow": (0, -signal.SIGABRT, -signal.SIGSEGV)}


@pytest.fixture(
    scope="module",
    params=[
        # The quick tests have conformance rows for both ways.
        pytest.param((count, way), id=f"{count} by {way}", marks=[pytest.mark.full])
        for count, way in [(2, "tcp"), (3, "tcp"), (3, "tensorflow")]
    ],
)
def ended(request, tmp_path_factory):
    """The folder of the pickles, how each worker ended, and the way of exchange, 'tcp' or 'tensorflow'."""
    folder = tmp_path_factory.mktemp("exchange")
    num_workers, way = request.param
    commands = [["-m", "tests.strategies.ring.exchange_program", str(folder), way]] * num_workers
    with Workers(commands) as workers:
        return folder, workers.ends(LIMIT_SECONDS), way


@pytest.fixture(scope="module")
def found(ended):
    """Each worker's results by name, by rank."""
    folder, ends, way = ended
    for end in ends:
        assert end.code in ENDS_AFTER_WAITING[way], end.err
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(len(ends))]


def same_bits(values, others) -> bool:
    return [(v.dtype, v.shape, v.tobytes()) for v in values] == [(v.dtype, v.shape, v.tobytes()) for v in others]


def sums_in_any_order(values) -> list[np.ndarray]:
    """The sum in the values' own precision, for each order of adding: a ring uses several orders."""
    return [sum(order[1:], start=order[0]) for order in itertools.permutations(values)]


def assert_sum(value, values) -> None:
    """Asserts that each element is the sum of the values in some order, to the last bit."""
    assert (value.dtype, value.shape) == (values[0].dtype, values[0].shape)
    orders = sums_in_any_order(values)
    assert np.all(np.any([value == order for order in orders], axis=0))


@pytest.mark.parametrize("bytes_per_pack", program.BYTES_PER_PACK)
def test_dense_gradients(found, bytes_per_pack):
    own = [program.gradients_of(rank) for rank in range(len(found))]
    for index, value in enumerate(found[0]["dense"][bytes_per_pack]):
        assert_sum(value, [gradients[index] for gradients in own])


@pytest.mark.parametrize("bytes_per_pack", program.BYTES_PER_PACK)
def test_dense_gradients_have_the_same_bits_everywhere(found, bytes_per_pack):
    first, *others = (worker["dense"][bytes_per_pack] for worker in found)
    assert all(same_bits(first, other) for other in others)


def errors(found, precision) -> np.ndarray:
    """Error of each element, divided by the sum of the magnitudes."""
    own = np.array([program.rounded_of(rank) for rank in range(len(found))], np.float64)
    value, _ = found[0]["rounded"][precision]
    assert value.dtype == np.float32
    return np.abs(value - own.sum(0)) / np.abs(own).sum(0)


@pytest.mark.parametrize("precision", ROUNDING)
def test_rounding_on_a_short_wire_is_bounded(found, precision):
    """The largest error is at most num_workers units of rounding, and more than half of this bound."""
    worst = errors(found, precision).max()
    assert worst <= len(found) * ROUNDING[precision]
    assert worst > len(found) * ROUNDING[precision] / 2


@pytest.mark.parametrize("precision", ROUNDING)
def test_a_short_wire_gives_the_same_bits_everywhere(found, precision):
    first, *others = (worker["rounded"][precision] for worker in found)
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("precision", ROUNDING)
def test_a_short_wire_rounds_only_float32(found, precision):
    _, value = found[0]["rounded"][precision]
    assert_sum(value, [program.rounded_of(rank).astype(np.float64) for rank in range(len(found))])


def test_sparse_gradients_are_gathered(found):
    """Every worker gets all rows in the order of the ranks; one worker has no rows."""
    rows = [program.rows_of(rank) for rank in range(len(found))]
    values, indices = (np.concatenate(part) for part in zip(*rows, strict=True))
    for worker in found:
        found_values, found_indices, first, last = worker["sparse"]
        np.testing.assert_array_equal(found_values, values)
        np.testing.assert_array_equal(found_indices, indices)
        assert (first, last) == (len(found), 2 * len(found)), "dense gradients of the same call"


def test_sparse_gradients_are_the_dense_sum(found):
    expected = np.zeros(program.DENSE_SHAPE)
    for values, indices in (program.rows_of(rank) for rank in range(len(found))):
        np.add.at(expected, indices, values)
    total = np.zeros(program.DENSE_SHAPE)
    found_values, found_indices, *_ = found[0]["sparse"]
    np.add.at(total, found_indices, found_values)
    np.testing.assert_array_equal(total, expected)
    assert expected.any()


def test_sums_of_other_tensors_keep_their_precision(found):
    """Only gradients are rounded to the wire precision."""
    first, counts, *others = found[0]["mixed"]
    own = [program.gradients_of(rank) for rank in range(len(found))]
    for index, value in enumerate([first, *others]):
        assert_sum(value, [gradients[index] for gradients in own])
    ranks = range(len(found))
    np.testing.assert_array_equal(counts, [sum(rank + 2**24 for rank in ranks), len(found)])
    assert all(same_bits(found[0]["mixed"], worker["mixed"]) for worker in found)


@pytest.mark.parametrize("dtype", program.numbers_of(0))
def test_the_host_gathers_by_rank_to_the_bit(found, dtype):
    """Each purpose is used three times, with different numbers."""
    for turn in range(3):
        own = [program.numbers_of(rank)[dtype][turn:][:3] for rank in range(len(found))]
        for worker in found:
            assert same_bits([worker["host"][dtype][turn]], [np.stack(own)])


def test_broadcast_gives_all_workers_the_variables_of_rank_0_to_the_bit(found):
    for worker in found:
        assert same_bits(worker["given"], program.variables_of(0))


def test_the_halves_of_a_sum(found):
    """Each worker gets its part of the sum, and all get the joined parts."""
    own = [program.rounded_of(rank) for rank in range(len(found))]
    joined = np.concatenate([part for part, _ in (worker["halves"] for worker in found)])
    assert_sum(joined, own)
    for worker, size in zip(found, program.sizes_of_parts(len(found)), strict=True):
        part, gathered = worker["halves"]
        assert len(part) == size
        assert same_bits([gathered], [joined])


def test_any_worker_can_be_the_root_of_a_broadcast(found):
    expected = [program.variables_of(index % len(found))[index] for index in range(5)]
    for worker in found:
        assert same_bits(worker["given_in_turn"], expected)


def test_a_collective_without_one_worker_times_out(ended):
    """The last worker never joins; all others report the timeout."""
    folder, (*waiting, _), way = ended
    for rank, end in enumerate(waiting):
        assert way == "tcp" or "DEADLINE_EXCEEDED" in end.err
        if end.code == 0:
            error, seconds = pickle.loads((folder / f"{rank}.waited").read_bytes())
            assert error == WAITED[way]
            assert 0.5 * program.LATE_SECONDS < seconds < program.LATE_SECONDS + MARGIN_SECONDS


def test_one_worker_exchanges_nothing():
    """Nothing is sent, so no connection is needed."""
    exchange = WorkerExchange(1, 0, WireOptions(precision="bfloat16"), channel=1)
    values = [np.float32([1.1]), np.int64([2])]
    assert exchange.sum(values) == values
    assert exchange.sum_gradients(values) == values
    host = HostExchange(1, 0, WireOptions(), channel=2)
    assert host.gather("x", [1, 2], np.int64).tolist() == [[1, 2]]
    host.broadcast([None])


class _CountedRing:
    """Stands in for the connections of many workers, whose gradients are all zero."""

    def __init__(self):
        self.packs: list[int] = []

    def all_reduce(self, own, wire, *, purpose):
        self.packs.append(own.nbytes)
        return own


MEBIBYTE = 2**20


@pytest.mark.parametrize(
    "num_workers, options, packs",
    [(2, {}, [4] * 15), (8, {}, [4] * 15), (64, {}, [32, 28]), (64, {"bytes_per_pack": MEBIBYTE}, [1] * 60)],
    ids=["two", "eight", "many", "as asked"],
)
def test_many_workers_send_larger_packs(num_workers, options, packs):
    """A pack takes two rounds a worker: with packs of one size, 64 workers would mostly wait for latency."""
    ring = _CountedRing()
    exchange = WorkerExchange(num_workers, 0, WireOptions(**options), channel=1, tcp=ring)
    gradients = [tf.ones([MEBIBYTE // 4]) for _ in range(60)]
    tf.function(exchange.sum_gradients, autograph=False)(gradients)
    assert sorted(ring.packs, reverse=True) == [count * MEBIBYTE for count in packs]


@pytest.mark.parametrize(
    "wrong, part",
    [
        ({"bytes_per_pack": 0}, "bytes_per_pack=0"),
        ({"precision": "fp8"}, "wire_precision='fp8'"),
        ({"algorithm": "tree"}, "all_reduce='tree'"),
        ({"timeout_seconds": 0.0}, "collective_timeout_seconds=0"),
        ({"timeout_seconds": float("nan")}, "collective_timeout_seconds=nan"),
    ],
)
def test_invalid_wire_options_are_refused(wrong, part):
    with refused(part):
        WireOptions(**wrong)
