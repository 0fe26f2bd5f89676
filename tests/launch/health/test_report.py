"""The report as text and as JSON."""

import json

from launch.health.report import as_json, as_text
from launch.health.section import Section

REPORT = {
    "devices": Section(facts={"CPUs": ["one", "two"], "memory": "3"}),
    "disk": Section(facts={"directory": "a\nb"}, problems=("disk: full; make\nroom", "disk: slow; wait")),
}


def test_text():
    assert as_text(REPORT) == (
        "devices\n"
        "  CPUs       one\n"
        "             two\n"
        "  memory     3\n"
        "\n"
        "disk\n"
        "  directory  'a\\nb'\n"
        "\n"
        "problems:\n"
        "  'disk: full; make\\nroom'\n"
        "  disk: slow; wait\n"
    )


def test_text_without_problems():
    assert as_text({"devices": REPORT["devices"]}).endswith("\n\nproblems: none\n")


def test_json():
    assert json.loads(as_json(REPORT)) == {
        "facts": {"devices": {"CPUs": ["one", "two"], "memory": "3"}, "disk": {"directory": "a\nb"}},
        "problems": ["disk: full; make\nroom", "disk: slow; wait"],
    }
