"""Flags that serve only some values of another flag: with another value they would do nothing, and are refused."""

import dataclasses

from absl import flags

from towers.errors import UserError, either

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class _Served:
    """Values of a flag, and the flags that only these read."""

    flag: str
    values: tuple[str, ...]
    names: tuple[str, ...]


_SERVED: list[_Served] = []


def serves(flag: str, values: tuple[str, ...], *names: str) -> None:
    """Notes that the flags `names` do something only if `flag` has one of `values`; tfds:NAME is any tfds:... ."""
    _SERVED.append(_Served(flag, values, names))


def check_belonging() -> None:
    """Refuses what is on the command line but does nothing there. Defaults pass, and the values of a recipe.

    Raises:
      UserError: such a flag.
    """
    for served in _SERVED:
        chosen = FLAGS[served.flag].value
        if chosen in served.values or f"{chosen.partition(':')[0]}:NAME" in served.values:
            continue
        for flag in map(FLAGS.__getitem__, served.names):
            if flag.present and flag.value != flag.default:
                owners = either(served.values)
                use = "use that" if len(served.values) == 1 else "use one of these"
                raise UserError(
                    f"{flag.serialize()} with --{served.flag}={chosen}: it belongs to --{served.flag}={owners}; "
                    f"{use}, or omit --{flag.name}"
                )
