"""The engine of a mode of several processes: TensorFlow's strategy, or this project's own exchange."""

import dataclasses
from collections.abc import Sequence

from towers.errors import UserError

TENSORFLOW, OWN = "tensorflow", "own"
# The values for users: 'auto' is TensorFlow's engine, or ours where an option needs it.
ENGINES = ("auto", TENSORFLOW, OWN)


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """The engine of a run.

    Attributes:
      name: TENSORFLOW or OWN.
      reason: why, as the rest of the sentence 'engine tensorflow (...): '.
    """

    name: str
    reason: str

    def notice(self, carrier: str) -> str:
        """The line for the user at the start of a run; `carrier` names the class that trains."""
        return f"engine: {self.name} ({carrier}), {self.reason}"


def check_engine(asked: str) -> None:
    """Raises UserError for a name that is not in ENGINES."""
    if asked not in ENGINES:
        raise UserError(f"engine={asked!r} is unknown: use one of {', '.join(ENGINES)}")


def choose_engine(asked: str, needs_own: Sequence[str], carrier: str) -> EngineChoice:
    """Chooses the engine from the user's request.

    Args:
      asked: one of ENGINES.
      needs_own: settings that TensorFlow's engine does not support, such as 'all_reduce=tcp'.
      carrier: name of TensorFlow's strategy.

    Raises:
      UserError: the name is unknown, or is 'tensorflow' with a setting that this engine does not support.
    """
    check_engine(asked)
    if asked == OWN:
        return EngineChoice(OWN, "as asked")
    if not needs_own:
        return EngineChoice(TENSORFLOW, "as asked" if asked == TENSORFLOW else "the default")
    if asked == TENSORFLOW:
        raise UserError(
            f"engine='tensorflow': {carrier} cannot serve {needs_own[0]}; use engine='auto' or omit engine"
        )
    return EngineChoice(OWN, f"because {carrier} cannot serve {needs_own[0]}")
