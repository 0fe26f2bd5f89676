"""Ends an import that can't work: in one line in a program of launch/, with an ImportError elsewhere."""

import sys
from typing import NoReturn

from launch.at_import.running_program import running_program

_EXIT_CODE = 2  # `launch.binary.USER_ERROR`; launch.binary is imported later.


def refuse_import(problem: str, name: str) -> NoReturn:
    """Prints the problem and exits; raises ImportError in a program of a user's own.

    Args:
      problem: the value, the rule and the fix, in one line.
      name: name of the module that can't be imported.
    """
    program = running_program()
    if program is None:
        raise ImportError(problem, name=name)
    print(f"{program}: error: {problem}", file=sys.stderr)
    sys.exit(_EXIT_CODE)
