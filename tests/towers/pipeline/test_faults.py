"""Faults of a schedule are found, named and marked in its drawing."""

import pytest

from tests.towers.user_errors import refused
from towers.pipeline.builders import build, gpipe, one_forward_one_backward, zb_h1
from towers.pipeline.faults import check, find_faults
from towers.pipeline.grid import draw
from towers.pipeline.schedule_csv import parse


def written(*lines: str):
    """The schedule of these lines of CSV, with its faults."""
    return parse("\n".join(lines), "test").schedule


def faults_of(*lines: str) -> list[tuple]:
    return [(fault.device, fault.position, fault.message) for fault in find_faults(written(*lines))]


@pytest.mark.parametrize(
    "lines, device, position, parts",
    [
        (("F0,F1,B0,B0,B1",), 0, 3, ["B0 comes a second time", "remove"]),
        (("F0,F1,B1",), 0, None, ["B0 is missing", "F and B of microbatches 0 to 1", "add it"]),
        (("F1,B1",), 0, None, ["F0 is missing", "microbatches 0 to 1"]),
        (("F0,F1,B0,W0,B1",), 0, None, ["W1 is missing", "F, B and W"]),
        (("B0,F0",), 0, 0, ["B0 stands before F0, which it needs", "swap"]),
        (("F0,W0,B0",), 0, 1, ["W0 stands before B0"]),
        (("0F0,0B0,1F0", "1B0"), 1, 0, ["1B0 belongs to stage 1, which has actions on device 0", "to device 0"]),
        (("0F0,0B0,1B0", "1F0,1F1"), 0, 2, ["1B0 belongs to stage 1, which has actions on device 1"]),
        (("0F0,0B0", "2F0,2B0"), None, None, ["stage 1 has no action", "stages 0 to 2"]),
    ],
)
def test_the_first_fault(lines, device, position, parts):
    found = faults_of(*lines)[0]
    assert found[:2] == (device, position)
    for part in parts:
        assert part in found[2]


def test_devices_that_wait_for_each_other():
    """Device 0 wants B0 before F1, device 1 F1 before B0."""
    found = faults_of("F0,B0,F1,B1", "F0,F1,B0,B1")
    assert [(device, position) for device, position, _ in found] == [(0, 1), (1, 1)]
    assert found[0][2].startswith(
        "B0 waits forever for B0 of device 1, which stands behind F1 there, and F1 waits"
    )
    assert found[1][2].endswith("which stands behind B0 there, and B0 waits too: move F1 before it")


def test_a_device_that_only_waits_for_others_is_not_at_fault():
    found = faults_of("F0,B0,F1,B1", "F0,F1,B0,B1", "F0,B0,F1,B1")
    assert [(device, position) for device, position, _ in found] == [(0, 1), (1, 1)]


def test_a_limit_on_the_microbatches_alive():
    schedule = gpipe(2, 3)
    assert not find_faults(schedule, max_alive=3)
    found = find_faults(schedule, max_alive=2)
    assert [(fault.device, fault.position) for fault in found] == [(0, 2), (1, 2)]
    assert found[0].message == "F2 makes 3 microbatches alive: the limit is 2; move a B before it"
    assert not find_faults(one_forward_one_backward(2, 3), max_alive=2)
    assert "move a W before it" in find_faults(zb_h1(3, 3), max_alive=2)[0].message


def test_check_says_where():
    check(gpipe(2, 2))
    with refused("schedule, device 1: F1 is missing", "(and other faults)"):
        check(written("F0,F1,B0,B1", "F0,B0"))
    with refused("schedule: stage 1 has no action"):
        check(written("0F0,0B0", "2F0,2B0"))


def test_one_typing_error_does_not_list_a_million_actions():
    assert len(faults_of("F0,F999999,B0")) == 20
    assert len(faults_of("0F0,0B0", "999999F0")) == 20


def test_a_correct_schedule_is_drawn_with_its_bubble():
    assert draw(one_forward_one_backward(2, 2)).splitlines() == [
        "slot       0  1  2  3  4  5  6  7  8",
        "device 0  F0 F1  .  . B0 ==  . B1 ==",
        "device 1   . F0 B0 == F1 B1 ==  .  .",
        "33.3% of the slots are bubble; most microbatches alive on each device: 2, 1",
    ]


def test_the_drawing_marks_what_is_wrong():
    assert draw(written("F0,B0,F1,B1", "F0,F1,B0,B1")).splitlines()[:4] == [
        "slot        0   1   2   3   4",
        "device 0   F0   . B0! F1? B1?",
        "device 1    .  F0 F1! B0? B1?",
        "! device 0: B0 waits forever for B0 of device 1, which stands behind F1 there, and F1 waits too: "
        "move B0 before it",
    ]


def test_the_drawing_marks_an_action_that_was_played():
    lines = draw(written("F0,F0,B0")).splitlines()
    assert lines[1] == "device 0   F0 F0!  B0  =="
    assert lines[2].startswith("! device 0: F0 comes a second time")


def test_the_drawing_names_a_missing_stage():
    lines = draw(written("0F0,0B0", "2F0,2B0")).splitlines()
    assert "! stage 1 has no action: there are stages 0 to 2; add its actions" in lines


def test_stages_are_drawn_where_devices_have_several():
    assert "3F1" in draw(build("interleaved", num_devices=2, num_stages=4, num_microbatches=2))
