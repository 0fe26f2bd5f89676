"""Units between two workers: parameters of several shapes and dtypes come whole, gradients go to their owners."""

import keras
import numpy as np
import tensorflow as tf

from strategies.ring.exchange.collectives import WireOptions, WorkerExchange
from strategies.ring.zero.worker_units import WorkerUnits
from tests.strategies.ring.threads import at_once, rings
from towers.parameters.sharded_placement import part_of
from towers.tower import ModelVariables
from towers.updates.rules import Adam

# A kernel is divided by output channels, matrices by rows; small ones have one owner.
SHAPES = {"kernel": (3, 3, 4, 8), "bias": (5,), "matrix": (41, 16), "scalar": (), "wide": (64, 9), "last": (7,)}


def variables() -> ModelVariables:
    random = np.random.default_rng(0)
    found = [
        keras.Variable(random.normal(size=shape), name=name, dtype="float64" if name == "wide" else "float32")
        for name, shape in SHAPES.items()
    ]
    return ModelVariables(parameters=tuple(found), state=(), seeds=())


def test_units_come_whole_and_sums_of_gradients_reach_their_owners():
    given, everything = variables(), list(range(len(SHAPES)))
    by_name = {parameter.path: parameter for parameter in given.parameters}
    with rings(2) as (made, _):
        units = [
            WorkerUnits(given, Adam(), WorkerExchange(2, rank, WireOptions(), channel=1, tcp=tcp))
            for rank, tcp in enumerate(made)
        ]
        assert [len(held.cuts) for held in units[0].held] == [2, 1, 2, 1, 2, 1]
        own = [
            [
                part_of(cut, by_name[cut.name]).numpy()
                for held in units[0].held
                for cut in held.cuts
                if cut.owner == rank
            ]
            for rank in (0, 1)
        ]
        gathers = [tf.function(one.gather(everything, "units"), autograph=False) for one in units]
        scatters = [tf.function(one.scatter(everything[::-1], "gradients"), autograph=False) for one in units]
        gathered = at_once(gathers, lambda gather, rank: gather(*map(tf.constant, own[rank])))
        multiplied = [[(rank + 1) * value for value in values[::-1]] for rank, values in enumerate(gathered)]
        sums = at_once(scatters, lambda scatter, rank: scatter(*multiplied[rank]))
    for rank in (0, 1):
        for value, parameter in zip(gathered[rank], given.parameters, strict=True):
            np.testing.assert_array_equal(value, parameter.numpy())
        for value, part in zip(sums[rank], own[rank][::-1], strict=True):
            np.testing.assert_allclose(value, 3 * part, rtol=1e-6)
