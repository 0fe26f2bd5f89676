"""Towers of several devices: the first one's function is traced, the others get its graph on their devices."""

import functools

import numpy as np
import tensorflow as tf

from towers.tracing.copied_graphs import CopiedGraphs
from towers.tracing.traced_once import TracedOnce

GROUPS = (("/device:CPU:0", "/device:CPU:1"), ("/device:CPU:2", "/device:CPU:3"))


def made(computed):
    """A function for each tower, the list of the traced towers, and the devices in each tower's graph."""
    graphs, traced, devices = CopiedGraphs(GROUPS), [], {}

    def graph_of(tower, key, trace):
        concrete, flat = graphs.of(tower, key, trace)
        devices[tower] = {node.device for node in flat.graph_def.node} - {""}
        return concrete, flat

    def function_of(tower):
        def function(x):
            traced.append(tower)
            return computed(x, GROUPS[tower])

        return TracedOnce(function, graph=functools.partial(graph_of, tower))

    return [function_of(tower) for tower in range(len(GROUPS))], traced, devices


def on_both(x, devices):
    with tf.device(devices[0]):
        left = x * 3.0
    with tf.device(devices[1]):
        return left + 1.0


def looping_on_second(x, devices):
    def body(index, value):
        with tf.device(devices[1]):
            return index + 1, value + 2.0

    return tf.while_loop(lambda index, value: index < 2, body, (0, x))[1]


def test_a_copy_computes_on_the_devices_of_its_tower():
    functions, traced, devices = made(on_both)
    for function in functions:
        np.testing.assert_array_equal(function(tf.constant(2.0)), 7.0)
    assert traced == [0]
    assert devices == {tower: set(group) for tower, group in enumerate(GROUPS)}


def test_a_tower_whose_loop_names_devices_is_traced_by_itself():
    functions, traced, _ = made(looping_on_second)
    for function in functions:
        np.testing.assert_array_equal(function(tf.constant(2.0)), 6.0)
    assert traced == [0, 1]
