"""A run has one chief: a second one would set all values anew, in the middle of the first one's run."""

import os
import socket

_LONGEST = 200


def process_name() -> str:
    """This process as a person finds it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def refusal_of_second(server: str, chief: str) -> str:
    """What a second chief is told.

    Args:
      server: name of the server that refuses it.
      chief: the first chief's `process_name`.
    """
    return (
        f"{server} serves another chief already ({str(chief)[:_LONGEST]}): end that run first, or give this one "
        "servers of its own"
    )
