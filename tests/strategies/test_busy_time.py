"""The clock that measures a worker's own work."""

import itertools
import time

import tensorflow as tf

from strategies.busy_time import BusyTime


def test_a_machines_clock_that_is_set_back_changes_nothing(monkeypatch):
    """Otherwise the worker's time would be negative, and the other workers would be called stragglers."""
    busy = BusyTime()
    later = itertools.count(time.time(), -3600)
    monkeypatch.setattr(time, "time", lambda: next(later))
    stop = tf.function(lambda: busy.stop([tf.constant([1.0])]), autograph=False)
    busy.start()
    stop()
    assert 0 <= busy.take_seconds() < 60
