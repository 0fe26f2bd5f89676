"""What a user's mistake must look like: a UserError of one line that holds the value."""

import contextlib

import pytest

from towers.errors import UserError


@contextlib.contextmanager
def refused(*parts: str):
    """Within, a UserError is raised whose one line holds every one of `parts`."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, f"an error of several lines: {message}"
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
