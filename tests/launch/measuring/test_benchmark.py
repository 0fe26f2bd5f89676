"""The benchmark as a user starts it, with real measurements of the smallest network."""

import json
import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import benchmark
from launch.measuring.case import Case, Work
from launch.measuring.results import results, save
from launch.measuring.running import Interrupted
from strategies.errors import PeerLost
from tests.launch.nursery import forked, run_forked
from tests.launch.programs import ended, environment
from tests.towers.user_errors import refused

FLAGS = flags.FLAGS

pytestmark = pytest.mark.timeout(240)
SHORT = ("--rounds=1", "--measured_steps=3", "--network=tiny", "--measured_batch=8")
ROWS = ("--row=towers,1", "--row=ring,2,tiny,8", "--row=ps,1,tiny,8,bfloat16")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    with forked("-m", "launch.benchmark", *ROWS, *SHORT, "--output=found", cwd=folder) as process:
        # Five processes import TensorFlow, one row after another.
        return folder, ended(process, limit_seconds=220)


@pytest.mark.full
def test_it_measures_each_row_and_saves_the_figures(measured):
    folder, done = measured
    assert done.code == 0, done.err
    whole = json.loads((folder / "found" / "benchmark.json").read_text())
    assert (whole["version"], whole["environment"]["versions"]["tensorflow"][:2]) == (1, "2.")
    names = ["towers 1, tiny, 8, float32", "ring 2, tiny, 8, float32", "ps 1, tiny, 8, bfloat16"]
    assert [one["name"] for one in whole["cases"]] == names
    for one in whole["cases"]:
        assert len(one["rounds"]) == 1
        for name in ("images_per_second", "first_step_seconds", "peak_memory_bytes"):
            assert one["figures"][name]["min"] > 0, (one["name"], name)
        assert sum(one["time"].values()) == pytest.approx(1.0, abs=0.05)
    alone, ring, servers = whole["cases"]
    assert (alone["time"]["communication"], alone["efficiency"], servers["efficiency"]) == (0, 1, None)
    assert ring["time"]["communication"] > 0
    # The ring has two processes with TensorFlow, the single tower one.
    assert ring["figures"]["peak_memory_bytes"]["median"] > 1.5 * alone["figures"]["peak_memory_bytes"]["median"]


@pytest.mark.full
def test_one_measurement_runs_on_the_imitated_cpu_too_and_leaves_nothing(tmp_path):
    temporary = pathlib.Path(environment()["TMPDIR"])
    before = set(temporary.glob("towers-cpuid-*"))
    done = run_forked(
        *("-m", "launch.benchmark", "--measure=profile", "--isa=avx2", "--num_towers=1", *SHORT), cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["largest_instructions"] == "AVX2"
    assert set(temporary.glob("towers-cpuid-*")) == before


@pytest.mark.full
def test_synced_statistics_are_measured_beside_the_average_in_one_process(tmp_path):
    done = run_forked("-m", "launch.benchmark", "--measure=batch_stats", "--num_towers=2", *SHORT, cwd=tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["average_images_per_second"] > 0 < found["synced_images_per_second"]
    assert found["synced_rate"] > 0 < found["synced_cpu_time"]


def test_a_precision_that_the_imitated_cpu_can_not_compute(tmp_path):
    done = run_forked(
        *("-m", "launch.benchmark", "--measure=step", "--isa=avx2", "--precision=bfloat16", *SHORT), cwd=tmp_path
    )
    assert done.code == 2
    assert "--isa=avx2 with --precision=bfloat16" in done.err.splitlines()[-1]


@pytest.mark.parametrize("rows", ["--row=towers,2", "--group=ring"])
def test_one_measurement_with_rows_is_refused(tmp_path, rows):
    done = run_forked("-m", "launch.benchmark", "--measure=step", rows, cwd=tmp_path)
    assert done.code == 2
    assert f"--measure=step with {rows.partition('=')[0]}: " in done.err.splitlines()[-1]


@pytest.mark.full
def test_the_table_and_the_plots_are_saved_too(measured):
    folder, done = measured
    written = (folder / "found" / "benchmark.md").read_text()
    assert written.strip() in done.out
    assert "saved in found" in done.out
    pictures = sorted(path.name for path in (folder / "found").glob("*.png"))
    assert pictures == ["efficiency.png", "throughput.png", "time.png"]


@pytest.mark.full
def test_a_profile_divides_the_cpu_time_of_a_step_between_the_kinds_of_its_operations(tmp_path):
    profile = ("-m", "launch.benchmark", "--measure=profile", "--num_towers=2", "--measured_batch=64")
    done = run_forked(*profile, *SHORT[1:3], cwd=tmp_path)
    assert done.code == 0, done.err
    *_, line = done.out.splitlines()
    found = json.loads(line)
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert {"convolutions, forward", "convolutions, gradients of kernels"} <= set(found["shares"])
    assert f"| all | {1e3 * found['cpu_seconds_per_step']:.1f} |  |" in done.out


@pytest.mark.full
def test_compare_ends_with_exit_code_3_if_a_figure_is_worse(tmp_path):
    for name, rates in (("fast.json", (1010.0, 990.0)), ("slow.json", (905.0, 895.0))):
        row = Case("towers 1", Work("towers", 1, "tiny", 8), ())
        save(results([row], {row.name: [{"images_per_second": rate} for rate in rates]}, {}), tmp_path / name)
    fast, slow = (str(tmp_path / name) for name in ("fast.json", "slow.json"))
    orders = (["--compare", fast, slow], ["--compare", fast, slow, "--worse_by=0.2"], ["--compare", slow, fast])
    worse, tolerated, better = (run_forked("-m", "launch.benchmark", *order, cwd=tmp_path) for order in orders)
    found = "towers 1: images_per_second 1000 -> 900, 10.0% worse (noise ±69.1)"
    assert worse.out.splitlines() == [found, "1 differences beyond the noise, 1 worse by more than 5%"]
    assert [done.code for done in (worse, tolerated, better)] == [3, 0, 0]


def test_each_round_measures_every_row_and_is_saved(tmp_path, monkeypatch):
    path, found = tmp_path / "benchmark.json", []

    def saved_rounds() -> list[int]:
        return [len(one["rounds"]) for one in json.loads(path.read_text())["cases"]] if path.exists() else []

    def run_case(row: Case, **_) -> dict:
        found.append((row.name, saved_rounds()))
        return {"images_per_second": float(len(found))}

    monkeypatch.setattr(benchmark, "run_case", run_case)
    monkeypatch.setattr(benchmark, "environment_now", dict)
    if not FLAGS.is_parsed():
        FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(rounds=2):
        rows = [Case(name, Work("towers", 2, "tiny", 8), ()) for name in "ab"]
        left_out = Case("c", Work("towers", 2, "tiny", 8), (), left_out="it can't")
        benchmark.measure([*rows, left_out], tmp_path, lambda: False)
    assert found == [("a", []), ("b", [1]), ("a", [1, 1]), ("b", [2, 1])]
    whole = json.loads(path.read_text())
    assert whole["left_out"] == {"c": "it can't"}
    rates = [[one["images_per_second"] for one in case["rounds"]] for case in whole["cases"]]
    assert rates == [[1.0, 3.0], [2.0, 4.0]]


def test_a_row_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    found = []

    def run_case(row: Case, **_) -> dict:
        found.append(row.name)
        if row.name == "a":
            raise PeerLost("a: towers failed")
        return {"images_per_second": 1.0}

    monkeypatch.setattr(benchmark, "run_case", run_case)
    monkeypatch.setattr(benchmark, "environment_now", dict)
    if not FLAGS.is_parsed():
        FLAGS.mark_as_parsed()
    rows = [Case(name, Work("towers", 2, "tiny", 8), ()) for name in "ab"]
    with flagsaver.flagsaver(rounds=2), pytest.raises(PeerLost, match="^a: towers failed$"):
        benchmark.measure_and_report(rows, tmp_path)
    assert found == ["a", "b", "b"], "it is not tried again"
    assert "round 1: a: towers failed; further rounds skip it" in capsys.readouterr().out
    (measured,) = json.loads((tmp_path / "benchmark.json").read_text())["cases"]
    assert (measured["name"], len(measured["rounds"])) == ("b", 2)


class TestEndedEarly:
    """A benchmark of two rows that ends in the third measurement, which is the first row's second round."""

    def ended(self, monkeypatch, folder, error: Exception, num_measured: int = 2) -> int:
        measured = []

        def run_case(row: Case, **_) -> dict:
            if len(measured) == num_measured:
                raise error
            measured.append(row.name)
            return {"images_per_second": float(len(measured))}

        monkeypatch.setattr(benchmark, "run_case", run_case)
        monkeypatch.setattr(benchmark, "environment_now", dict)
        if not FLAGS.is_parsed():
            FLAGS.mark_as_parsed()
        rows = [Case(name, Work("towers", 2, "tiny", 8), ()) for name in "ab"]
        return benchmark.measure_and_report(rows, folder)

    def test_an_interruption_keeps_the_complete_rows_and_their_table(self, monkeypatch, tmp_path, capsys):
        assert self.ended(monkeypatch, tmp_path, Interrupted()) == 75
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "benchmark.json",
            "benchmark.md",
            "throughput.png",
        ]
        assert [len(one["rounds"]) for one in json.loads((tmp_path / "benchmark.json").read_text())["cases"]] == [
            1,
            1,
        ]
        said = capsys.readouterr()
        assert "saved in" in said.out
        assert said.err.count("\n") == 1

    def test_a_row_that_fails_does_too(self, monkeypatch, tmp_path, capsys):
        with pytest.raises(PeerLost):
            self.ended(monkeypatch, tmp_path, PeerLost("a: worker:1 failed"))
        assert (tmp_path / "benchmark.md").exists()
        assert "saved in" in capsys.readouterr().out

    def test_a_table_that_cannot_be_saved_is_printed(self, monkeypatch, tmp_path, capsys):
        (tmp_path / "benchmark.md").mkdir()
        with refused(f"{tmp_path}: can't be written", "--output"):
            self.ended(monkeypatch, tmp_path, Interrupted())
        assert "images/s" in capsys.readouterr().out
        with refused("benchmark.json: can't be written"):
            self.ended(monkeypatch, tmp_path / "nowhere", Interrupted())

    def test_before_the_first_row_there_is_nothing_to_keep(self, monkeypatch, tmp_path, capsys):
        assert self.ended(monkeypatch, tmp_path, Interrupted(), num_measured=0) == 75
        assert not list(tmp_path.iterdir())
        assert "no row was measured" in capsys.readouterr().out


class TestLink:
    RING = Case("ring", Work("ring", 2, "tiny", 8, link="1gbit"), ())
    ALONE = Case("alone", Work("towers", 2, "tiny", 8), ())

    @pytest.mark.parametrize(
        "rows, reason, words",
        [
            ([RING, ALONE], "tc not installed (apt-get install iproute2)", "refused: tc not installed"),
            ([RING], "ip netns add x: Operation not permitted", "run it as root on Linux"),
            ([ALONE], "", "no row has several processes"),
        ],
    )
    def test_without_namespaces_or_links_it_is_refused(self, monkeypatch, rows, reason, words):
        monkeypatch.setattr(benchmark, "why_no_hosts", lambda: reason)
        if not FLAGS.is_parsed():
            FLAGS.mark_as_parsed()
        benchmark.check_link(rows)
        with flagsaver.flagsaver(link="1gbit"), refused("--link=1gbit", words, "omit --link"):
            benchmark.check_link(rows)


@pytest.mark.full
def test_existing_results_are_not_overwritten(tmp_path):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "benchmark.json").touch()
    again = run_forked("-m", "launch.benchmark", *ROWS, *SHORT, "--output=found", cwd=tmp_path)
    assert again.code == 2
    assert "--output=found already contains a benchmark.json; choose another folder" in again.err
    assert (tmp_path / "found" / "benchmark.json").read_text() == ""


MISTAKES = (
    (["--row=towers"], "--row=towers: give STRATEGY[/ENGINE],COUNT"),
    (["--row=fast,2"], "with a strategy of towers"),
    (["--compare", "a.json"], "two files are needed"),
    (["--compare", "a.json", "b.json"], "a.json: No such file"),
    (["--compare", "a.json", "b.json", "c.json"], "argument 'c.json' is no flag"),
    (["a.json", "b.json"], "argument 'b.json' is no flag"),
    (["towers,2"], "argument 'towers,2' is no flag"),
    (["--num_towers=2"], "--num_towers: each row has its own"),
    (["--steps=3"], "--steps has no effect on a row"),
    (["--directory=run"], "--directory has no effect on a row"),
    (["--torch=python"], "--torch needs --peers"),
    (["--row=towers,2", "--peers=."], "--peers: rows of --row have no peers"),
    (["--group=engines_ring", "--processes=2,2"], "--processes=2,2: a number is given twice"),
    (["--measure=servers"], "--measure=servers with --strategy=towers"),
    (["--peers=nowhere"], "--peers=nowhere does not contain keras_step.py"),
)


@pytest.mark.full
def test_each_mistake_is_reported_in_one_line(tmp_path):
    for mistake, words in MISTAKES:
        done = run_forked("-m", "launch.benchmark", *mistake, cwd=tmp_path)
        assert done.code == 2, mistake
        assert words in done.err
        assert len(done.err.splitlines()) == 1
        assert not list(tmp_path.iterdir())
