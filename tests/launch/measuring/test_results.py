"""The figures of a benchmark's rounds, and the comparison of two benchmarks."""

import dataclasses
import json

import pytest

from launch.measuring.case import Case, Work
from launch.measuring.comparison import changes, not_compared, only_in_one
from launch.measuring.plots import save_plots
from launch.measuring.results import FIRST_STEP, MEMORY, RATE, figure, load, results, save
from launch.measuring.tables import ratios, table
from tests.towers.user_errors import refused

SPLIT = {"input": 0.1, "compute": 0.7, "communication": 0.2}


def case(name: str, strategy="towers", count=2, *, precision="float32", is_peer=False, **work) -> Case:
    return Case(name, Work(strategy, count, "tiny", 64, precision, **work), ("true",), is_peer=is_peer)


def measured(rate: float, **more) -> dict:
    return {RATE: rate, FIRST_STEP: 2.0, MEMORY: 2**30, **more}


def found(**rates) -> dict:
    """A benchmark of two towers, one tower and a peer, each with the given rate in each round."""
    cases = [case("two"), case("one", count=1), case("peer", "other", is_peer=True)]
    rounds = {name: [measured(rate, time=SPLIT) for rate in own] for name, own in rates.items()}
    rounds |= {"peer": [{RATE: rate} for rate in rates["peer"]]}
    return results(cases, rounds, {"machine": "this"})


def test_a_figure_has_the_spread_of_its_rounds():
    assert figure([4.0, 1.0, 7.0]) == {
        "median": 4.0,
        "min": 1.0,
        "max": 7.0,
        "standard_error": pytest.approx(3**0.5),
    }
    assert figure([5.0]) == {"median": 5.0, "min": 5.0, "max": 5.0, "standard_error": None}


def test_efficiency_is_relative_to_one_tower_on_the_same_work():
    cases = [case("two"), case("one", count=1), case("half", precision="bfloat16")]
    whole = results(cases, {"two": [measured(150)], "one": [measured(100)], "half": [measured(300)]}, {})
    assert [one["efficiency"] for one in whole["cases"]] == [1.5, 1.0, None]


def test_figures_that_a_case_does_not_measure_are_omitted():
    peer = found(two=[3.0], one=[2.0], peer=[1.0])["cases"][2]
    assert list(peer["figures"]) == [RATE]
    assert peer["time"] is None


def test_load_returns_what_save_wrote(tmp_path):
    whole = found(two=[3.0, 4.0], one=[2.0, 2.5], peer=[1.0, 1.5])
    save(whole, tmp_path / "benchmark.json")
    assert load(str(tmp_path / "benchmark.json")) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "has version None"),
        ('{"version": 99}', "has version 99"),
    ],
)
def test_a_file_that_is_not_a_benchmark_is_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with refused(str(path), words):
        load(str(path))


def test_the_table_and_the_ratios():
    whole = found(two=[300.0, 340.0, 310.0], one=[200.0] * 3, peer=[155.0] * 3)
    assert table(whole)[2] == (
        "| two | tiny, 64 | 310 | 300 - 340 | 12.0 |  | 2.00 | 1024 | 1.55 | 10.0% | 70.0% | 20.0% |"
    )
    assert table(whole)[4] == "| peer | tiny, 64 | 155 | 155 - 155 | 0.0 |  |  |  | 0.78 |  |  |  |"
    assert ratios(whole) == ["two / peer: 2.00", "time to first step, two / one: 1.00"]


def test_a_pipelines_rate_is_a_share_of_what_its_bubble_allows():
    cases = [case("pipe", "pipeline", allowed_speedup=1.6), case("one", count=1)]
    both = results(cases, {"pipe": [measured(120)], "one": [measured(100)]}, {})
    assert "pipe / one: 1.20, 75% of the 1.60 that the bubble allows" in ratios(both)


def test_a_slow_rate_keeps_its_digits():
    whole = results([case("slow")], {"slow": [measured(3.04), measured(3.06)]}, {})
    assert table(whole)[2].startswith("| slow | tiny, 64 | 3.05 | 3.04 - 3.06 | 0.01 |")


def test_both_engines_stand_beside_the_peer_of_as_many_processes():
    cases = [case("one", count=1)]
    for count in (2, 4):
        cases += [case(f"{engine} {count}", "ring", count, engine=engine) for engine in ("tensorflow", "own")]
        cases.append(case(f"keras {count}", "keras ring", count, is_peer=True))
    rates = dict(zip([each.name for each in cases], (1, 300, 200, 100, 60, 40, 20), strict=True))
    found = ratios(results(cases, {name: [{RATE: rate}] for name, rate in rates.items()}, {}))
    assert found == [
        "tensorflow 2 / keras 2: 3.00",
        "own 2 / keras 2: 2.00",
        "tensorflow 4 / keras 4: 3.00",
        "own 4 / keras 4: 2.00",
    ]


def test_the_table_names_the_link_and_the_rows_that_were_left_out():
    left_out = dataclasses.replace(case("peer", is_peer=True), left_out="it has no tiny")
    whole = results([case("two", link="1gbit"), left_out], {"two": [measured(3.0)], "peer": []}, {})
    assert whole["cases"][0]["link"] == "1gbit"
    assert table(whole)[2].startswith("| two | tiny, 64, 1gbit | 3 |")
    assert table(whole)[3:] == ["", "peer: not measured, it has no tiny"]


def test_a_plot_without_data_is_not_drawn(tmp_path):
    whole = found(two=[300.0, 340.0], one=[200.0, 210.0], peer=[155.0, 160.0])
    saved = save_plots(whole, tmp_path)
    assert [path.name for path in saved] == ["throughput.png", "efficiency.png", "time.png"]
    for path in saved:
        assert path.read_bytes()[:4] == b"\x89PNG"
    only_peer = whole | {"cases": [whole["cases"][2] | {"efficiency": None}]}
    assert [path.name for path in save_plots(only_peer, tmp_path)] == ["throughput.png"]


class TestComparison:
    BEFORE = found(two=[100.0, 102.0, 98.0], one=[50.0, 51.0, 49.0], peer=[10.0])

    def test_differences_within_the_noise_are_not_reported(self):
        assert changes(self.BEFORE, self.BEFORE) == []
        after = found(two=[101.0, 103.0, 99.0], one=[50.0, 51.0, 49.0], peer=[10.0])
        assert changes(self.BEFORE, after) == []

    def test_worse_and_better_figures_are_reported(self):
        after = found(two=[80.0, 82.0, 78.0], one=[60.0, 61.0, 59.0], peer=[10.0])
        worse, better = changes(self.BEFORE, after)
        assert (worse.case, worse.figure, worse.before, worse.after) == ("two", RATE, 100.0, 80.0)
        assert worse.gain == pytest.approx(-0.2)
        assert better.gain == pytest.approx(0.2)
        # Each mean's error is 2 / sqrt(3); Student's t for 4 degrees of freedom is 2.776.
        assert worse.noise == pytest.approx(2.7764 * (2 * 4 / 3) ** 0.5, rel=1e-4)
        assert str(worse) == "two: images_per_second 100 -> 80, 20.0% worse (noise ±4.53)"

    def test_more_time_and_memory_are_worse(self):
        cases, rounds = [case("two")], [measured(100.0), measured(100.0)]
        slower = [one | {FIRST_STEP: 3.0, MEMORY: 2**31} for one in rounds]
        before, after = (results(cases, {"two": own}, {}) for own in (rounds, slower))
        assert [(change.figure, change.gain) for change in changes(before, after)] == [
            (FIRST_STEP, -0.5),
            (MEMORY, -1.0),
        ]

    @pytest.mark.parametrize("rounds", [(1, 1), (1, 3), (3, 1)])
    def test_a_single_round_is_not_compared(self, rounds):
        before, after = (
            results([case("two")], {"two": [measured(rate)] * count}, {})
            for rate, count in zip((100.0, 50.0), rounds, strict=True)
        )
        assert changes(before, after) == []
        (line,) = not_compared(before, after)
        assert line == (
            "two: not compared, the noise of a single round is unknown: measure --rounds=2 or more, both times"
        )

    def test_a_difference_below_a_thousandth_is_none(self):
        before, after = (found(two=[rate] * 3, one=[50.0] * 3, peer=[10.0] * 3) for rate in (100.0, 99.95))
        assert changes(before, after) == []
        assert changes(before, found(two=[99.8] * 3, one=[50.0] * 3, peer=[10.0] * 3)) != []

    @pytest.mark.parametrize(
        "other, words",
        [
            ({"link": "100mbit"}, "link none -> 100mbit"),
            ({"engine": "own"}, "engine  -> own"),
            ({"precision": "bfloat16"}, "precision float32 -> bfloat16"),
            ({"steps": 40}, "steps 0 -> 40"),
        ],
    )
    def test_other_work_is_not_compared(self, other, words):
        before, after = (
            results([case("two", **work)], {"two": [measured(rate)] * 2}, {})
            for work, rate in (({}, 100.0), (other, 50.0))
        )
        assert changes(before, after) == []
        assert not_compared(before, after) == [f"two: not compared, other work: {words}"]
        assert not_compared(before, before) == []

    def test_a_file_without_links_was_measured_without_links(self):
        earlier, later = (
            results([case("two", **work)], {"two": [measured(1.0)]}, {}) for work in ({}, {"link": "1gbit"})
        )
        del earlier["cases"][0]["link"]
        assert not_compared(earlier, later) == ["two: not compared, other work: link none -> 1gbit"]

    def test_rows_of_only_one_benchmark_are_reported(self):
        after = json.loads(json.dumps(self.BEFORE).replace('"two"', '"three"'))
        assert changes(self.BEFORE, after) == []
        assert only_in_one(self.BEFORE, after) == ["two: only in the first", "three: only in the second"]
