"""How every program here begins and ends: absl flags in, one line for a user's mistake, a documented exit code.

0   done
1   a fault of the program: a traceback stands above
2   the user asked for what can't be done: one line says what, why and the way out
3   --verify found a difference above the tolerance, or launch.benchmark --compare a regression
4   training met a loss or gradient that is not finite, under --on_nan=stop
5   another process of the run was lost, did not answer or never came
75  interrupted by SIGTERM or SIGINT, everything saved: the same command goes on from there
"""

import functools
import logging
import os
import sys
from collections.abc import Callable

from absl import app, flags

from strategies.errors import NonFiniteStep, PeerLost
from towers.errors import UserError

DONE, USER_ERROR, DIFFERS, NOT_FINITE, PEER_LOST, INTERRUPTED = 0, 2, 3, 4, 5, 75
_CODES = {UserError: USER_ERROR, NonFiniteStep: NOT_FINITE, PeerLost: PEER_LOST}
# What needs no traceback: a line says it all.
EXPECTED = tuple(_CODES)


def run(
    main: Callable[[list[str]], int | None], *, takes_command: bool = False, takes_operand: bool = False
) -> None:
    """absl's app.run, with what `EXPECTED` holds as one line on stderr and its exit code.

    Args:
      main: gets the program's name, and after it the operand or the words behind a lone --, where there are any.
      takes_command: whether there may be such words.
      takes_operand: whether there may be one argument that is no flag.
    """

    def guarded(arguments):
        # TFDS and Keras warn through it of what our own errors say in one line.
        logging.getLogger("absl").setLevel(logging.ERROR)
        try:
            return main(arguments)
        except EXPECTED as error:
            return fail(error)

    app.run(
        guarded,
        flags_parser=functools.partial(parse_flags, takes_command=takes_command, takes_operand=takes_operand),
    )


def parse_flags(arguments: list[str], *, takes_command: bool = False, takes_operand: bool = False) -> list[str]:
    """absl's parser, a mistake in one line; --help as ever."""
    end = arguments.index("--") if takes_command and "--" in arguments else len(arguments)
    try:
        rest = flags.FLAGS(arguments[:end])
    except flags.Error as error:
        sys.exit(fail(error))
    if len(rest) > 1 + takes_operand:
        before = "; put -- before the command" if takes_command else ""
        sys.exit(fail(f"argument {rest[1 + takes_operand]!r} is no flag: flags begin with --, see --help{before}"))
    return rest + arguments[end + 1 :]


def fail(error: object) -> int:
    """Prints one line and returns the exit code for it."""
    _say("error", error)
    return _CODES.get(type(error), USER_ERROR)


def warn(about: object) -> None:
    """Prints one line."""
    _say("warning", about)


def _say(kind: str, what: object) -> None:
    program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    print(f"{program}: {kind}: {' '.join(str(what).split())}", file=sys.stderr, flush=True)
