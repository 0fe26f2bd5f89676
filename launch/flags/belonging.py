"""Flags that serve only some values of another flag: with another value they would do nothing, and are refused."""

import dataclasses
from collections.abc import Collection

from absl import flags

from towers.errors import UserError, either, use_one

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class _Served:
    """Values of a flag, and the flags that only these read."""

    flag: str
    values: tuple[str, ...]
    names: tuple[str, ...]

    def has(self, value: str) -> bool:
        return value in self.values or f"{value.partition(':')[0]}:NAME" in self.values


_SERVED: list[_Served] = []
# True for each call of `wait_for_run`.
_WAITING: list[bool] = []


def serves(flag: str, values: tuple[str, ...], *names: str) -> None:
    """Notes that the flags `names` do something only if `flag` has one of `values`; tfds:NAME is any tfds:... ."""
    _SERVED.append(_Served(flag, values, names))


def wait_for_run() -> None:
    """Notes that this program loads the flags of a run, whose task decides what its own flags do."""
    _WAITING.append(True)


def unserved(flag: str, value: str) -> list[str]:
    """Names of the flags that do nothing if `flag` has this value."""
    return [name for served in _SERVED if served.flag == flag and not served.has(value) for name in served.names]


def check_belonging(given: Collection[str] | None = None) -> None:
    """Refuses what is on the command line but does nothing there. Defaults pass, and the values of a recipe.

    Args:
      given: names of the flags on the command line, once those of a run are loaded. None: nothing was loaded, and
        after `wait_for_run` nothing is checked yet.

    Raises:
      UserError: such a flag.
    """
    if given is None and _WAITING:
        return
    for served in _SERVED:
        if served.has(FLAGS[served.flag].value):
            continue
        for flag in map(FLAGS.__getitem__, served.names):
            is_given = flag.present if given is None else flag.name in given
            if is_given and flag.value != flag.default:
                owners = f"{served.flag}={either(served.values)}"
                raise misplaced(flag.name, served.flag, owners, given=flag.serialize(), use=use_one(served.values))


def misplaced(name: str, decider: str, owners: str, *, given: str = "", use: str = "use that") -> UserError:
    """The error of a flag that does nothing.

    Args:
      name: of the flag.
      decider: the flag whose value leaves it without use.
      owners: what it belongs to, for example 'strategy=ps'.
      given: the flag with its value, as it is typed; '' for its name alone.
      use: advice about the owners.
    """
    return UserError(
        f"{given or f'--{name}'} with --{decider}={FLAGS[decider].value}: it belongs to --{owners}; "
        f"{use}, or omit --{name}"
    )
