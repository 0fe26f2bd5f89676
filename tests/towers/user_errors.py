"""Checks the error for a user's mistake: a UserError of one line that contains the value."""

import contextlib

import pytest

from towers.errors import UserError


@contextlib.contextmanager
def refused(*parts: str):
    """Context manager: asserts that its body raises a UserError of one line that contains all of `parts`."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, f"the error has several lines: {message}"
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
