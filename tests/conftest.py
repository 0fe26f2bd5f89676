"""The tiers of the tests, and the devices of a test process: four logical CPUs of one thread each.

pytest           quick tests
pytest --full    all tests: those marked `full` too
"""

import gc
import os
import signal

import pytest
from hypothesis import settings

from tests import tiers

# TensorFlow reads this variable while it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run all tests, not only the quick ones")


def pytest_configure(config):
    tiers.runs_full = config.getoption("--full")
    settings.register_profile("quick", max_examples=25)
    settings.load_profile("default" if tiers.runs_full else "quick")
    # A shell starts a command in the background with Ctrl-C ignored, nohup one with SIGHUP; programs inherit that.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    if _runs_tests(config):
        make_devices()


def _runs_tests(config) -> bool:
    """Whether this process runs tests itself. With `--numprocesses` the first process only hands them out."""
    return hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)


def make_devices() -> None:
    """Makes the devices, once in a process. Tests of fewer towers use the first of them."""
    from towers.device_setup import configure_devices  # imports TensorFlow

    configure_devices(num_towers=4, kind="cpu", threads_per_tower=1)


def pytest_collection_modifyitems(config, items):
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: the name differs between processes; give the case an id")
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_collection(session):
    """Imported objects stay, so Python need not look for garbage among them, now or later."""
    # Larger thresholds of the collection and other settings of malloc (`tcache_count`, `top_pad`) changed nothing;
    # TensorFlow without oneDNN hardly did: 202 tests of clusters took 867 s of CPU time, with it 888.
    gc.disable()


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def collected_garbage():
    """Collects the graphs of a file's tests: they are cycles, which Python would free late and all at once.

    What is left belongs to registries and is frozen: looking through it after each file took a sixth of the time.
    """
    yield
    gc.collect()
    gc.freeze()
