"""The chief's variables: `collect` alone copies the servers' values into them."""

import numpy as np
import pytest

from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, Member
from strategies.contract import Move
from strategies.servers.chief import ServersStrategy
from strategies.servers.options import ServersOptions
from strategies.servers.own.carrier import OwnCarrier
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import KEY, StoreHandlers
from strategies.servers.own.server import Server
from tests.launch.spoilt_task import spoilt_task, with_statistics
from tests.strategies.servers.at_once import LIMIT_SECONDS, Started
from tests.strategies.small_task import small_task
from tests.towers.logical_cpus import cpus
from towers.options import StepOptions
from towers.task import Task
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD
from towers.updates.schedules import Constant, Schedule

RATE = Constant(0.25)


@pytest.fixture
def group():
    """The chief's connection to one server."""
    (address,) = free_addresses(1)
    member, store = Member(SERVER, 0, address), StoreHandlers(SGD(), Clipping())
    coordination = Coordination(
        ServersOptions(), Clipping(), store, num_workers=1, stops_if_bad=True, connect_others=None
    )
    server = Server(member, store, settings={}, secret="", coordination=coordination)
    running = Started(lambda: server.serve(LIMIT_SECONDS))
    seconds = {"startup_timeout_seconds": LIMIT_SECONDS, "timeout_seconds": LIMIT_SECONDS}
    group = Group.connected([member], Member(CHIEF, 0, ""), settings={}, secret="", **seconds)
    yield group
    group.ask_all("end", how="done")
    group.close()
    assert running.result() == "done"


def chief_of(
    group: Group, task: Task, schedule: Schedule = RATE, num_workers: int = 1, **servers
) -> ServersStrategy:
    return ServersStrategy(
        task,
        cpus(1),
        StepOptions(rule=SGD(), schedule=schedule, seed=3),
        None,
        make_carrier=lambda strategy: OwnCarrier(group, strategy.layout),
        servers=ServersOptions(engine="own", **servers),
        num_workers=num_workers,
        num_servers=1,
        startup_timeout_seconds=LIMIT_SECONDS,
    )


@pytest.fixture
def chief(group):
    return chief_of(group, small_task())


def sent_bytes(group: Group) -> int:
    return sum(connection.sent_bytes for connection in group.connections)


def test_that_stale_gradients_need_lower_rates_is_said(group):
    alone, beside_another = (chief_of(group, small_task(), num_workers=count).notices for count in (1, 2))
    assert not any("diverge" in line for line in alone)
    assert "may diverge" in beside_another[-1] and "staleness='sync'" in beside_another[-1]


def test_lazy_updates_of_a_model_without_tables(group):
    notices = chief_of(group, small_task(), sparse_updates="lazy").notices
    assert sum("sparse_updates=lazy changes nothing" in line for line in notices) == 1


def test_checkpointables_asks_no_server(chief, group):
    before = sent_bytes(group)
    chief.checkpointables()
    assert sent_bytes(group) == before


def test_the_servers_hold_the_state_in_its_own_precision(group):
    """Otherwise a run that resumes from a checkpoint would continue with other moving statistics."""
    chief_of(group, spoilt_task(None, with_statistics))
    _, (state,) = group.ask(0, "get_state")
    assert (state.dtype, state.tolist()) == (np.float32, [0.0] * 8 + [1.0] * 8)


def test_collect_copies_the_servers_values(chief, group):
    variables = chief.checkpointables()["parameters"]
    before = {name: variable.numpy() for name, variable in variables.items()}
    length = sum(value.size for value in before.values())
    group.ask(0, "push", [np.ones(length, np.float32)], key=KEY, rows=[], rate=0.25)
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable, before[name], err_msg=f"{name} before collect")
    chief.collect()
    for name, variable in variables.items():
        np.testing.assert_allclose(variable, before[name] - 0.25, rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_run_that_is_stopped_before_its_first_step(group):
    """Its report has no step, so no step's learning rate can be asked of the schedule."""
    chief = chief_of(group, small_task(), {0: 0.5}.__getitem__)
    ends = dict.fromkeys(("target", "last_step", "until", "evaluation", "checkpoint"), 1)
    chief.agree(Move(stop=False, save=False, stop_requested=lambda: True, **ends))
    report = chief.run_steps(1)
    assert (report.step, report.num_steps, report.learning_rate) == (0, 0, 0.5)
