"""Checks of the fields of tasks, data sets and networks."""

from towers.errors import UserError


def check_at_least_1(holder: object, *fields: str) -> None:
    """Raises UserError for the first of the named fields that is below 1."""
    for field in fields:
        if getattr(holder, field) < 1:
            raise UserError(f"{field}={getattr(holder, field)}: must be at least 1")
