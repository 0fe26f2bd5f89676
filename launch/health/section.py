"""The result of one check."""

import dataclasses
from collections.abc import Mapping

# Plain text, or a list of texts.
Fact = str | list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the report.

    Attributes:
      facts: findings by name, in the order of the report.
      problems: one line for each problem, with what to do about it.
    """

    facts: Mapping[str, Fact]
    problems: tuple[str, ...] = ()


def gib(num_bytes: float) -> str:
    """The number in GiB, with one decimal."""
    return f"{num_bytes / 2**30:.1f}"
