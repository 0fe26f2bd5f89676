"""ZeRO over two workers in threads: one device's numbers, slots on their owners, and the bytes of a plain ring."""

import contextlib
import weakref

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from strategies import pieces
from strategies.pieces import parts_of, pieces_of
from strategies.ring.exchange.collectives import HostExchange, WireOptions
from strategies.ring.placements import ring_placement
from strategies.ring.zero.remote_variable import RemoteVariable
from strategies.ring.zero.zero_slots import SharedParts, bring, release
from tests.strategies.ring.threads import WorkersInThreads, at_once, rings
from tests.strategies.ring.wire_bytes import bytes_of_a_step
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus
from tests.towers.table_and_matrices import task, trained
from tests.towers.tiny_tasks import TinyTask, assert_close, parameters_of, stacked, vectors
from towers.options import StepOptions
from towers.tower import ModelVariables
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead
from towers.updates.rules import Adam, Momentum, Muon

STEPS = 5
ROW_BYTES = 800 * 4  # of the kernel in `wide_task`
RULES = {
    "adamw": Adam(weight_decay=0.1),
    "muon": Muon(momentum=0.9),
    "lookahead": Lookahead(rule=Momentum(momentum=0.9), num_updates=STEPS, every=2),
}
CASES = [
    (1, "adamw", Clipping(global_norm=0.1)),
    (1, "muon", Clipping()),
    (2, "lookahead", Clipping(norm=0.05)),
]


@contextlib.contextmanager
def workers(rule, *, zero: int = 0, devices=None, task=task, num_workers: int = 2, **options):
    """Context manager: workers that have not trained yet. TensorFlow has threads for two waiting workers."""
    with rings(num_workers) as (made, _):
        yield WorkersInThreads(made, task(), StepOptions(rule=rule, **options), zero=zero, devices=devices)


def values_of(engine) -> dict[str, np.ndarray]:
    return {name: variable.numpy() for name, variable in engine.parameters().items()}


def assert_same_bits(engines) -> None:
    first, *others = [values_of(engine) for engine in engines]
    for other in others:
        assert {name: value.tobytes() for name, value in first.items()} == {
            name: value.tobytes() for name, value in other.items()
        }


@pytest.mark.parametrize("zero, rule, clipping", first_quick(CASES), ids=str)
def test_it_equals_one_device_on_all_workers(zero, rule, clipping):
    with workers(RULES[rule], zero=zero, clipping=clipping) as found:
        found.train(STEPS)
    expected = trained(cpus(1), RULES[rule], steps=STEPS, clipping=clipping)
    assert_close(values_of(found.engines[0]), parameters_of(expected))
    assert_same_bits(found.engines)


def slot_bytes(engine, kind) -> int:
    slots = [variable for variable, _ in engine.placement.slots_with_owners if isinstance(variable, kind)]
    return sum(variable.dtype.size * variable.shape.num_elements() for variable in slots)


@pytest.fixture(scope="module")
def of_zero_1():
    """Two workers with Adam."""
    with workers(Adam(), zero=1) as found:
        yield found


def test_each_worker_has_half_of_the_optimizer_state(of_zero_1):
    found = of_zero_1
    held = [slot_bytes(engine, tf.Variable) for engine in found.engines]
    elsewhere = [slot_bytes(engine, RemoteVariable) for engine in found.engines]
    total = 2 * sum(value.nbytes for value in values_of(found.engines[0]).values())
    assert sum(held) == total
    assert [here + there for here, there in zip(held, elsewhere, strict=True)] == [total] * 2
    assert max(held) <= 1.1 * total / 2
    assert (
        ", ".join(f"{count:,} on worker {rank}" for rank, count in enumerate(held)) in found.engines[0].notices[-1]
    )


@pytest.mark.parametrize("zero", first_quick([2, 1]))
def test_a_step_sends_the_bytes_of_a_plain_ring(monkeypatch, zero):
    plain, found = (bytes_of_a_step(level, wide_task, monkeypatch) for level in (0, zero))
    assert plain > 4 * 10_000, "most of it is parameters"
    assert 0.97 * plain < found < 1.03 * plain


class CountedExchange:
    """Stands in for the exchange of two workers with the same gradients: each gets its own part of them."""

    num_workers, rank, options = 2, 0, WireOptions(bytes_per_pack=600)

    def __init__(self):
        self.num_sent = 0

    def reduce_scatter(self, vector, sizes, purpose=""):
        self.num_sent += 1
        return vector[: sizes[0]]


@pytest.mark.parametrize("zero, sent", [(1, [0, 0, 1]), (2, [1, 2, 2])], ids=["ZeRO 1", "ZeRO 2"])
def test_gradients_are_sent_once_a_step_or_after_each_microbatch(zero, sent):
    exchange, model = CountedExchange(), wide_task().build_model()
    owners = ring_placement(cpus(1, zero=zero), exchange)(ModelVariables.of(model), Adam()).owners
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    kept, counts = [], []
    for _ in range(2):
        kept.append(owners.keep([gradients]))
        counts.append(exchange.num_sent)
    summed = owners.meet(owners.add(kept))
    counts.append(exchange.num_sent)
    assert [count / (max(counts) / max(sent)) for count in counts] == sent
    assert all(np.all(part == 2) for part in summed)
    assert 0.4 < sum(map(np.size, summed)) / model.count_params() < 0.6, "this worker's part"


def wide_task() -> TinyTask:
    def build():
        return stacked(
            (4,), layers.Dense(800, name="wide"), layers.Dense(16, name="deep"), layers.Dense(3, name="logits")
        )

    return TinyTask(build=build, examples=vectors(8))


@pytest.mark.full
def test_a_worker_may_own_nothing():
    """Muon needs whole matrices, and there is one."""

    def one_matrix() -> TinyTask:
        return TinyTask(
            build=lambda: stacked((4,), layers.Dense(3, use_bias=False, name="only")), examples=vectors(8)
        )

    for clipping in (Clipping(norm=0.01), Clipping(global_norm=0.01)):
        with workers(Muon(), zero=2, task=one_matrix, clipping=clipping) as found:
            found.train(2)
        assert_same_bits(found.engines)
        assert {part.shard.owner for part in found.engines[0].placement.parts} == {0}


@pytest.mark.full
def test_a_skipped_step_lowers_the_loss_scale_on_all_workers_alike():
    counters = []
    for zero in (0, 1):
        with workers(Adam(), zero=zero, task=large_numbers, precision="float16", on_nan="skip") as found:
            found.train(3)
        of_workers = [
            {name: float(variable) for name, variable in engine.counters.variables().items()}
            for engine in found.engines
        ]
        assert of_workers[0] == of_workers[1]
        assert_same_bits(found.engines)
        counters.append(of_workers[0])
    assert counters[0] == counters[1]
    assert counters[0]["skipped"] > 0


def large_numbers() -> TinyTask:
    """In float16 the scaled gradients overflow at first."""
    examples = vectors(8)
    return TinyTask(
        build=lambda: stacked((4,), layers.Dense(3, name="logits")),
        examples=examples._replace(features=300 * examples.features),
    )


def test_slots_travel_to_the_writer_and_back(of_zero_1):
    found = of_zero_1
    found.train(1)
    slots = [engine.placement.slots_with_owners for engine in found.engines]
    at_once(found.hosts, lambda host, rank: bring(host, slots[rank]))
    for index, (variable, owner) in enumerate(slots[0]):
        assert variable.numpy().tobytes() == slots[owner][index][0].numpy().tobytes()
    for variable, owner in slots[1]:
        if owner != 1:
            assert not variable.is_here, "only the writer keeps what arrives"
    release(slots[0])
    for variable, owner in slots[0]:
        if owner != 0:
            with pytest.raises(RuntimeError, match="call collect"):
                variable.numpy()


@pytest.mark.full
def test_others_values_are_written_and_freed_one_piece_at_a_time(monkeypatch):
    """Rank 0 never holds more of them than the piece that it receives and the piece that it has just used."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", ROW_BYTES)
    alive, peak = [0], [0]
    sent = HostExchange.sent

    def counted(host, *arguments, **named):
        value = sent(host, *arguments, **named)
        if host.rank == 0:
            alive[0] += value.nbytes
            weakref.finalize(value, lambda size=value.nbytes: alive.__setitem__(0, alive[0] - size))
            peak[0] = max(peak[0], alive[0])
        return value

    monkeypatch.setattr(HostExchange, "sent", counted)
    with workers(Adam(), zero=1, task=wide_task) as found:
        found.train(1)
        saved: dict[tuple, np.ndarray] = {}

        def stream(host, rank):
            owned = found.engines[rank].placement.slots_with_owners
            listed = pieces_of(found.engines[rank].slots())
            for piece, value in zip(listed, SharedParts(host, owned).values(listed), strict=True):
                if rank == 0:
                    saved[piece.path, piece.begin] = np.array(value)
                else:
                    assert value is None

        at_once(found.hosts, stream)
        total = sum(value.nbytes for value in saved.values())
        assert total == 2 * sum(value.nbytes for value in values_of(found.engines[0]).values())
        assert peak[0] <= 2 * ROW_BYTES < total / 10
        assert alive[0] <= ROW_BYTES
        before = [slots_of(engine) for engine in found.engines]
        for engine in found.engines:
            for variable, _ in engine.placement.slots_with_owners:
                if isinstance(variable, tf.Variable):
                    variable.assign(-tf.ones_like(variable))

        def share(host, rank):
            parts = parts_of(found.engines[rank].slots())
            shared = SharedParts(host, found.engines[rank].placement.slots_with_owners)

            def read(piece):
                inside = [(begin, value) for (path, begin), value in saved.items() if path == piece.path]
                whole = np.empty(piece.whole, np.float32)
                for begin, value in inside:
                    whole[tuple(slice(*span) for span in spans(begin, value.shape))] = value
                return tf.constant(whole[tuple(slice(*span) for span in spans(piece.begin, piece.shape))])

            if rank == 0:
                for part in parts:
                    shared.restore(part, read)
            shared.share(parts, read if rank == 0 else None)

        at_once(found.hosts, share)
        for engine, wanted in zip(found.engines, before, strict=True):
            assert slots_of(engine) == wanted


def spans(begin, shape):
    return [(start, start + length) for start, length in zip(begin, shape, strict=True)]


def slots_of(engine) -> list[bytes]:
    """The bits of the slots that this worker has."""
    own = [variable for variable, _ in engine.placement.slots_with_owners if isinstance(variable, tf.Variable)]
    return [variable.numpy().tobytes() for variable in own]
