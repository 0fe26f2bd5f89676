"""The table of modes, of a tiny model and without a new process; one measured run of the program."""

import dataclasses
import json
import re
import sys

import pytest
from absl import flags
from absl.testing import flagsaver
from keras import layers

import launch.training  # noqa: F401 (defines the flags)
from launch.forecast import columns as columns_module
from launch.forecast.asked_mode import asked_mode
from launch.forecast.columns import ARITHMETIC, Column, Run, columns_of
from launch.forecast.measured_modes import _case, _without
from launch.forecast.modes_of_a_process import BRANCHES, PIPELINE, TOWERS, ProcessMode, ProcessModes
from launch.forecast.table import as_json, saved_by_recomputation, saved_by_zero, table
from launch.measuring.allocation_trace import USE_TRACED_ALLOCATOR, peak_of
from strategies.servers.options import ServersOptions
from tests.launch.nursery import run_forked
from tests.launch.programs import ended, run, started
from tests.tiers import first_quick
from tests.towers.branches.branched_networks import small_inception
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.tiny_tasks import NUM_CLASSES, TinyTask, dense_task, images, stacked, vectors
from towers.errors import UserError
from towers.memory.engine_memory import StepMemory
from towers.memory.zero import MIXED_PRECISION_ADAM
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead
from towers.updates.rules import Adam, Muon

DENSE = 43 * 4


def run_of(task, **options):
    options = StepOptions(**{"rule": Adam(), **options})
    modes = ProcessModes(task, cpus(2), options, PipelineOptions(microbatches=2))
    return Run(modes, num_workers=2, num_servers=2)


@pytest.fixture(scope="module")
def columns():
    found, refusals = columns_of(run_of(dense_task(64)))
    assert [line.partition(":")[0] for line in refusals] == ["no figures for branches"]
    return {column.name: column for column in found}


@pytest.mark.full
def test_each_mode_has_its_column(columns):
    of_graphs = [
        *("1 tower", "2 towers", "2 towers, sharded", "2 towers, replicated"),
        *("2 towers, ZeRO-1", "2 towers, ZeRO-2", "2 towers, ZeRO-3"),
        *("2 towers, recompute=blocks", "2 towers, recompute=full"),
        *("pipeline, device 0", "pipeline, device 1", "2 slices"),
    ]
    by_formula = [
        *("ring, 1 of 2 workers", "ring, ZeRO-1, 1 of 2 workers", "ring, ZeRO-3, 1 of 2 workers"),
        *("ps, worker", "ps, 1 of 2 servers"),
    ]
    assert list(columns) == [*of_graphs, *by_formula]
    assert [column.name for column in columns.values() if column.basis == ARITHMETIC] == by_formula


def test_a_mode_that_refuses_has_a_line(monkeypatch):
    def odd_mode(run):
        yield next(columns_module.one_tower(run))
        raise UserError("the batch is too small")

    monkeypatch.setattr(columns_module, "MODES", (columns_module.one_tower, odd_mode))
    _, refusals = columns_of(run_of(dense_task(64)))
    assert refusals == ["no figures for odd mode: the batch is too small"]


def constrained_network():
    """A network with a constraint on its kernel."""
    return stacked((4,), layers.Dense(NUM_CLASSES, kernel_constraint="non_neg"))


@pytest.mark.parametrize(
    "changes, task, servers, reason",
    first_quick(
        [
            ({"rule": Muon()}, dense_task(64), {}, "it needs whole matrices"),
            ({"precision": "float16"}, dense_task(64), {}, "workers do not share a loss scale"),
            ({"clipping": Clipping(norm=1.0)}, dense_task(64), {"staleness": "sync"}, "no server holds a whole"),
            ({}, TinyTask(build=constrained_network, examples=vectors(64)), {}, "a constraint needs"),
        ]
    ),
)
def test_what_servers_refuse_has_no_figures(monkeypatch, changes, task, servers, reason):
    monkeypatch.setattr(columns_module, "MODES", (columns_module.one_tower, columns_module.parameter_servers))
    found, refusals = columns_of(dataclasses.replace(run_of(task, **changes), servers=ServersOptions(**servers)))
    assert [column.name for column in found] == ["1 tower"]
    [line] = refusals
    assert line.startswith("no figures for parameter servers: ") and reason in line


@pytest.mark.full
def test_each_device_holds_its_part_of_the_states(columns):
    slots = {name: column.device.optimizer_bytes for name, column in columns.items()}
    parameters = {name: column.device.parameters_bytes for name, column in columns.items()}
    for name in ("1 tower", "2 towers", "2 towers, replicated", "ring, 1 of 2 workers"):
        assert (parameters[name], slots[name]) == (DENSE, 2 * DENSE)
    for zero in ("ZeRO-1", "ZeRO-2"):
        assert parameters[f"2 towers, {zero}"] == DENSE
        assert DENSE <= slots[f"2 towers, {zero}"] <= 1.2 * DENSE
    for name in ("2 towers, sharded", "2 towers, ZeRO-3"):
        assert DENSE / 2 <= parameters[name] <= 0.6 * DENSE
        assert slots[name] == 2 * parameters[name]
    of_worker = "ring, ZeRO-3, 1 of 2 workers"
    assert (parameters[of_worker], slots[of_worker]) == (DENSE / 2, DENSE)
    stages = ("pipeline, device 0", "pipeline, device 1")
    assert sum(parameters[name] for name in stages) == DENSE
    assert sum(slots[name] for name in stages) == 2 * DENSE
    assert (slots["ps, worker"], slots["ps, 1 of 2 servers"]) == (0, DENSE)
    # The gradients of two workers, and a copy of the one that is applied; a server has half of the parameters.
    assert columns["ps, 1 of 2 servers"].device.gradients_bytes == 3 * DENSE / 2
    assert slots["ring, ZeRO-1, 1 of 2 workers"] == DENSE
    collectives = [columns[f"ring, {zero}1 of 2 workers"].device.collectives_bytes for zero in ("", "ZeRO-1, ")]
    # All gradients fit into one pack. While parameters are gathered, this network has nothing larger.
    assert collectives[0] == 2 * DENSE and DENSE / 2 <= collectives[1] < DENSE


@pytest.mark.full
def test_each_device_holds_the_parameters_of_its_branches():
    run = run_of(TinyTask(build=small_inception, examples=images(16)))
    devices = [column.device for column in columns_module.branches(run)]
    assert len(devices) == 2 and all(one.parameters_bytes and one.activations_bytes for one in devices)
    assert sum(one.parameters_bytes for one in devices) == run.num_parameters * 4
    assert sum(one.optimizer_bytes for one in devices) == run.num_parameters * 8


def deep_task() -> TinyTask:
    """Three blocks, each with two tensors inside that only its backward pass reads."""

    def build():
        blocks = [[layers.Dense(32), layers.BatchNormalization(), layers.ReLU()] for _ in range(3)]
        return stacked((4,), *(layer for block in blocks for layer in block), layers.Dense(NUM_CLASSES))

    return TinyTask(build=build, examples=vectors(64))


@pytest.mark.full
def test_recomputation_needs_fewer_activations():
    modes = run_of(deep_task()).modes
    kept, again = (
        modes.memory(ProcessMode(name=recompute, num_devices=1, recompute=recompute)).in_all(64).activations_bytes
        for recompute in ("none", "full")
    )
    assert again < 0.75 * kept


def test_a_mode_runs_with_the_flags_that_measure_it():
    mode = ProcessMode(name="pipeline", num_devices=4, num_towers=2, strategy=PIPELINE)
    assert mode.flags(cpus(4)) == ["--strategy=pipeline", "--grid=data:2,stage:2"]
    assert mode.devices(cpus(4)).groups == (cpus(4).towers[:2], cpus(4).towers[2:])
    zero = ProcessMode(name="ZeRO", num_devices=2, zero=3, recompute="full")
    assert {"--zero=3", "--num_towers=2", "--recompute=full"} <= set(zero.flags(cpus(4)))
    assert not any(flag.startswith("--parameter_device") for flag in zero.flags(cpus(4)))
    assert zero.devices(cpus(4)).towers == cpus(4).towers[:2]


def test_a_pipeline_divides_a_batch_into_its_microbatches():
    modes = run_of(dense_task(64)).modes
    pipeline = ProcessMode(name="pipeline", num_devices=2, strategy=PIPELINE)
    assert [modes.multiple(mode) for mode in (pipeline, run_of(dense_task(64)).central)] == [2, 2]


def test_shares_are_those_of_modes_with_as_many_towers():
    modes = dataclasses.replace(run_of(dense_task(64)).modes, tower_shares=(3.0, 1.0))
    one, two = (ProcessMode(name=f"{count} towers", num_devices=count) for count in (1, 2))
    assert [modes.shares(mode) for mode in (one, two)] == [None, (3.0, 1.0)]
    found = modes.memory(two).by_device(64)
    assert found["CPU:0"].activations_bytes > 2 * found["CPU:1"].activations_bytes


def test_the_memory_of_a_rule_with_a_condition():
    """TensorFlow's optimizer inlines its branches, whose operations are then colocated with removed ones."""
    options = StepOptions(rule=Lookahead(rule=Adam(), num_updates=10, every=5))
    modes = ProcessModes(dense_task(64), cpus(1), options)
    assert modes.memory(ProcessMode(name="1 tower", num_devices=1)).in_all(64).total_bytes > 0


def test_the_command_line_loses_the_flags_of_another_grid():
    words = ["--grid=data:1,stage:2", "--model=tiny", "--slices", "2", "--json"]
    assert _without(words, "grid", "slices") == ["--model=tiny", "--json"]


# A mode of towers and one of groups of devices first.
ASKED = [
    ({"strategy": "towers"}, cpus(2, zero=1), "2 towers"),
    (
        {"strategy": "ring", "grid": "stage:2"},
        cpus_in_groups("stage:2", zero=3),
        "pipeline on 2 devices, without ZeRO over workers,",
    ),
    ({"strategy": "pipeline"}, cpus_in_groups("stage:2"), "pipeline on 2 devices"),
    ({"strategy": "slices"}, cpus_in_groups("slice:2"), "slices on 2 devices"),
    ({"strategy": "ring"}, cpus(1, zero=1), "1 tower, without ZeRO over workers,"),
]


def mode_of(settings, devices) -> ProcessMode:
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        for flag, value in settings.items():
            flags.FLAGS[flag].value = value
        return asked_mode(devices)


@pytest.mark.parametrize("settings, devices, name", ASKED)
def test_the_mode_whose_largest_batch_is_found(settings, devices, name):
    """--grid may be missing, and the towers within a ring's worker have no ZeRO between them."""
    assert mode_of(settings, devices).name == name


@pytest.mark.parametrize("settings, devices, name", first_quick(ASKED, 2))
def test_the_mode_whose_largest_batch_is_found_has_figures(settings, devices, name):
    mode = mode_of(settings, devices)
    modes = ProcessModes(dense_task(64), devices, StepOptions(rule=Adam()))
    assert modes.process_or_gpu(mode, 64).total_bytes > 0


@pytest.mark.parametrize("strategy", [PIPELINE, BRANCHES])
def test_the_balance_of_the_flags_is_measured_in_the_mode_that_they_choose(strategy, monkeypatch):
    """Other modes are predicted with the default balance."""
    modes = run_of(dense_task(64)).modes
    monkeypatch.setattr(sys, "argv", ["memory", f"--strategy={strategy}", "--balance=time"])
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        flags.FLAGS.strategy = strategy
        measured = {
            one: "--balance=time" in _case(modes, ProcessMode(name=one, num_devices=2, strategy=one)).command
            for one in (TOWERS, PIPELINE, BRANCHES)
        }
    assert [one for one, has_balance in measured.items() if has_balance] == [strategy]


def test_a_measured_mode_gets_no_flags_of_rings_and_servers(monkeypatch):
    modes = ProcessModes(dense_task(), cpus(2), StepOptions())
    of_servers = ["--engine=own", "--wire_precision", "bfloat16", "--staleness_aware", "--staleness=8"]
    monkeypatch.setattr(
        sys, "argv", ["memory", "--strategy=ps", *of_servers, "--steps_per_execution=4", "--notf32"]
    )
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        for one, kept in ((TOWERS, ["--steps_per_execution=4", "--notf32"]), (PIPELINE, ["--notf32"])):
            command = _case(modes, ProcessMode(name=one, num_devices=2, strategy=one)).command
            assert list(command[command.index("launch.memory") + 1 : command.index("--measure_here")]) == kept


@pytest.mark.full
def test_two_towers_on_cpus_are_one_process(columns):
    two = columns["2 towers"]
    assert two.process.total_bytes > two.device.total_bytes
    assert two.process.total_bytes > columns["1 tower"].device.parameters_bytes


@pytest.mark.full
def test_the_table_has_a_row_for_each_mode(columns):
    of_process = columns["2 towers"].process.total_bytes
    found = list(columns.values())
    head, *rows, note = table(found, {})
    assert head.split()[:4] == ["KiB", "device", "process", "parameters"]
    names = [name + "*" * (column.basis == ARITHMETIC) for name, column in columns.items()]
    assert [row.split("  ")[0] for row in rows] == names
    assert note.startswith("*: computed by formulas")
    assert len({len(row) for row in (head, *rows)}) == 1 and len(head) <= 120
    assert all(len(line) <= 160 for line in table(found, {}, 160))
    with_peak = table(found, {"2 towers": of_process / 1.1})
    assert [line.startswith("2 towers ") for line in with_peak if "+10.0%" in line] == [True]
    assert as_json(found, {})[0]["device"]["parameters_bytes"] == DENSE


@pytest.mark.full
def test_a_narrow_table_has_its_other_figures_below(columns):
    found = list(columns.values())
    lines = table(found, {}, 80)[:-1]
    assert max(map(len, lines)) <= 80
    end = lines.index("")
    assert "process" in lines[0] and "collectives" in lines[end + 1]
    assert [line.split("  ")[0] for line in lines[1:end]] == [line.split("  ")[0] for line in lines[end + 2 :]]
    first, second = (re.split("  +", line) for line in (lines[1], lines[end + 2]))
    assert [*first, *second[1:]] == re.split("  +", table(found, {}, 120)[1])


def test_what_zero_saves_is_told_for_each_stage():
    lines = saved_by_zero(2**20, MIXED_PRECISION_ADAM, 4)
    assert [line.split(" of ")[0].rpartition("save ")[2] for line in lines] == [
        "9 MiB a device,",
        "10.5 MiB a device,",
        "12 MiB a device,",
    ]


def test_what_recomputation_saves_is_the_difference_of_the_devices():
    sizes = {"2 towers": 10, "2 towers, recompute=full": 4, "2 slices": 3}
    columns = [Column(name, "graph", StepMemory(activations_bytes=size * 2**20)) for name, size in sizes.items()]
    assert saved_by_recomputation(columns, "2 towers") == [
        "recompute=full would save 6 MiB of 10 MiB on the fullest device"
    ]


def test_the_peak_of_a_trace_counts_addresses_that_come_again_once():
    events = [(False, 9, 5), (True, 1, 10), (True, 2, 20), (False, 1, 10), (True, 1, 4), (False, 2, 20)]
    assert peak_of(events) == 30


@pytest.mark.full
def test_a_device_that_no_batch_fits(tmp_path):
    flags = ("--model=tiny", "--batch_size=8", "--num_towers=1", "--device_memory=1KiB")
    end = run_forked("-m", "launch.memory", *flags, cwd=tmp_path)
    assert end.code == 0, end.err
    first, head, *rows, last = end.out.splitlines()
    assert (first.split(",")[0], head.split()[1]) == ("tiny", "device")
    assert max(map(len, [head, *rows[: rows.index("")]])) <= 120
    assert last.startswith("no batch of 1 tower in a process fits 1 KiB: one of 1 needs ")
    assert any("--recompute=blocks: model 'tiny' repeats no block" in row for row in rows)


@pytest.mark.full
def test_a_memory_with_room_for_more_than_tensorflow_can_count(tmp_path):
    flags = ("--task=text", "--model=transformer_tiny", "--batch_size=8", "--num_towers=1")
    end = run_forked("-m", "launch.memory", *flags, "--device_memory=1024TiB", cwd=tmp_path)
    assert end.code == 0, end.err
    largest = int(end.out.rpartition("with 1.02e+03 TiB: ")[2])
    assert 2**31 // (64 * 512) < largest < 2**31


@pytest.mark.full
@pytest.mark.parametrize("strategy", [["ring"], ["ps", "--staleness=sync"]])
def test_a_prediction_joins_no_cluster(tmp_path, monkeypatch, strategy):
    hosts = {"worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    if strategy[0] == "ps":
        hosts |= {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:4"]}
    for cluster in (None, {"cluster": hosts, "task": {"type": "worker", "index": 0}}):
        if cluster is not None:
            monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
        flags = ("--model=tiny", "--batch_size=8", "--num_towers=1", f"--strategy={strategy[0]}", *strategy[1:])
        # Not forked: the nursery has imported launch.training, which joins.
        end = run("-m", "launch.memory", *flags, "--startup_timeout_seconds=5", cwd=tmp_path)
        assert end.code == 0, end.err
        assert "\nps, worker*" in end.out


@pytest.mark.full
def test_a_verification_is_refused(tmp_path):
    end = run_forked("-m", "launch.memory", "--model=tiny", "--batch_size=8", "--verify", cwd=tmp_path)
    assert end.code == 2, end.out
    (line,) = [line for line in end.err.splitlines() if "--verify" in line]
    assert line.endswith("is not predicted; omit it"), line
    assert "Traceback" not in end.err


def test_flags_of_a_run_are_named(tmp_path):
    # The set is not there, so the program ends before it predicts.
    end = run_forked(
        "-m", "launch.memory", "--task=cifar10", "--data_dir=.", "--steps=9", "--directory=run", cwd=tmp_path
    )
    assert end.code == 2, end.err
    assert "memory: note: --steps, --directory: a step's memory does not depend on the run's length" in end.err
    assert "--data_dir" not in end.err.splitlines()[0]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_measured_peaks_are_near_the_predicted_ones(tmp_path):
    # Each mode is measured in a process of its own. Modes of two devices take two minutes, and vary by the step.
    flags = ("--model=classic_cnn", "--batch_size=64", "--num_towers=1", "--measure", "--json")
    end = run_forked("-m", "launch.memory", *flags, "--device_memory=1GiB", cwd=tmp_path)
    assert end.code == 0, end.err
    found = json.loads(end.out)
    measured = {mode["name"]: mode for mode in found["modes"] if mode["measured_bytes"]}
    assert {"1 tower", "1 tower, recompute=full"} <= set(measured)
    errors = {name: mode["process"]["total_bytes"] / mode["measured_bytes"] - 1 for name, mode in measured.items()}
    assert all(-0.03 <= error <= 0.1 for error in errors.values()), errors
    assert found["largest_batch"] > 64


@pytest.mark.full
@pytest.mark.timeout(300)
def test_peaks_of_two_devices_are_near_the_predicted_ones(tmp_path, monkeypatch):
    """These peaks come from the workspaces of TensorFlow's own convolutions, of two threads at once.

    So they hardly vary, but threads on busy cores run some step in an order that can't be predicted: one with
    recompute=blocks was 6.8% above the others. So the prediction is compared with the median and the largest of
    five.
    """
    for name, value in {**USE_TRACED_ALLOCATOR, "TF_ENABLE_ONEDNN_OPTS": "0"}.items():
        monkeypatch.setenv(name, value)
    # A process of its own: TensorFlow reads these variables once.
    flags = ("--model=classic_cnn", "--batch_size=64", "--num_towers=2")
    with started("-m", "tests.launch.forecast.two_devices_program", *flags, cwd=tmp_path) as process:
        end = ended(process, limit_seconds=280)
    assert end.code == 0, end.err
    errors = json.loads(end.out.splitlines()[-1])
    assert len(errors) == 3
    assert all(
        beside_median >= -0.03 and beside_largest <= 0.1 for beside_median, beside_largest in errors.values()
    ), errors
