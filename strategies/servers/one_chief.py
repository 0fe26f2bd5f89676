"""Refuses a second chief of a run, which would reset all values in the middle of the first chief's run."""

import os
import socket

_LONGEST = 200


def process_name() -> str:
    """This process's name for a person: where to find it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def refusal_of_second(server: str, chief: str) -> str:
    """The error for a second chief.

    Args:
      server: name of the server that refuses it.
      chief: the first chief's `process_name`.
    """
    return (
        f"{server} serves another chief already ({str(chief)[:_LONGEST]}): end that run first, or give this one "
        "servers of its own"
    )
