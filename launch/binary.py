"""Start and end of every program here: absl flags, one line for a user's mistake, documented exit codes.

0   done
1   a bug in the program: it printed a traceback
2   a user's mistake: one line names the value, the rule and the fix; also a full disk under the output
3   --verify found a difference above the tolerance, or launch.benchmark --compare a regression
4   a loss or gradient was not finite, with --on_nan=stop
5   another process of the run was lost, did not answer or never connected
75  interrupted by SIGTERM, SIGINT or SIGHUP (a closed terminal): the same command resumes from what was saved
141 nobody reads the output any more, as after `| head`, of a program that only prints; training continues instead
"""

import atexit
import contextlib
import errno
import functools
import gc
import io
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from absl import app, flags

from launch.at_import.ending_signals import EndingSignals
from launch.messages.in_flags import in_flags
from strategies.errors import NonFiniteStep, PeerLost
from strategies.reports.discarded_output import discard_output
from strategies.training.stop_signals import SHELL_SIGNAL_BASE
from towers.errors import UserError

DONE, USER_ERROR, DIFFERS, NOT_FINITE, PEER_LOST, INTERRUPTED = 0, 2, 3, 4, 5, 75
UNREAD = SHELL_SIGNAL_BASE + signal.SIGPIPE
_CODES = {UserError: USER_ERROR, NonFiniteStep: NOT_FINITE, PeerLost: PEER_LOST}
# Error numbers of a write to a full disk, beyond a quota, and beyond a limit on the size of files.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Seconds that a launcher gives a program from SIGTERM to SIGKILL: enough for a step and a checkpoint.
SECONDS_TO_SAVE = 120
# Errors that are reported in one line, without a traceback.
EXPECTED = tuple(_CODES)


def run(
    main: Callable[[list[str]], int | None],
    *,
    takes_command: bool = False,
    takes_operand: bool = False,
    usage: str = "",
    trains: bool = True,
    after_parsing: Callable[[], None] = lambda: None,
) -> None:
    """Runs `main` by absl's app.run. An error of `EXPECTED` becomes one line on stderr and its exit code.

    SIGTERM, SIGHUP or Ctrl-C before training begins also ends the program with one line and an exit code; during
    training the Trainer saves first.

    When the program ends, Python finalizes no objects in reference cycles: `main` must close its files.

    Args:
      main: called with the program's name, followed by the operand or by the command's words, if there are any.
      takes_command: whether a command may follow a lone --.
      takes_operand: whether one argument without dashes is allowed.
      usage: an example of a whole command line, for the error of a command without a lone --.
      trains: whether the same command resumes from a checkpoint if an earlier run has saved one.
      after_parsing: called once the command line is parsed, before devices are configured: it may set other flags.
    """
    _check_current_folder()
    signals = EndingSignals()
    _keep_exit_codes()
    # A terminal's encoding may lack a character of a path. A notebook's stream, or one in memory, lacks none.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")

    def guarded(arguments):
        # TFDS and Keras log warnings through absl about mistakes that our own errors report in one line.
        logging.getLogger("absl").setLevel(logging.ERROR)
        # Objects imported so far live until the end, see launch/at_import/frozen_objects.py.
        gc.freeze()
        try:
            return main(arguments)
        except EXPECTED as error:
            return fail(error)

    # Without it Python's last collection takes 1.3 s after a short training (AMD EPYC, Zen 3).
    atexit.register(gc.freeze)
    parser = functools.partial(
        _parse_flags,
        takes_command=takes_command,
        takes_operand=takes_operand,
        usage=usage,
        after_parsing=after_parsing,
    )
    try:
        with _ended_if_unwritten():
            app.run(guarded, flags_parser=parser)
    except SystemExit as exit:
        signals.end(exit.code if isinstance(exit.code, int) else int(exit.code is not None))
        raise
    except (Exception, KeyboardInterrupt) as error:
        # An interruption may come back as another error, for example through a callback of TensorFlow.
        if signals.name is None and not isinstance(error, KeyboardInterrupt):
            raise
        by = f" by {signals.name}" if signals.name else ""
        resumes = ", from the last checkpoint if there is one" if trains else ""
        _print_line(f"interrupted{by}", f"the same command starts again{resumes}")
        sys.exit(signals.end(INTERRUPTED))


@contextlib.contextmanager
def _ended_if_unwritten() -> Iterator[None]:
    """Context manager: exits without a traceback if stdout can no longer be written.

    Without a reader the program ends quietly, as if SIGPIPE had ended it; on a full disk it ends with one line.
    """
    code: object = None
    try:
        try:
            yield
        except SystemExit as exit:
            code = exit.code
            sys.stdout.flush()
            raise
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            reason = UNREAD
        elif error.errno in _FULL and _is_full(sys.stdout):
            reason = fail(
                f"standard output can't be written ({error.strerror}): make room, or redirect it to another disk"
            )
        else:
            raise
        discard_output(sys.stdout.fileno())
        sys.exit(code or reason)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe or a connection without a reader. A stream in memory is neither."""
    poll = select.poll()
    try:
        poll.register(stream, 0)
    except io.UnsupportedOperation:
        return False
    return bool(poll.poll(0))


def _is_full(stream: TextIO) -> bool:
    """Whether a stream's file takes no more bytes; tries it with an empty line. A stream in memory takes all."""
    try:
        os.write(stream.fileno(), b"\n")
    except io.UnsupportedOperation:
        return False
    except OSError as error:
        return error.errno in _FULL
    return False


def _keep_exit_codes() -> None:
    """Stops ignoring SIGCHLD, which some daemons make their children do: exit codes would be lost."""
    is_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if is_ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _check_current_folder() -> None:
    """Exits with one line if the current folder was removed: relative paths mean nothing there."""
    try:
        os.getcwd()
    except OSError as error:
        sys.exit(fail(f"the current folder can't be found ({error.strerror}): was it removed? cd to another one"))


def _parse_flags(arguments: list[str], *, after_parsing: Callable[[], None], **options: Any) -> list[str]:
    """As `parse_flags`, then calls `after_parsing`, whose errors end the program in one line too."""
    rest = parse_flags(arguments, **options)
    # Then absl ends the program once `app.run` gets the rest.
    if flags.FLAGS.only_check_args:
        return rest
    try:
        after_parsing()
    except EXPECTED as error:
        sys.exit(fail(error))
    return rest


def parse_flags(
    arguments: list[str], *, takes_command: bool = False, takes_operand: bool = False, usage: str = ""
) -> list[str]:
    """Parses flags as absl does, but reports a mistake in one line; returns the other arguments."""
    end = arguments.index("--") if takes_command and "--" in arguments else len(arguments)
    example = f", as in {usage}" if usage else ""
    before = f"; put -- before the command{example}" if takes_command else ""
    try:
        rest = flags.FLAGS(arguments[:end])
    except flags.UnrecognizedFlagError as error:
        # Without -- it may be a flag of the command, as in python -m launch.train.
        sys.exit(fail(f"{error}{before}" if end == len(arguments) else error))
    except flags.Error as error:
        sys.exit(fail(error))
    if len(rest) > 1 + takes_operand:
        sys.exit(fail(f"{no_flag(rest[1 + takes_operand])}{before}"))
    return rest + arguments[end + 1 :]


def no_flag(argument: str) -> str:
    """The error of an argument without -- in a program that takes only flags there."""
    return f"argument {argument!r} is no flag: flags begin with --, see --help"


def fail(error: object) -> int:
    """Prints one line, `error`, and returns its exit code."""
    _print_line("error", error)
    return _CODES.get(type(error), USER_ERROR)


def warn(message: object) -> None:
    """Prints `message` as a warning in one line; to stderr."""
    _print_line("warning", message)


def note(message: object) -> None:
    """Prints `message` as a note in one line; to stderr, because stdout may be read by a program."""
    _print_line("note", message)


def _print_line(kind: str, message: object) -> None:
    program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    # A terminal that was closed must not change the exit code.
    with contextlib.suppress(OSError):
        print(f"{program}: {kind}: {in_flags(' '.join(str(message).split()))}", file=sys.stderr, flush=True)
