"""The table that compares our kernels with TensorFlow's: medians over the rounds, and which are slower."""

from launch.benchmark import in_words
from launch.measuring.case import Case, Work
from launch.measuring.plots import save_plots
from launch.measuring.results import results
from launch.measuring.tables import ratios, table


def measured(*ratios_: float) -> dict:
    """A round in which kernel i takes `ratios_[i]` times TensorFlow's 2 ms; all kernels but the last are on."""
    last = len(ratios_) - 1
    return {
        "peak_memory_bytes": 1,
        "kernels": [
            {"kernel": f"k{i}", "on": i < last, "ours_ms": 2 * ratio, "tensorflow_ms": 2.0, "ratio": ratio}
            for i, ratio in enumerate(ratios_)
        ],
    }


ROUNDS = [measured(0.5, 1.25, 3.0), measured(0.25, 1.25, 3.0), measured(1.0, 1.25, 3.0)]
CASE = Case("kernels, float32", Work("kernels", 1, "layers", 64), ())


def test_the_table_has_a_line_for_each_kernel_and_nothing_else(tmp_path):
    found = results([CASE], {CASE.name: ROUNDS}, {})
    lines = table(found)
    assert lines[2:] == [
        "| k0 | float32 | on | 1 | 2 | 0.50 |",
        "| k1 | float32 | on | 2.5 | 2 | 1.25 |",
        "| k2 | float32 | off | 6 | 2 | 3.00 |",
    ]
    assert ratios(found) == []
    assert save_plots(found, tmp_path) == []


def test_a_round_names_the_kernels_that_are_on_and_slower():
    assert in_words(ROUNDS[0]) == "3 kernels, slower than TensorFlow's: k1"
