"""`flag_value` finds what absl would parse."""

import pytest

from launch.flags.flag_in_command import flag_value


@pytest.mark.parametrize(
    "command, value",
    [
        (["--directory=a"], "a"),
        (["-directory=a"], "a"),
        (["--directory", "a"], "a"),
        (["-directory", "a"], "a"),
        (["python", "--directory=a", "--steps=3", "--directory=b"], "b"),
        (["--directory=a", "--directory", "b"], "b"),
        (["--directory=a=b"], "a=b"),
        (["--directory="], ""),
        (["--directory"], None),
        (["--directory_of=a", "--data_directory=a", "directory=a", "---directory=a"], None),
        ([], None),
    ],
    ids=str,
)
def test_the_last_value_given(command, value):
    assert flag_value(command, "directory") == value
