"""What a parameter-server group reports, and its totals over a run."""

import pytest

from strategies.servers.report_section import ServerFigures, ServersReport, WorkerFigures

MIB = 2**20


def server(name, kept_bytes):
    return ServerFigures(
        name=name, kept_bytes=kept_bytes, pulls=6, pushes=5, sent_bytes=3 * MIB, received_bytes=2 * MIB
    )


def worker(name, steps, seconds, *, taken_over=0, staleness_sum=0, staleness_max=0, failures=0):
    return WorkerFigures(
        name=name,
        steps=steps,
        taken_over=taken_over,
        failures=failures,
        busy_seconds=seconds,
        input_seconds=0.0,
        staleness_sum=staleness_sum,
        staleness_max=staleness_max,
    )


def report(staleness, *workers, turned_away=0, absent=()):
    return ServersReport(
        staleness=staleness,
        turned_away=turned_away,
        absent=absent,
        workers=workers,
        servers=(server("ps:0", 2 * MIB), server("ps:1", MIB)),
    )


FIRST = report({0: 2, 1: 2}, worker("worker:0", 2, 2.0, staleness_sum=2, staleness_max=1))
SECOND = report(
    {1: 1, 3: 3},
    worker("worker:0", 2, 4.0, staleness_sum=6, staleness_max=3),
    worker("worker:1", 2, 1.0, staleness_sum=4, staleness_max=3, failures=1),
    turned_away=2,
    absent=("worker:1",),
)


class TestOneReport:
    def test_metrics_log(self):
        staleness = {"mean": 0.5, "max": 1, "histogram": {"0": 2, "1": 2}}
        assert FIRST.fields() == {"staleness": staleness}

    def test_tensorboard(self):
        assert SECOND.scalars() == {"staleness/mean": 2.5, "staleness/max": 3}
        (tag, values), *others = SECOND.histograms().items()
        assert (tag, values.tolist(), others) == ("staleness", [1, 3, 3, 3], [])

    def test_without_staleness(self):
        synchronous = report({}, worker("worker:0", 2, 2.0))
        assert synchronous.fields() == synchronous.scalars() == synchronous.histograms() == {}

    def test_parts_of_others(self):
        synchronous = report({}, worker("worker:0", 4, 2.0, taken_over=2), worker("worker:1", 0, 0.0, failures=1))
        assert synchronous.progress_line().endswith(
            "worker:0 4 steps, 2 for others  worker:1 0 steps, lost 1 times"
        )
        totals = synchronous.new_totals()
        for _ in range(2):
            totals.add(synchronous)
        assert totals.summary()["workers"]["worker:0"]["taken_over"] == 4
        assert "8 steps  4 for others  " in totals.table()[2]

    def test_progress_line(self):
        assert SECOND.progress_line() == (
            "ps:0 3 MiB out 2 in, 6 pulls 5 pushes  ps:1 3 MiB out 2 in, 6 pulls 5 pushes  "
            "worker:0 2 steps, staleness 3.0  worker:1 2 steps, staleness 2.0, lost 1 times  "
            "2 gradients came too late  worker:1 is absent"
        )


class TestTotals:
    @pytest.fixture
    def totals(self):
        totals = FIRST.new_totals()
        totals.add(FIRST)
        totals.add(SECOND)
        return totals

    def test_summary(self, totals):
        summary = totals.summary()
        assert list(summary) == [
            "staleness",
            "turned_away",
            "workers",
            "slowest_worker",
            "servers",
            "fullest_server",
        ]
        assert summary["staleness"] == {"mean": 1.5, "max": 3, "histogram": {"0": 2, "1": 3, "3": 3}}
        assert summary["turned_away"] == 2
        assert summary["workers"]["worker:0"] == {
            "name": "worker:0",
            "steps": 4,
            "taken_over": 0,
            "failures": 0,
            "busy_seconds": 6.0,
            "input_seconds": 0.0,
            "staleness_sum": 8,
            "staleness_max": 3,
            "seconds_per_step": 1.5,
        }
        assert (summary["slowest_worker"], summary["fullest_server"]) == ("worker:0", "ps:0")

    def test_table(self, totals):
        servers, workers = totals.table()[:2], totals.table()[2:]
        assert [line.split()[0] for line in (*servers, *workers)] == ["ps:0", "ps:1", "worker:0", "worker:1"]
        assert [line.endswith("(fullest)") for line in servers] == [True, False]
        assert [line.endswith("(slowest)") for line in workers] == [True, False]
