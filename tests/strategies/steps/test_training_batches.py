"""Batches of training: their iterators are closed at the exit."""

from strategies.servers.batch_reader import BatchReader
from tests.towers.tiny_tasks import dense_task, trainer_of


def test_a_strategy_holds_its_iterators_open(monkeypatch):
    """Those of the Trainer's strategies, of their evaluations and of workers of parameter servers."""
    opened = []
    modules = ("steps.training_batches", "servers.batch_reader", "data_checks.batches")
    for name in modules:
        monkeypatch.setattr(
            f"strategies.{name}.OpenBatches", lambda batches, name=name: opened.append(name) or batches
        )
    strategy = trainer_of(dense_task())
    strategy.run_steps(1)
    assert BatchReader(lambda index: iter([7]), 1).read(0) == 7
    strategy.evaluate(1)
    assert opened == list(modules)
