"""Options that a tower of several devices does not have."""

from towers.errors import UserError
from towers.options import StepOptions


def check_grouped(name: str, options: StepOptions) -> None:
    """Raises UserError for an option of a step that strategy `name` can't serve with such towers."""
    if options.xla:
        raise UserError(f"xla=True with strategy {name!r}: XLA can't compile a tower on several devices; omit xla")
