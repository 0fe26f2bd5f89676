"""Refuses flags that have no effect with the values of the others."""

import dataclasses
from collections.abc import Callable, Collection, Iterator

from absl import flags

from towers.errors import UserError, either, use_one

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class _Served:
    """Values of a flag, and the flags that have an effect only with these values."""

    flag: str
    values: tuple[str, ...]
    names: tuple[str, ...]

    def has(self, value: str) -> bool:
        return value in self.values or f"{value.partition(':')[0]}:NAME" in self.values


_SERVED: list[_Served] = []
# Functions that say why flags have no effect, each with the names of these flags.
_NEEDS: list[tuple[Callable[[], str], tuple[str, ...]]] = []


def serves(flag: str, values: tuple[str, ...], *names: str) -> None:
    """Notes that flags `names` have an effect only if `flag` has one of `values`; tfds:NAME is any tfds:... ."""
    _SERVED.append(_Served(flag, values, names))


def needs(missing: Callable[[], str], *names: str) -> None:
    """Notes that flags `names` have an effect only under a condition.

    Args:
      missing: called once all flags are known; returns '' if the flags have an effect, otherwise why not and what
        to type, as the rest of a line that begins with the flag.
      names: names of the flags.
    """
    _NEEDS.append((missing, names))


def unserved(flag: str, value: str) -> list[str]:
    """Names of the flags that have no effect if `flag` has this value."""
    return [name for served in _SERVED if served.flag == flag and not served.has(value) for name in served.names]


def check_belonging() -> None:
    """Refuses flags on the command line that would have no effect.

    Defaults, a recipe's values and those that a program loaded from a run are allowed.

    Raises:
      UserError: there is such a flag.
    """
    for served in _SERVED:
        if served.has(FLAGS[served.flag].value):
            continue
        for flag in _changed(served.names):
            owners = f"{served.flag}={either(served.values)}"
            raise misplaced(flag.name, served.flag, owners, given=flag.serialize(), use=use_one(served.values))
    for missing, names in _NEEDS:
        for flag in _changed(names):
            if why := missing():
                raise UserError(f"{flag.serialize()} {why}, or omit --{flag.name}")


def _changed(names: Collection[str]) -> Iterator[flags.Flag]:
    """The flags among `names` that have another value than their default on the command line."""
    return (flag for flag in map(FLAGS.__getitem__, names) if flag.present and flag.value != flag.default)


def misplaced(name: str, decider: str, owners: str, *, given: str = "", use: str = "use that") -> UserError:
    """The error for a flag that would have no effect.

    Args:
      name: the flag's name.
      decider: the flag whose value leaves it without effect.
      owners: the setting that it belongs to, for example 'strategy=ps'.
      given: the flag with its value, as it is typed; '' for its name alone.
      use: advice about `owners`.
    """
    return UserError(
        f"{given or f'--{name}'} with --{decider}={FLAGS[decider].value}: it belongs to --{owners}; "
        f"{use}, or omit --{name}"
    )
