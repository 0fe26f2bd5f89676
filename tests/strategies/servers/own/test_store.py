"""The vectors of a server: each update is applied once and by the rule, also when several arrive at once."""

import itertools

import numpy as np
import pytest

from strategies.servers.own.store import Store, Vector
from strategies.servers.piece_update import check_rule
from strategies.servers.wire import Refused
from tests.strategies.servers.at_once import at_once
from tests.towers.user_errors import refused
from towers.updates.rules import SGD, Adam, Momentum, Muon, everything

DECAY = 0.125
RULES = {
    "sgd": SGD(),
    "sgd with decay": SGD(weight_decay=DECAY),
    "momentum": Momentum(momentum=0.75),
    "momentum with decay": Momentum(momentum=0.75, weight_decay=DECAY),
    "nesterov": Momentum(momentum=0.75, nesterov=True),
    "nesterov with decay": Momentum(momentum=0.75, nesterov=True, weight_decay=DECAY),
    "adam": Adam(),
    "adam with decay": Adam(beta_1=0.8, beta_2=0.95, epsilon=1e-3, weight_decay=DECAY, decays=everything),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
LENGTH, STEPS = 23, 6
# Exact in float32, in which the rule takes a rate.
RATES = [2.0**-step for step in range(1, STEPS + 1)]


def drawn(*shape, dtype=np.float64) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


class ByHand:
    """The rules as in their papers (and in Keras), in NumPy."""

    def __init__(self, rule, value, decays=True):
        self.rule, self.value, self.decays, self.updates = rule, value.copy(), decays, 0
        self.slots = {name: np.zeros_like(value) for name in rule.slot_names}

    def apply(self, gradient, rate):
        self.updates += 1
        self.value -= rate * self.rule.weight_decay * self.decays * self.value
        {SGD: self._sgd, Momentum: self._momentum, Adam: self._adam}[type(self.rule)](gradient, rate)

    def _sgd(self, gradient, rate):
        self.value -= rate * gradient

    def _momentum(self, gradient, rate):
        velocity = self.slots["momentum"]
        velocity[:] = self.rule.momentum * velocity - rate * gradient
        self.value += self.rule.momentum * velocity - rate * gradient if self.rule.nesterov else velocity

    def _adam(self, gradient, rate):
        first, second = self.slots["first_moment"], self.slots["second_moment"]
        beta_1, beta_2 = self.rule.beta_1, self.rule.beta_2
        first[:] = beta_1 * first + (1 - beta_1) * gradient
        second[:] = beta_2 * second + (1 - beta_2) * gradient**2
        unbiased = np.sqrt(1 - beta_2**self.updates) / (1 - beta_1**self.updates)
        self.value -= rate * unbiased * first / (np.sqrt(second) + self.rule.epsilon)


def slots_of(vector: Vector, rule) -> dict[str, np.ndarray]:
    return {slot: vector.read_part(None, slot, 0, len(vector.read()[0])) for slot in rule.slot_names}


def assert_same(vector: Vector, by_hand: ByHand, updates: int) -> None:
    value, version = vector.read()
    assert version == updates
    np.testing.assert_allclose(value, by_hand.value, rtol=1e-12, atol=1e-14)
    for name, slot in slots_of(vector, by_hand.rule).items():
        np.testing.assert_allclose(slot, by_hand.slots[name], rtol=1e-12, atol=1e-14)


class TestUpdates:
    @every_rule
    @pytest.mark.parametrize("masked", [False, True], ids=["decay of all", "decay of some"])
    def test_updates_follow_the_rule(self, rule, masked):
        """Also after the vector's contents were moved to another vector, as by a checkpoint."""
        decays = np.arange(LENGTH) % 3 == 0 if masked else None
        vector = Vector(drawn(LENGTH), rule, decays=decays)
        by_hand = ByHand(rule, drawn(LENGTH), True if decays is None else decays)
        for step, (gradient, rate) in enumerate(zip(drawn(STEPS, LENGTH), RATES, strict=True), start=1):
            vector.apply(gradient, rate)
            by_hand.apply(gradient, rate)
            assert_same(vector, by_hand, step)
            other = Vector(np.zeros(LENGTH), rule, decays=decays)
            for name, part in {None: vector.read()[0], **slots_of(vector, rule)}.items():
                other.write_part(None, name, 0, part)
            other.version = step
            vector = other

    @every_rule
    def test_a_piece_may_be_empty(self, rule):
        vector = Vector(np.zeros(0, np.float32), rule, decays=np.zeros(0, bool))
        vector.apply(np.zeros(0, np.float32), 0.5)
        assert vector.read()[1] == 1

    def test_a_gradient_of_another_length_changes_nothing(self):
        vector = Vector(drawn(LENGTH), RULES["momentum"])
        before, _ = vector.read()
        with pytest.raises(Refused, match=f"{LENGTH - 1} numbers for a piece of {LENGTH}"):
            vector.apply(drawn(LENGTH - 1), 0.5)
        value, version = vector.read()
        assert version == 0
        np.testing.assert_array_equal(value, before)

    def test_a_rate_without_a_fraction(self):
        vector = Vector(np.zeros(1), SGD())
        vector.apply(np.ones(1), 1)
        assert vector.read()[0].tolist() == [-1]

    def test_updates_do_not_change_what_was_read(self):
        vector = Vector(np.zeros(3), Momentum())
        vector.apply(np.ones(3), 1.0)
        value, slot = vector.read()[0], vector.read_part(None, "momentum", 0, 3)
        vector.apply(np.ones(3), 1.0)
        assert (value.tolist(), slot.tolist()) == ([-1] * 3, [-1] * 3)

    def test_updates_do_not_change_the_arguments(self):
        value, gradient = np.zeros(100_000), np.ones(100_000)
        Vector(value, SGD()).apply(gradient, 1.0)
        assert not value.any()
        assert gradient.all()


class TestAtOnce:
    """All gradients are equal, so every value is known to the bit, whatever the order of the updates."""

    LENGTH, THREADS, EACH, RATE = 100_000, 4, 8, 0.25

    @pytest.mark.parametrize("name", ["momentum with decay", "adam with decay"])
    def test_no_update_is_lost(self, name):
        rule, gradient = RULES[name], drawn(self.LENGTH, dtype=np.float32)
        updates = self.THREADS * self.EACH
        alone = Vector(gradient, rule)
        history = [alone.read()[0]]
        for _ in range(updates):
            alone.apply(gradient, self.RATE)
            history.append(alone.read()[0])

        for _ in range(10):
            shared = Vector(gradient, rule)

            def push(shared=shared):
                return [shared.apply(gradient, self.RATE, since=0) for _ in range(self.EACH)]

            def pull(shared=shared):
                version = 0
                while version < updates:
                    value, version = shared.read()
                    assert value.tobytes() == history[version].tobytes()

            *staleness, _ = at_once(*[push] * self.THREADS, pull)
            assert sorted(itertools.chain(*staleness)) == list(range(updates))
            value, version = shared.read()
            assert version == updates
            assert value.tobytes() == history[-1].tobytes()
            expected = slots_of(alone, rule)
            assert all(slot.tobytes() == expected[name].tobytes() for name, slot in slots_of(shared, rule).items())


class TestStaleness:
    def test_updates_since_a_version(self):
        vector = Vector(np.zeros(1), SGD())
        assert [vector.apply(np.ones(1), 0.5, since=since) for since in (0, 0, 1, 3, None)] == [0, 1, 1, 0, 0]

    @pytest.mark.parametrize(
        "updates_before, since, divided_by", [(0, 0, 1), (3, 3, 1), (3, 2, 1), (3, 1, 2), (8, 0, 8), (8, None, 1)]
    )
    def test_a_staleness_aware_rate(self, updates_before, since, divided_by):
        vector = Vector(np.zeros(1), SGD())
        vector.version = updates_before
        vector.apply(np.ones(1), 0.5, since=since, aware=True)
        assert vector.read()[0].tolist() == [-0.5 / divided_by]


class TestStore:
    def test_each_key_has_its_own_vector(self):
        store = Store(Momentum())
        store.init("b", np.zeros(2))
        store.init("a", np.zeros(3, np.float32))
        store.vector("b").apply(np.ones(2), 1.0)
        assert [store.vector(key).read()[1] for key in ("a", "b")] == [0, 1]
        assert [store.vector(key).dtype for key in ("a", "b")] == [np.float32, np.float64]

    def test_init_replaces_the_vector(self):
        store = Store(Momentum())
        for value in (0, 5):
            store.init("a", np.full(2, float(value)))
            store.vector("a").apply(np.ones(2), 1.0)
        value, version = store.vector("a").read()
        assert (value.tolist(), version) == ([4, 4], 1)
        assert store.vector("a").read_part(None, "momentum", 0, 2).tolist() == [-1, -1]

    def test_an_unknown_key(self):
        with pytest.raises(Refused, match="there is no vector under 'a': init it first"):
            Store(SGD()).vector("a")

    @pytest.mark.parametrize("value", [np.zeros((2, 2)), np.zeros(()), np.zeros(2, np.int64)], ids=str)
    def test_a_value_that_is_not_a_vector_of_floating_point_numbers(self, value):
        store = Store(SGD())
        with refused("init of 'a'", str(value.dtype), str(list(value.shape))):
            store.init("a", value)
        with pytest.raises(Refused):
            store.vector("a")

    def test_a_rule_of_whole_matrices(self):
        with refused("Muon", "use sgd, momentum, nesterov, adam or adamw"):
            check_rule(Muon())
        with refused("Muon"):
            Store(Muon()).init("a", np.zeros(2))


@pytest.mark.parametrize("wrong", [(np.array([4]), np.ones((1, 2))), (np.array([0]), np.ones((2, 2)))])
def test_an_update_that_one_table_refuses_changes_nothing(wrong):
    found = Vector(np.zeros(3), SGD())
    for name in ("a", "b"):
        found.add_table(name, (4, 2), decays=False, lazily=False)
    with pytest.raises(Refused):
        found.apply(np.ones(3), 1.0, rows=[(np.array([1]), np.ones((1, 2))), wrong])
    assert not any(found.read_part(name, None, 0, 4).any() for name in ("a", "b"))
    assert (found.read()[0].any(), found.version) == (False, 0)
