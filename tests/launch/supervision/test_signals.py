"""SIGTERM, SIGINT and SIGHUP are received without ending the process."""

import os
import signal

import pytest

from launch.supervision.signals import ForwardedSignals
from strategies.training.stop_signals import StopSignals

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EACH = pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def handlers_are_restored():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@EACH
def test_a_signal_requests_a_stop(number):
    with StopSignals() as signals:
        assert not signals.requested()
        os.kill(os.getpid(), number)
        assert signals.requested()
        assert signals.name == number.name


def test_a_sighup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.requested()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_sigterm_changes_nothing():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.name == "SIGINT", "the first signal"


@EACH
def test_a_second_signal_that_is_sigint_raises_keyboard_interrupt(number):
    with pytest.raises(KeyboardInterrupt), StopSignals():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_can_be_ignored_after_the_context():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            signals.ignore_sigterm_afterwards()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_the_first_process_of_a_container_ends_too(monkeypatch):
    """The kernel keeps signals without a handler from this process, even those that it sends itself."""
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    with pytest.raises(SystemExit) as ended:
        signals.take_effect()
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("context", [StopSignals, ForwardedSignals])
def test_handlers_are_restored_after_an_error(context):
    with pytest.raises(ZeroDivisionError), context():
        raise ZeroDivisionError


def test_a_handler_that_python_did_not_set(monkeypatch):
    """As in a C++ program that embeds Python: Python reports None for its handler and can't restore it."""
    set_handler, unknown = signal.signal, [None]

    def signal_of_python(number, handler):
        previous = set_handler(number, handler)
        return unknown.pop() if number == signal.SIGTERM and unknown else previous

    monkeypatch.setattr(signal, "signal", signal_of_python)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_forwarded_signals_are_taken_once_and_in_order():
    with ForwardedSignals() as signals:
        assert (signals.first, signals.take()) == (None, [])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.take() == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
        assert signals.take() == []
        assert signals.first == signal.SIGINT
