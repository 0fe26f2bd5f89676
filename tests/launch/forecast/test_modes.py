"""The table of modes, of a tiny model and without a new process; one measured run of the program."""

import json

import pytest

from launch.forecast.columns import ARITHMETIC, MODES, Run
from launch.forecast.table import as_json, saved_by_zero, table
from launch.measuring.allocation_trace import peak_of
from tests.launch.nursery import run_forked
from tests.towers.logical_cpus import cpus
from tests.towers.tiny_tasks import dense_task
from towers.memory.zero import MIXED_PRECISION_ADAM
from towers.options import StepOptions
from towers.updates.rules import Adam

DENSE = 43 * 4


@pytest.fixture(scope="module")
def columns():
    run = Run(dense_task(64), cpus(2), StepOptions(rule=Adam()), num_workers=2, num_servers=2)
    return {column.name: column for mode in MODES for column in mode(run)}


def test_each_mode_has_its_column(columns):
    assert list(columns) == [
        "1 tower",
        "2 towers",
        "2 towers, sharded",
        "ring, 1 of 2 workers",
        "ps, worker",
        "ps, 1 of 2 servers",
        "ZeRO-1, 1 of 2",
        "ZeRO-2, 1 of 2",
        "ZeRO-3, 1 of 2",
    ]
    assert {column.name for column in columns.values() if column.basis == ARITHMETIC} == set(list(columns)[3:])


def test_owners_share_the_optimizer_state(columns):
    held = {name: column.device.optimizer_bytes for name, column in columns.items()}
    assert held["1 tower"] == held["2 towers"] == held["ring, 1 of 2 workers"] == 2 * DENSE
    assert DENSE <= held["2 towers, sharded"] <= 1.2 * DENSE
    assert held["ps, worker"] == 0
    assert held["ps, 1 of 2 servers"] == held["ZeRO-1, 1 of 2"] == held["ZeRO-3, 1 of 2"] == DENSE


def test_two_towers_on_cpus_are_one_process(columns):
    two = columns["2 towers"]
    assert two.process.activations_bytes > two.device.activations_bytes
    assert two.process.total_bytes > columns["1 tower"].device.parameters_bytes


def test_the_table_names_each_mode_and_measured_peaks(columns):
    of_process = columns["2 towers"].process.total_bytes
    lines = table(list(columns.values()), {"2 towers": of_process / 1.1})
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["parameters", "gradients", "optimizer state"]
    assert lines[-2].count("predicted +10.0%") == 1
    assert as_json(list(columns.values()), {})[0]["device"]["parameters_bytes"] == DENSE


def test_what_zero_saves_is_told_for_each_stage():
    lines = saved_by_zero(2**20, MIXED_PRECISION_ADAM, 4)
    assert [line.split(" of ")[0].rpartition("save ")[2] for line in lines] == [
        "9 MiB a device,",
        "10.5 MiB a device,",
        "12 MiB a device,",
    ]


def test_the_peak_of_a_trace_counts_addresses_that_come_again_once():
    events = [(False, 9, 5), (True, 1, 10), (True, 2, 20), (False, 1, 10), (True, 1, 4), (False, 2, 20)]
    assert peak_of(events) == 30


@pytest.mark.full
@pytest.mark.timeout(300)
def test_measured_peaks_are_near_the_predicted_ones(tmp_path):
    ended = run_forked(
        *(
            "-m",
            "launch.memory",
            "--model=classic_cnn",
            "--batch_size=64",
            "--num_towers=2",
            "--measure",
            "--json",
        ),
        *("--device_memory=1GiB", "--measured_steps=2"),
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    measured = {mode["name"]: mode for mode in found["modes"] if mode["measured_bytes"]}
    assert list(measured) == ["1 tower", "2 towers", "2 towers, sharded"]
    for name, mode in measured.items():
        assert 0.75 < mode["process"]["total_bytes"] / mode["measured_bytes"] < 1.25, name
    assert found["largest_batch"] > 64 and found["largest_batch"] % 2 == 0
