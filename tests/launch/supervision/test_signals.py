"""SIGTERM and SIGINT are noted, and obeyed later."""

import os
import signal

import pytest

from launch.supervision.signals import StopSignals


@pytest.fixture(autouse=True)
def handlers_are_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_one_is_noted(number):
    with StopSignals() as signals:
        assert not signals.requested()
        os.kill(os.getpid(), number)
        assert signals.requested()
        assert signals.name == number.name


def test_a_second_sigterm_changes_nothing():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.name == "SIGINT", "the first one's"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_an_impatient_user_interrupts_at_once(first):
    with pytest.raises(KeyboardInterrupt), StopSignals():
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_sigterm_after_all_is_saved_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            signals.are_obeyed()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_come_back_after_an_error():
    with pytest.raises(ZeroDivisionError), StopSignals():
        raise ZeroDivisionError
