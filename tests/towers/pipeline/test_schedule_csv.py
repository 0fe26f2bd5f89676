"""Schedules in files: what is written is read back, and an error names file, line and cell."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as drawn

from tests.towers.user_errors import refused
from towers.errors import UserError
from towers.pipeline.builders import NAMES, build, gpipe
from towers.pipeline.schedule_csv import parse, read, write


@settings(max_examples=40, deadline=None)
@given(drawn.sampled_from(NAMES), drawn.integers(1, 4), drawn.integers(1, 3), drawn.integers(1, 6))
def test_what_is_written_is_read_back(name, devices, each, microbatches):
    stages = devices * (each if name == "interleaved" else 1)
    schedule = build(name, num_devices=devices, num_stages=stages, num_microbatches=microbatches)
    assert read(write(schedule), "file") == schedule


def test_the_text():
    assert write(gpipe(2, 2)) == "F0,F1,B1,B0\nF0,F1,B1,B0\n"
    schedule = build("interleaved", num_devices=1, num_stages=2, num_microbatches=1)
    assert write(schedule) == "0F0,1F0,1B0,0B0\n"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffF0,F1,B1,B0\r\nF0,F1,B1,B0\r\n",
        '# GPipe\n\n"F0","F1","B1","B0"\nF0,F1,B1,B0',
        "F0,F1,,,B1,B0\n,F0, F1 ,B1,B0,,\n,,,\n",
        "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0",
    ],
)
def test_what_spreadsheets_and_people_write(text):
    assert read(text, "file") == gpipe(2, 2)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["pipe.csv: no actions", "one line a device"]),
        ("# nothing\n,,\n", ["pipe.csv: no actions"]),
        ("F0,B0\nF0,X3", ["pipe.csv, line 2, cell 2: 'X3' is no action", "such as F3"]),
        ("F0;B0", ["line 1, cell 1: 'F0;B0'", "separate cells by commas"]),
        ("f0,B0", ["'f0' is no action"]),
        ("F-1,B0", ["'F-1'"]),
        ("F\u0663,B0", ["is no action"]),
        ("F" + "9" * 5000, ["is no action"]),
        ("1F0,1B0\n0F0,,B0", ["line 2, cell 3: B0 names no stage", "every cell names its stage or none", "1B0"]),
        # Empty lines and cells count, so that an editor finds the cell.
        ("\nF0,,B0,\n\nB0,F0", ["pipe.csv, line 4, cell 1: B0 stands before F0"]),
        ("F0,B0\nF0", ["pipe.csv, line 2: B0 is missing"]),
        ("0F0,0B0\n2F0,2B0", ["pipe.csv: stage 1 has no action"]),
    ],
)
def test_what_is_refused(text, parts):
    with refused(*parts):
        read(text, "pipe.csv")


def test_a_limit_names_the_cell():
    text = write(gpipe(2, 3))
    assert read(text, "file", max_alive=3) == gpipe(2, 3)
    with refused("file, line 1, cell 3: F2 makes 3 microbatches alive: the limit is 2"):
        read(text, "file", max_alive=2)


def test_a_wrong_schedule_can_be_parsed_for_drawing():
    assert parse("B0,F0", "file").schedule.num_microbatches == 1


@settings(max_examples=60, deadline=None)
@given(drawn.text(alphabet="FBW012,\n x", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        read(text, "file")
    except UserError as error:
        assert "\n" not in str(error)
