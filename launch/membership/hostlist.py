"""Expands Slurm's short forms: hosts as 'node[8-10,12],login', counts as '2(x3),1'.

`scontrol show hostnames` expands hosts too, but a container or a compute node may have no scontrol.
"""

import itertools
import re
from collections.abc import Iterator

# Slurm's own limit.
MAX_HOSTS = 65536

# A comma within brackets separates ranges; any other comma separates names.
_NAME = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+")
_NAMES = re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a list, in its order. In Slurm's lists node10 follows node2.

    Raises:
      ValueError: `text` is not a list of hosts, or has more than MAX_HOSTS.
    """
    if not _NAMES.fullmatch(text):
        raise ValueError("write a list of hosts as node[1-3,7],login")
    hosts = itertools.chain.from_iterable(_hosts_of_name(name) for name in _NAME.findall(text))
    return tuple(_at_most(MAX_HOSTS, hosts, "hosts"))


def expand_counts(text: str) -> tuple[int, ...]:
    """The count of each node: (2, 2, 2, 1) for '2(x3),1'.

    Raises:
      ValueError: `text` is not a list of counts, or has more than MAX_HOSTS.
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError("write counts as 2(x3),1")
    counts = (itertools.repeat(int(match[1]), int(match[2] or 1)) for match in matches)
    return tuple(_at_most(MAX_HOSTS, itertools.chain.from_iterable(counts), "counts"))


def _hosts_of_name(name: str) -> Iterator[str]:
    """The hosts of one name, which may hold several brackets."""
    # Split into texts and contents of brackets, in turn; the first and the last are texts.
    parts = _BRACKETS.split(name)
    texts, groups = parts[::2], [tuple(_numbers(inside)) for inside in parts[1::2]]
    # Slurm's order: the last bracket changes fastest, then the first, the second and so on.
    order = [*reversed(range(len(groups) - 1)), *range(len(groups))[-1:]]
    for chosen in itertools.product(*(groups[index] for index in order)):
        numbers = dict(zip(order, chosen, strict=True))
        yield texts[0] + "".join(numbers[index] + text for index, text in enumerate(texts[1:]))


def _numbers(inside: str) -> Iterator[str]:
    """The numbers of '8-10,12', each padded with zeros to the width of the first number of its range."""
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{inside}]: write numbers and ranges as [1-3,7]")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"range {part}: the first number is larger than the last")
        numbers = range(int(first), int(last) + 1)
        yield from _at_most(MAX_HOSTS, (f"{number:0{len(first)}d}" for number in numbers), "hosts")


def _at_most(limit: int, values: Iterator, noun: str) -> Iterator:
    """Yields the values; raises ValueError at the first one above the limit."""
    for index, value in enumerate(values):
        if index == limit:
            raise ValueError(f"more than {limit} {noun}")
        yield value
