"""Keys and values on servers: equal to the bit, spread evenly, only rows sent, the same for every client."""

import contextlib
import functools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from launch.membership.free_ports import free_addresses
from models.networks.registry import build_network
from strategies.cluster import CHIEF, SERVER, WORKER, Member
from strategies.servers.own.connections.group import Group
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.own.key_value import KeyValueStore, pieces_of
from strategies.servers.own.server import Server
from strategies.servers.wire import Refused
from tests.towers.user_errors import refused
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD, Momentum, UpdateRule, everything

LIMIT_SECONDS = 30
# Exact in float32, in which servers get the rate.
RATE = 0.125
# Two servers that hold nothing else get 100 and 101 of the embedding's rows.
EMBEDDING = (201, 1000)
# Upper limit of the ratio of the fullest server's bytes to the mean.
LEVEL = 1.1


class LocalServers:
    """Servers in threads of this process, and the clients made so far."""

    def __init__(self, rule: UpdateRule, count: int, secret: str):
        addresses = free_addresses(count)
        self.members = [Member(SERVER, index, address) for index, address in enumerate(addresses)]
        self._secret = secret
        servers = [
            Server(member, StoreHandlers(rule, Clipping()), settings={}, secret=secret) for member in self.members
        ]
        self._threads = [
            threading.Thread(target=server.serve, args=(LIMIT_SECONDS,), daemon=True) for server in servers
        ]
        for thread in self._threads:
            thread.start()
        self.groups: list[Group] = []
        self.first = self.client(CHIEF)

    def client(self, role: str = WORKER, **options) -> KeyValueStore:
        """A new client; its connections are added to `groups`."""
        seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
        this = Member(role, len(self.groups))
        group = Group.connected(self.members, this, settings={}, secret=self._secret, **seconds)
        self.groups.append(group)
        return KeyValueStore(group, **options)

    def end(self) -> None:
        self.groups[0].ask_all("end", how="done")
        for group in self.groups:
            group.close()
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive()

    def sent_bytes(self) -> list[int]:
        """Bytes that the first client has sent to each server."""
        return [connection.sent_bytes for connection in self.groups[0].connections]

    def held_bytes(self) -> list[int]:
        """Bytes that each server holds, as it reports."""
        held = []
        for server, (reply, _) in enumerate(self.groups[0].ask_all("keys")):
            replies = [self.groups[0].ask(server, "pull", key=key) for key in reply["about"]]
            held.append(sum(piece.nbytes for _, (piece,) in replies))
        return held


@contextlib.contextmanager
def servers(rule: UpdateRule, count: int, secret: str = "") -> Iterator[LocalServers]:
    started = LocalServers(rule, count, secret)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def sgd():
    with servers(SGD(), 2) as started:
        yield started


def drawn(*shape: int, dtype=np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0), EMBEDDING, (2, 40_000), (3, 3, 64, 64)], ids=str)
def test_a_pull_returns_the_initial_value(sgd, shape, dtype):
    key, value = f"{dtype} {shape}", drawn(*shape, dtype=dtype)
    sgd.first.init(key, value)
    assert_same_bits(sgd.first.pull([key])[key], value)
    assert_same_bits(sgd.client().pull([key])[key], value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), EMBEDDING], ids=str)
def test_a_push_makes_one_update_by_the_rule(sgd, shape, dtype):
    key, value = f"pushed {dtype} {shape}", drawn(*shape, dtype=dtype)
    gradient = drawn(*shape, dtype=dtype, seed=1)
    sgd.first.init(key, value)
    sgd.client().push(key, gradient, RATE)
    expected = value.astype(np.float64) - RATE * gradient.astype(np.float64)
    found = sgd.first.pull([key])[key]
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * np.finfo(dtype).eps)


def test_a_bfloat16_gradient_is_cast_to_the_values_dtype(sgd):
    value = drawn(*EMBEDDING)
    gradient = tf.cast(drawn(*EMBEDDING, seed=1), tf.bfloat16)
    indices, rows = [3, 150], tf.cast(drawn(2, EMBEDDING[1], seed=2), tf.bfloat16)
    sgd.first.init("short", value)
    sgd.first.push("short", gradient, 0.5)
    sgd.first.push("short", gradient.numpy(), 0.5)
    sgd.first.push("short", tf.IndexedSlices(rows, indices), 0.5)
    expected = value - np.float32(0.5) * gradient.numpy().astype(np.float32)
    expected -= np.float32(0.5) * gradient.numpy().astype(np.float32)
    expected[indices] -= np.float32(0.5) * rows.numpy().astype(np.float32)
    assert_same_bits(sgd.first.pull(["short"])["short"], expected)


@functools.cache
def shapes_of(network: str) -> list[tuple[int, ...]]:
    model = build_network(network, image_shape=(32, 32, 3), num_classes=10)
    return [tuple(variable.shape) for variable in model.trainable_variables]


def imagenet_vgg16() -> list[tuple[int, ...]]:
    """138 million parameters, three quarters of them in one matrix."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6]
    kernels = [(3, 3, *pair) for pair in zip(widths, widths[1:], strict=False)]
    kernels += [(25_088, 4096), (4096, 4096), (4096, 1000)]
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


MODELS = {
    "alexnet": lambda: shapes_of("alexnet"),
    "vgg16": lambda: shapes_of("vgg16"),
    "resnet20": lambda: shapes_of("resnet20"),
    "VGG-16 for ImageNet": imagenet_vgg16,
    "several equal kernels with narrow rows": lambda: [(3, 3, 64, 64)] * 5,
    "several equal wide rows": lambda: [(1, 16_384)] * 12,
    "only biases": lambda: [(1000,)] * 12,
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_servers_hold_about_the_same(model, count):
    held = [0] * count
    for shape in MODELS[model]():
        for server, piece in pieces_of(shape, 4, held).items():
            held[server] += 4 * (piece.stop - piece.start)
    assert sum(held) == 4 * sum(np.prod(shape, dtype=np.int64) for shape in MODELS[model]())
    assert max(held) <= LEVEL * sum(held) / count, held


@pytest.mark.parametrize("held", [(0, 0, 0), (10, 5_000_000, 100_000), (7, 7, 90_000_000)], ids=str)
@pytest.mark.parametrize("shape", [(5,), (40_000,), (1000, 64), (17, 4096), (2, 100_000)], ids=str)
def test_pieces_form_the_whole_value_and_cut_no_short_row(shape, held):
    pieces = list(pieces_of(shape, 4, held).values())
    assert (pieces[0].start, pieces[-1].stop) == (0, np.prod(shape))
    assert all(before.stop == after.start for before, after in zip(pieces, pieces[1:], strict=False))
    assert all(piece.start < piece.stop for piece in pieces)
    if shape in [(1000, 64), (17, 4096)]:
        assert all(piece.start % shape[1] == 0 for piece in pieces)


def test_two_clients_fill_the_servers_as_one_client_does():
    shapes = [(300,), (64, 1000), (100,), (64,), (3, 3, 64, 64), (200,), (1000, 33)]
    with servers(SGD(), 3) as started:
        clients = started.first, started.client()
        for index, shape in enumerate(shapes):
            clients[index % 2].init(f"value{index}", drawn(*shape))
        held = started.held_bytes()
    expected = [0] * 3
    for shape in shapes:
        for server, piece in pieces_of(shape, 4, expected).items():
            expected[server] += 4 * (piece.stop - piece.start)
    assert held == expected
    assert max(held) <= LEVEL * sum(held) / 3


def test_only_the_used_rows_are_sent(sgd):
    """Each server gets only its rows, with a small header."""
    value, indices, rows = drawn(*EMBEDDING), [150, 2, 180, 150], drawn(4, EMBEDDING[1], seed=1)
    sgd.first.init("embedding", value)
    before = sgd.sent_bytes()
    sgd.first.push("embedding", tf.IndexedSlices(rows, indices, EMBEDDING), RATE)
    sent = [after - then for after, then in zip(sgd.sent_bytes(), before, strict=True)]
    row_bytes = rows[0].nbytes + 8
    # Row 150 is sent once, with the sum of its two gradients.
    for found, count in zip(sent, [1, 2], strict=True):
        assert count * row_bytes < found < count * row_bytes + 300
    expected = value.astype(np.float64)
    np.subtract.at(expected, indices, RATE * rows.astype(np.float64))
    np.testing.assert_allclose(sgd.first.pull(["embedding"])["embedding"], expected, rtol=0, atol=1e-6)


def test_rows_that_a_cut_divides_are_pushed_whole(sgd):
    value, rows = drawn(3, 40_000), drawn(1, 40_000, seed=1)
    sgd.first.init("wide", value)
    sgd.first.push("wide", tf.IndexedSlices(rows, [1]), 1.0)
    assert_same_bits(sgd.first.pull(["wide"])["wide"], value - np.float32([[0], [1], [0]]) * rows)


def test_unused_rows_follow_the_dense_rule():
    """Momentum also moves rows without a gradient, even on a server that got no row."""
    sparse, dense = drawn(*EMBEDDING), drawn(*EMBEDDING)
    steps = [tf.IndexedSlices(drawn(1, EMBEDDING[1], seed=row), [row], EMBEDDING) for row in (3, 190, 3)]
    with servers(Momentum(momentum=0.9), 2) as started:
        started.first.init("sparse", sparse)
        started.first.init("dense", dense)
        for step in steps:
            started.first.push("sparse", step, RATE)
            started.first.push("dense", tf.convert_to_tensor(step), RATE)
        found = started.first.pull(["sparse", "dense"])
    assert_same_bits(found["sparse"], found["dense"])
    assert np.any(found["sparse"][190] != sparse[190])


def test_weight_decay_applies_to_the_chosen_keys():
    kernel, bias = drawn(201, 100), drawn(100)
    with servers(SGD(weight_decay=0.5), 2) as started:
        started.first.init("kernel", kernel)
        started.first.init("bias", bias)
        started.client(decays=everything).init("decayed bias", bias)
        for key, value in [("kernel", kernel), ("bias", bias), ("decayed bias", bias)]:
            started.first.push(key, np.zeros_like(value), RATE)
        found = started.first.pull(["kernel", "bias", "decayed bias"])
    assert_same_bits(found["bias"], bias)
    np.testing.assert_allclose(found["kernel"], kernel * (1 - 0.5 * RATE), rtol=1e-6)
    np.testing.assert_allclose(found["decayed bias"], bias * (1 - 0.5 * RATE), rtol=1e-6)


def test_a_push_returns_its_staleness(sgd):
    sgd.first.init("stale", drawn(*EMBEDDING))
    gradient, other = drawn(*EMBEDDING, seed=1), sgd.client()
    assert sgd.first.push("stale", gradient, RATE) == 0
    sgd.first.pull(["stale"])
    assert sgd.first.push("stale", gradient, RATE) == 0
    assert [other.push("stale", gradient, RATE) for _ in range(3)] == [0, 0, 0]
    assert sgd.first.push("stale", gradient, RATE) == 4
    other.pull(["stale"])
    assert other.push("stale", gradient, RATE) == 0


def test_wrong_arguments_are_refused(sgd):
    client = sgd.client()
    sgd.first.init("refused", drawn(*EMBEDDING))
    with refused("init of 'numbers'", "int64", "float32"):
        client.init("numbers", np.arange(3))
    with refused("init of 'refused'", "float32 [201, 1000]", "push"):
        client.init("refused", drawn(3))
    with refused("'nowhere'", "init it first", "refused"):
        client.pull(["refused", "nowhere"])
    with refused("'nowhere'", "init it first"):
        client.push("nowhere", drawn(3), RATE)
    with refused("push of 'refused'", "[201]", "float32 [201, 1000]"):
        client.push("refused", drawn(201), RATE)
    with refused("push of 'refused'", "int32", "bfloat16"):
        client.push("refused", np.zeros(EMBEDDING, np.int32), RATE)
    with refused("push of 'refused'", "[201, 7]", "float32 [201, 1000]"):
        client.push("refused", tf.IndexedSlices(drawn(1, 7), [0]), RATE)
    for row in (-1, 201):
        with refused("push of 'refused'", f"row {row}", "0 to 200"):
            client.push("refused", tf.IndexedSlices(drawn(1, 1000), [row]), RATE)
    assert_same_bits(client.pull(["refused"])["refused"], drawn(*EMBEDDING))


def test_a_key_is_unknown_until_all_its_pieces_are_there(sgd):
    about = {"shape": [2, 3], "dtype": "float32", "begin": 0, "end": 3}
    sgd.groups[0].ask(0, "init", [drawn(3)], key="half", about=about)
    with refused("'half'", "init it first"):
        sgd.client().pull(["half"])


def test_connections_work_after_a_refusal(sgd):
    """Both servers refuse, and the next replies belong to the next request."""
    with pytest.raises(Refused):
        sgd.groups[0].ask_all("pull", key="nowhere")
    assert all("about" in reply for reply, _ in sgd.groups[0].ask_all("keys"))


@pytest.mark.parametrize("secret", ["Schlüssel", "\udcff"], ids=ascii)
def test_a_secret_may_be_any_text(secret):
    with servers(SGD(), 1, secret) as started:
        assert started.first.pull([]) == {}
