"""The error for users' mistakes, in contrast to errors of the program, and checks of arguments' types."""

import re
from collections.abc import Sequence
from numbers import Integral


class UserError(ValueError):
    """The user asked for something impossible. The message is one line with the value, the rule and the fix.

    The programs in `launch` print it without a traceback. Any other ValueError is an error in code (ours, Keras's,
    the user's own model) and keeps its traceback.
    """

    # Keras appends lines about arguments to exceptions raised in a layer's call, except those with this mark.
    _keras_call_info_injected = True


def check_kind(name: str, value: object, kind: type, fix: str) -> None:
    """Raises UserError if an argument is no instance of its type.

    Args:
      name: name of the argument.
      value: value of the argument.
      kind: its type.
      fix: what to pass, for the message.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        given = f"the class {_written(value)}" if isinstance(value, type) else f"a {_written(type(value))}"
        raise UserError(f"{name} is {given}: must be a {_written(kind)}; {fix}")


def either(words: Sequence[str]) -> str:
    """One or several words as a choice: 'a', 'a or b', 'a, b or c'."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def use_one(words: Sequence[str]) -> str:
    """The advice to take what `either` names: 'use that' if it is one thing, else 'use one of these'."""
    return "use that" if len(words) == 1 else "use one of these"


def counted(count: int, noun: str) -> str:
    """A number of things: '1 tower', '2 towers'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def without_operations(message: str) -> str:
    """A message of TensorFlow without the names of its operations."""
    return re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\].*", "", message)


def is_integer(value: object) -> bool:
    """Whether it is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _written(kind: type) -> str:
    """With the module, because Keras has a Callback, too."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
