"""Whether the kernels of a TensorFlow package run on a GPU."""

import pytest

from launch.health.compute_capability import how_it_runs, problem_of

# TensorFlow 2.21's package.
BUILT_FOR = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]


@pytest.mark.parametrize(
    "capability, how",
    [
        ((6, 0), "kernels for 6.0"),
        ((7, 5), "kernels for 7.0"),
        ((8, 0), "kernels for 8.0"),
        ((8, 6), "kernels for 8.0"),
        ((8, 9), "kernels for 8.9"),
        ((9, 0), "kernels for 9.0"),
        ((12, 0), "kernels for 9.0, which the driver compiles at the first start: it takes minutes"),
        ((5, 2), ""),
    ],
)
def test_how_kernels_run(capability, how):
    assert how_it_runs(capability, BUILT_FOR) == how


def test_a_binary_does_not_run_on_the_next_generation():
    assert how_it_runs((9, 0), ["sm_80", "sm_89"]) == ""
    assert how_it_runs((8, 0), ["sm_86"]) == ""


def test_the_problem_names_both():
    line = problem_of("Tesla M40", (5, 2), BUILT_FOR)
    assert line.startswith("Tesla M40 has compute capability 5.2, but TensorFlow was built for sm_60, sm_70,")
    assert problem_of("T4", (7, 5), BUILT_FOR) == ""
    assert problem_of("T4", (7, 5), []) == "", "a package that does not say is not blamed"
