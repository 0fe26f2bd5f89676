"""What one check has to say."""

import dataclasses
from collections.abc import Mapping

# What is so, in plain text; a list stands for several.
Fact = str | list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report.

    Attributes:
      facts: what is so, by name, in order.
      problems: what is wrong, each in one line with the way out.
    """

    facts: Mapping[str, Fact]
    problems: tuple[str, ...] = ()


def gib(num_bytes: float) -> str:
    """Bytes as GiB, with one decimal."""
    return f"{num_bytes / 2**30:.1f}"
