"""Iterators over batches are closed before the interpreter is finalised, while threads can still call Python."""

import atexit
import weakref

from strategies.servers.batch_reader import BatchReader
from strategies.steps import open_batches
from strategies.steps.open_batches import OpenBatches
from tests.towers.tiny_tasks import dense_task, trainer_of


def numbers():
    yield from range(10)


def test_what_is_open_at_the_exit_is_closed():
    inner = numbers()
    deleted = weakref.ref(inner)
    batches = OpenBatches(inner)
    del inner
    assert [next(batches), next(batches)] == [0, 1] and deleted() is not None
    atexit.unregister(open_batches._close_all)
    try:
        open_batches._close_all()
    finally:
        atexit.register(open_batches._close_all)
    assert deleted() is None and list(batches) == []


def test_a_strategy_holds_its_iterators_so(monkeypatch):
    """The iterators of the Trainer's strategies and of workers of parameter servers are closed so."""
    opened = []
    for name in ("steps.training_batches", "servers.batch_reader"):
        monkeypatch.setattr(
            f"strategies.{name}.OpenBatches", lambda batches, name=name: opened.append(name) or batches
        )
    trainer_of(dense_task()).run_steps(1)
    assert BatchReader(lambda index: iter([7]), 1).read(0) == 7
    assert opened == ["steps.training_batches", "servers.batch_reader"]
