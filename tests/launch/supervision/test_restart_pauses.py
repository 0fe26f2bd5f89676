"""How long the launcher waits before it restarts a cluster that fails again and again."""

from launch.supervision.restart_pauses import STABLE_SECONDS, RestartPauses


def test_failures_that_follow_each_other_wait_longer_and_longer():
    pauses = RestartPauses()
    assert [pauses.after(lived_seconds=1.0) for _ in range(8)] == [0, 2, 4, 8, 16, 30, 30, 30]


def test_what_lived_for_a_while_is_restarted_at_once():
    pauses = RestartPauses()
    lives = (1.0, 1.0, STABLE_SECONDS, 1.0, STABLE_SECONDS + 1.0, STABLE_SECONDS + 1.0)
    assert [pauses.after(lived_seconds=lived) for lived in lives] == [0, 2, 0, 2, 0, 0]
