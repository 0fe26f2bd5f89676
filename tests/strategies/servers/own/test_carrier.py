"""The chief writes and reads parameters and slots on our own servers piece by piece; here without connections."""

import types

import numpy as np
import pytest
import tensorflow as tf

from strategies import pieces
from strategies.pieces import parts_of
from strategies.servers.carrier import Start
from strategies.servers.own.carrier import OwnCarrier
from strategies.servers.own.handlers import StoreHandlers
from strategies.servers.slot_on_servers import SlotOnServers, read_whole
from strategies.servers.tables import ParameterLayout
from towers.updates.clipping import Clipping
from towers.updates.rules import Adam

NUM_SERVERS = 3
SHAPES = {"kernel": (7, 4), "ids": (10, 4), "bias": (5,), "words": (7, 4), "scale": ()}
LIMIT = 40


class Servers:
    """Servers of this process as a `Group`, which records the largest array of each message, in bytes."""

    def __init__(self):
        self.servers = [types.SimpleNamespace(name=f"ps:{index}") for index in range(NUM_SERVERS)]
        self._handlers = [StoreHandlers(Adam(), Clipping()) for _ in self.servers]
        self.sizes: list[int] = []

    def ask(self, server, what, arrays=(), **fields):
        if what == "start":
            return {}, ()
        reply, found = self._handlers[server].requests[what](fields, list(arrays))
        if what != "make":
            self.sizes += [array.nbytes for array in (*arrays, *found)]
        return reply, found

    def ask_all(self, what, **fields):
        return [self.ask(server, what, **fields) for server in range(NUM_SERVERS)]


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", LIMIT)
    return Servers()


@pytest.fixture
def values():
    draws = np.random.default_rng(3)
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def carrier(group, values):
    layout = ParameterLayout.of(
        SHAPES, {"ids": 10, "words": 7}, decays=lambda name, shape: False, num_servers=NUM_SERVERS
    )
    found = OwnCarrier(group, layout)
    found.start(start_of(values, layout))
    return found


def start_of(values, layout) -> Start:
    return Start(
        parameters={name: tf.Variable(value) for name, value in values.items()},
        slot_names=Adam().slot_names,
        state=np.zeros(0),
        decays=np.zeros(layout.vector.length, bool),
        averaged=np.zeros(0, bool),
        step=0,
        updates=0,
    )


def slots(carrier, values):
    return {
        (slot, name): SlotOnServers(slot, name, tf.Variable(value), lambda: carrier)
        for slot in Adam().slot_names
        for name, value in values.items()
    }


def test_parameters_are_read_as_given_and_slots_are_zeros(carrier, values):
    for name, value in values.items():
        np.testing.assert_array_equal(read_whole(carrier, None, name, tf.Variable(value)), value, err_msg=name)
    assert not any(slot.numpy().any() for slot in slots(carrier, values).values())


def test_slots_are_read_as_written_and_survive_another_start(carrier, values):
    written = slots(carrier, values)
    for scale, ((_, name), slot) in enumerate(written.items(), start=2):
        slot.assign(scale * values[name])
    layout = carrier._layout
    carrier.start(start_of({name: -value for name, value in values.items()}, layout))
    for scale, ((_, name), slot) in enumerate(written.items(), start=2):
        np.testing.assert_array_equal(slot.numpy(), scale * values[name], err_msg=name)
    np.testing.assert_array_equal(carrier.read(None, "ids", 8, 24), -values["ids"].ravel()[8:24])


def test_no_message_is_larger_than_a_piece(carrier, group, values):
    for slot in slots(carrier, values).values():
        slot.assign(slot.numpy())
    assert len(group.sizes) > 50
    assert max(group.sizes) <= LIMIT


def test_a_slot_is_read_for_one_piece(carrier, values):
    slot = slots(carrier, values)["first_moment", "words"]
    slot.assign(values["words"])
    for piece in parts_of({"words": slot})[0].divided():
        np.testing.assert_array_equal(slot.read(piece), values["words"][piece.within])
