"""Slurm's short forms written out: 'node[8-10,12],login' as its hosts, '2(x3),1' as its counts.

`scontrol show hostnames` does the former too, but a container or a compute node may have no scontrol.
"""

import itertools
import re
from collections.abc import Iterator

# Slurm itself expands no more.
MAX_HOSTS = 65536

# Commas within brackets part ranges, others part names.
_NAME = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+")
_NAMES = re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Every host of a list in the order of the list: Slurm's own, in which node10 comes after node2.

    Raises:
      ValueError: it is no list of hosts.
    """
    if not _NAMES.fullmatch(text):
        raise ValueError("a list of hosts is written as node[1-3,7],login")
    hosts = itertools.chain.from_iterable(_hosts_of_name(name) for name in _NAME.findall(text))
    return tuple(_at_most(MAX_HOSTS, hosts, "hosts"))


def expand_counts(text: str) -> tuple[int, ...]:
    """The count of each node: '2(x3),1' is (2, 2, 2, 1).

    Raises:
      ValueError: it is no list of counts.
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError("counts are written as 2(x3),1")
    counts = (itertools.repeat(int(match[1]), int(match[2] or 1)) for match in matches)
    return tuple(_at_most(MAX_HOSTS, itertools.chain.from_iterable(counts), "counts"))


def _hosts_of_name(name: str) -> Iterator[str]:
    """The hosts of one name with any number of brackets in it."""
    # Texts and the insides of brackets by turns, a text first and last.
    parts = _BRACKETS.split(name)
    texts, groups = parts[::2], [tuple(_numbers(inside)) for inside in parts[1::2]]
    # As Slurm counts: the last bracket runs fastest, then the first, the second and so on.
    order = [*reversed(range(len(groups) - 1)), *range(len(groups))[-1:]]
    for chosen in itertools.product(*(groups[place] for place in order)):
        numbers = dict(zip(order, chosen, strict=True))
        yield texts[0] + "".join(numbers[place] + text for place, text in enumerate(texts[1:]))


def _numbers(inside: str) -> Iterator[str]:
    """What '8-10,12' stands for, each number as wide as the first of its range."""
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{inside}] is no list of numbers and ranges as [1-3,7]")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"the range {part} runs backwards")
        numbers = range(int(first), int(last) + 1)
        yield from _at_most(MAX_HOSTS, (f"{number:0{len(first)}d}" for number in numbers), "hosts")


def _at_most(limit: int, values: Iterator, what: str) -> Iterator:
    """The values; ValueError at the first beyond the limit."""
    for number, value in enumerate(values):
        if number == limit:
            raise ValueError(f"these are more than {limit} {what}")
        yield value
