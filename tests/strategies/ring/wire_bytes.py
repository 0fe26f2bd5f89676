"""How many bytes workers in threads send in a step."""

import contextlib

from strategies.ring.exchange.neighbours import Neighbours
from tests.strategies.ring.threads import WorkersInThreads, rings
from towers.options import StepOptions
from towers.updates.rules import Adam


@contextlib.contextmanager
def counted_bytes(monkeypatch):
    """Context manager: yields a view of the bytes that each worker has sent, heads of frames included."""
    sent: dict[Neighbours, int] = {}
    send = Neighbours.send_bytes

    def counted(of_ring, view, head):
        sent[of_ring] = sent.get(of_ring, 0) + len(view) + len(head)
        send(of_ring, view, head)

    with monkeypatch.context() as patched:
        patched.setattr(Neighbours, "send_bytes", counted)
        yield sent.values()


def bytes_of_a_step(zero: int, task, monkeypatch, **of_workers) -> int:
    """The bytes that the busiest of two workers sends in a step.

    `of_workers` are further arguments of `WorkersInThreads`.
    """
    with counted_bytes(monkeypatch) as sent, rings(2) as (made, _):
        WorkersInThreads(made, task(), StepOptions(rule=Adam()), zero=zero, **of_workers).train(1)
    return max(sent)
