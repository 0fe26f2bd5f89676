"""The named schedules: their drawings, and the arithmetic of the papers that published them."""

import itertools

import pytest

from tests.towers.user_errors import refused
from towers.pipeline.alive import KeptBytes, peak_alive, peak_bytes
from towers.pipeline.builders import NAMES, build, gpipe, interleaved, one_forward_one_backward, zb_h1
from towers.pipeline.faults import find_faults
from towers.pipeline.grid import draw
from towers.pipeline.simulator import simulate
from towers.pipeline.timeline import EQUAL_SECONDS, StageSeconds, Timeline

STAGES, MICROBATCHES = range(1, 6), (1, 2, 3, 4, 5, 8)
SIZES = list(itertools.product(STAGES, MICROBATCHES))


def played(schedule, seconds=EQUAL_SECONDS) -> Timeline:
    return simulate(schedule, [seconds] * schedule.num_stages)


def bubble_seconds(schedule, work_seconds) -> float:
    """The seconds of a step beyond `work_seconds`, for which each device computes."""
    timeline = played(schedule)
    assert timeline.busy_seconds == pytest.approx([work_seconds] * len(schedule.devices))
    return timeline.total_seconds - work_seconds


def drawn(schedule) -> list[str]:
    """The drawn rows of the devices, without the devices' names."""
    return [row[len("device 0") :].split() for row in draw(schedule).splitlines()[1 : 1 + len(schedule.devices)]]


def rows(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def test_gpipe_as_drawn():
    assert drawn(gpipe(3, 4)) == rows(
        "F0 F1 F2 F3  .  .  .  .  .  . B3 == B2 == B1 == B0 ==",
        " . F0 F1 F2 F3  .  .  . B3 == B2 == B1 == B0 ==  .  .",
        " .  . F0 F1 F2 F3 B3 == B2 == B1 == B0 ==  .  .  .  .",
    )


def test_1f1b_as_drawn():
    assert drawn(one_forward_one_backward(3, 4)) == rows(
        "F0 F1 F2  .  .  .  . B0 == F3 B1 ==  . B2 ==  . B3 ==",
        " . F0 F1  .  . B0 == F2 B1 == F3 B2 ==  . B3 ==  .  .",
        " .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 ==  .  .  .  .",
    )


def test_zb_h1_as_drawn():
    """With 4 stages and 8 microbatches it is figure 3 (top) of Qi et al. 2023."""
    assert drawn(zb_h1(3, 4)) == rows(
        "F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3",
        " . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        " .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    )


def test_interleaved_as_drawn():
    assert drawn(interleaved(2, 4, 2)) == rows(
        "0F0 0F1 2F0 2F1   .   . 2B0  ==   . 2B1  == 0B0  == 0B1  ==",
        "  . 1F0 1F1 3F0 3B0  == 3F1 3B1  == 1B0  == 1B1  ==   .   .",
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_size_can_be_run(name):
    for stages, microbatches in SIZES:
        for each in (1, 2, 3) if name == "interleaved" else (1,):
            schedule = build(name, num_devices=stages, num_stages=stages * each, num_microbatches=microbatches)
            assert not find_faults(schedule), (stages, microbatches, each)
            assert (schedule.num_stages, schedule.num_microbatches) == (stages * each, microbatches)
            assert schedule.stage_devices == {stage: stage % stages for stage in range(stages * each)}


@pytest.mark.parametrize("builder", [gpipe, one_forward_one_backward])
def test_bubble_of_gpipe_and_1f1b(builder):
    """(K - 1) / (M + K - 1) of the time for K stages and M microbatches (Huang et al. 2019, section 2.3)."""
    for stages, microbatches in SIZES:
        share = played(builder(stages, microbatches)).bubble_share
        assert share == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_1f1b_holds_fewer_microbatches_than_gpipe():
    for stages, microbatches in SIZES:
        assert peak_alive(gpipe(stages, microbatches)) == (microbatches,) * stages
        assert peak_alive(one_forward_one_backward(stages, microbatches)) == tuple(
            min(stages - stage, microbatches) for stage in range(stages)
        )


@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(each):
    """1 / v of 1F1B's bubble for v stages a device (Narayanan et al. 2021, section 2.2.2)."""
    seconds = StageSeconds(1 / each, 1 / each, 1 / each)
    for devices, groups in itertools.product(STAGES, (1, 2, 3)):
        microbatches = groups * devices
        plain = played(one_forward_one_backward(devices, microbatches))
        timeline = played(interleaved(devices, devices * each, microbatches), seconds)
        assert plain.total_seconds == pytest.approx(3 * (microbatches + devices - 1))
        assert timeline.total_seconds == pytest.approx(3 * microbatches + 3 * (devices - 1) / each)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_interleaving_holds_more_activations(each):
    """L (1 + (p - 1) / (p m)) layers on the first device, m stages a device (Korthikanti et al. 2022, 4.2.3)."""
    for devices in STAGES:
        alive = peak_alive(interleaved(devices, devices * each, 2 * devices))[0]
        layers_in_a_stage = 1 / (devices * each)
        published = 1 + (devices - 1) / (devices * each)
        assert alive * layers_in_a_stage == pytest.approx(published)


def test_interleaved_with_a_part_of_a_group():
    """Microbatches that fill no group take no longer than a full group."""
    for devices, each, microbatches in itertools.product((2, 3), (2, 3), (1, 4, 5)):
        full = microbatches + -microbatches % devices
        seconds = [
            played(interleaved(devices, devices * each, number)).total_seconds for number in (microbatches, full)
        ]
        assert seconds[0] <= seconds[1]


def test_zb_h1_has_a_third_of_the_bubble():
    for stages, microbatches in SIZES:
        if microbatches >= stages:
            work = 3 * microbatches
            ours = bubble_seconds(zb_h1(stages, microbatches), work)
            assert 3 * ours == bubble_seconds(one_forward_one_backward(stages, microbatches), work)


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (2, 3, 1), (1, 2, 1)])
def test_bubbles_with_unequal_times(times):
    """Qi et al. 2023, table 2: (p - 1) (F + B - W) for ZB-H1, (p - 1) (F + B + W) for 1F1B; W <= F, as there."""
    forward, backward, weights = times
    for stages, microbatches in SIZES:
        work = microbatches * sum(times)
        plain = played(one_forward_one_backward(stages, microbatches), StageSeconds(*times))
        assert plain.total_seconds - work == (stages - 1) * sum(times)
        if microbatches >= stages:
            split = played(zb_h1(stages, microbatches), StageSeconds(*times))
            assert split.total_seconds - work == (stages - 1) * (forward + backward - weights)


def test_zb_h1_needs_the_memory_of_1f1b():
    """(p - i) M_B + i M_W on stage i from 0, so at most p M_B (Qi et al. 2023, section 2.3)."""
    kept = KeptBytes(for_backward_bytes=34, for_weights_bytes=32)
    for stages in STAGES:
        ours = peak_bytes(zb_h1(stages, 3 * stages), [kept] * stages)
        plain = peak_bytes(one_forward_one_backward(stages, 3 * stages), [kept] * stages)
        assert ours == tuple((stages - stage) * 34 + stage * 32 for stage in range(stages))
        assert max(ours) == max(plain) == stages * 34


def test_zb_h1_holds_as_many_microbatches_on_each_stage():
    assert peak_alive(zb_h1(4, 8)) == (4, 4, 4, 4)


@pytest.mark.parametrize(
    "name, numbers, parts",
    [
        ("1b1f", (2, 2, 2), ["schedule=1b1f", "gpipe, 1f1b, zb_h1, interleaved"]),
        ("gpipe", (2, 2, 0), ["0 microbatches", "at least 1"]),
        ("zb_h1", (2, 4, 4), ["schedule=zb_h1 with 4 stages on 2 devices", "stages=2", "schedule=interleaved"]),
        ("interleaved", (2, 5, 4), ["5 stages on 2 devices", "stages=6"]),
    ],
)
def test_what_is_refused(name, numbers, parts):
    devices, stages, microbatches = numbers
    with refused(*parts):
        build(name, num_devices=devices, num_stages=stages, num_microbatches=microbatches)
