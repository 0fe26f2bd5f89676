"""How many bytes a step of workers in threads sends."""

from strategies.ring.tcp_ring import TcpRing
from tests.strategies.ring.threads import WorkersInThreads, rings
from towers.options import StepOptions
from towers.updates.rules import Adam


def bytes_of_a_step(zero: int, task, monkeypatch, **of_workers) -> int:
    """The bytes that the busiest of two workers sends in a step, heads of frames included.

    `of_workers` are further arguments of `WorkersInThreads`.
    """
    sent: dict[TcpRing, int] = {}
    send = TcpRing._send_bytes

    def counted(ring, view, head):
        sent[ring] = sent.get(ring, 0) + len(view) + len(head)
        send(ring, view, head)

    with monkeypatch.context() as patched, rings(2) as (made, _):
        patched.setattr(TcpRing, "_send_bytes", counted)
        WorkersInThreads(made, task(), StepOptions(rule=Adam()), zero=zero, **of_workers).train(1)
    return max(sent.values())
