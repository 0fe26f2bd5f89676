"""Options of a group of servers: which are allowed, and which are refused."""

import math

import pytest

from strategies.servers.checks import check_options
from strategies.servers.options import ServersOptions
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import ScaledRates
from towers.updates.rules import SGD, Muon
from towers.updates.schedules import Constant


@pytest.mark.parametrize(
    "staleness, is_sync, bound, is_serial",
    [("async", False, None, False), ("sync", True, None, False), ("0", False, 0, True), ("12", False, 12, False)],
)
def test_staleness(staleness, is_sync, bound, is_serial):
    options = ServersOptions(staleness=staleness)
    assert (options.is_sync, options.bound, options.is_serial) == (is_sync, bound, is_serial)


@pytest.mark.parametrize(
    "staleness, prefetch, of_one_worker, of_two",
    [
        ("async", False, False, True),
        ("async", True, True, True),
        ("1", False, False, True),
        ("0", False, False, False),
        ("sync", False, False, False),
    ],
)
def test_which_gradients_are_stale(staleness, prefetch, of_one_worker, of_two):
    options = ServersOptions(staleness=staleness, prefetch=prefetch)
    assert [options.has_stale_gradients(workers) for workers in (1, 2)] == [of_one_worker, of_two]


@pytest.mark.parametrize("staleness", ["", "asynchronous", "-1", "1.5", "²", "Sync"])
def test_an_unknown_staleness(staleness):
    with refused(f"staleness={staleness!r}", "use async, sync or an integer of at least 0"):
        ServersOptions(staleness=staleness)


@pytest.mark.parametrize("staleness, workers", [("sync", -1), ("async", 1), ("0", 2)])
def test_impossible_backup_workers(staleness, workers):
    with refused(f"backup_workers={workers}", "at least 0" if workers < 0 else "use staleness=sync"):
        ServersOptions(staleness=staleness, backup_workers=workers)


def test_staleness_aware_without_staleness():
    ServersOptions(staleness="4", staleness_aware=True)
    for staleness in ("sync", "0"):
        with refused("staleness_aware", f"staleness={staleness}", "omit staleness_aware"):
            ServersOptions(staleness=staleness, staleness_aware=True)


@pytest.mark.parametrize(
    "chosen, named",
    [
        ({"engine": "own"}, "engine=own"),
        ({"staleness": "sync"}, "staleness=sync"),
        ({"prefetch": True}, "prefetch_"),
    ],
)
def test_closures_of_an_engine_without_them(chosen, named):
    ServersOptions(steps_per_closure=4)
    with refused(f"steps_per_closure=4 with {named}", "TensorFlow's engine", "omit one of them"):
        ServersOptions(steps_per_closure=4, **chosen)


@pytest.mark.parametrize("staleness", ["sync", "0"])
def test_prefetch_of_parameters_that_do_not_exist_yet(staleness):
    ServersOptions(staleness="1", prefetch=True)
    with refused("prefetch_parameters", f"staleness={staleness}", "omit prefetch_parameters"):
        ServersOptions(staleness=staleness, prefetch=True)


def test_an_unknown_precision():
    with refused("wire_precision='int8'", "float32", "bfloat16"):
        ServersOptions(wire_precision="int8")


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_timeout_that_is_not_positive(seconds):
    with refused(f"collective_timeout_seconds={seconds:g}", "above 0"):
        ServersOptions(timeout_seconds=seconds)
    with refused(f"worker_timeout_seconds={seconds:g}", "above 0"):
        ServersOptions(worker_timeout_seconds=seconds)


def step_options(**changes) -> StepOptions:
    return StepOptions(**{"rule": SGD(), "schedule": Constant(0.1), **changes})


class TestWithStepOptions:
    def test_supported_options(self):
        check_options(step_options(clipping=Clipping(norm=1.0)), ServersOptions(), 2)
        check_options(
            step_options(clipping=Clipping(global_norm=1.0)), ServersOptions(staleness="sync", backup_workers=1), 2
        )

    @pytest.mark.parametrize("backup_workers", [2, 3])
    def test_as_many_backup_workers_as_workers(self, backup_workers):
        servers = ServersOptions(staleness="sync", backup_workers=backup_workers)
        with refused(f"backup_workers={backup_workers} with 2 workers", "at most backup_workers=1"):
            check_options(step_options(), servers, 2)

    def test_a_rule_of_whole_matrices(self):
        with refused("Muon", "adamw"):
            check_options(step_options(rule=Muon()), ServersOptions(), 2)

    def test_rates_by_parameter(self):
        """A server does not know the parameters' names in its piece of the vector."""
        with refused("ScaledRates with strategy=ps", "; omit norm_bias_rate_factor"):
            check_options(step_options(rule=ScaledRates(rule=SGD(), factor=2.0)), ServersOptions(), 2)

    def test_float16(self):
        with refused("precision=float16", "use precision=bfloat16"):
            check_options(step_options(precision="float16"), ServersOptions(), 2)

    def test_clipping_by_each_parameters_norm_with_synchronous_steps(self):
        with refused("clip_norm=1 ", "use clip_global_norm=1"):
            check_options(step_options(clipping=Clipping(norm=1.0)), ServersOptions(staleness="sync"), 2)
