"""Numbers of bytes are read from text and written as text."""

import pytest

from launch.forecast.byte_text import byte_text, bytes_from, in_unit, unit_for
from tests.towers.user_errors import refused


@pytest.mark.parametrize(
    ("text", "found"), [("16GiB", 2**34), ("1.5 mib", 3 * 2**19), ("80GB", 80 * 10**9), ("7B", 7)]
)
def test_sizes_are_read(text, found):
    assert bytes_from("device_memory", text) == found


@pytest.mark.parametrize("text", ["lots", "16", "-1GiB", "0GiB", "16Gib s", ""])
def test_what_is_no_size_is_refused_in_one_line(text):
    with refused(f"--device_memory={text}", "16GiB"):
        bytes_from("device_memory", text)


@pytest.mark.parametrize("text", ["1025TiB", f"{'9' * 400}GiB"])
def test_more_than_any_device_has_is_refused_in_one_line(text):
    assert bytes_from("device_memory", "1024TiB") == 2**50
    with refused(f"--device_memory={text}", "at most 1024TiB"):
        bytes_from("device_memory", text)


def test_bytes_are_written_with_three_digits():
    assert [byte_text(count) for count in (512, 2**20 * 12.34, 2**30 * 999, 2**50)] == [
        "0.5 KiB",
        "12.3 MiB",
        "999 GiB",
        "1.02e+03 TiB",
    ]


def test_bytes_of_a_table_have_one_unit():
    assert [unit_for(count) for count in (1, 2**20 * 999, 2**30)] == ["KiB", "MiB", "GiB"]
    sizes = (0, 1, 2**20 * 0.25, 2**20 * 9.994, 2**20 * 12.34, 2**20 * 99.96, 2**30)
    assert [in_unit(size, "MiB") for size in sizes] == ["0", "<0.01", "0.25", "9.99", "12.3", "100", "1024"]
