"""The relay of the processes' output."""

import os

from launch.supervision.line_relay import LineRelay
from launch.supervision.screen import PlainScreen


def test_no_pipe_of_a_process_that_has_ended_stays_open(capfdbinary):
    """A launcher may replace a worker of parameter servers many times during one run."""
    pipes = [os.pipe() for _ in range(2)]
    output, error = (open(reads, "rb", buffering=0) for reads, _ in pipes)  # noqa: SIM115 (the relay closes them)
    relay = LineRelay(PlainScreen())
    relay.add("worker:0", output, error)
    os.write(pipes[0][1], b"its last words")
    for _, writes in pipes:
        os.close(writes)
    while relay.reads:
        relay.pass_on(1.0)
    assert output.closed and error.closed
    assert capfdbinary.readouterr().out == b"[worker:0] its last words\n"
