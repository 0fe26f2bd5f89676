"""The description that a worker or server gives the chief of itself; computed when the chief first asks.

A thread computes it, because it may read the first batches. A worker that replaces another one is not asked.
"""

import concurrent.futures
import json
import threading
from collections.abc import Callable, Mapping


class Answer:
    """Answers immediately: the chief asks again until the description is ready, so that no call blocks."""

    def __init__(self, run: int, describe: Callable[[], Mapping]):
        """Args:
        run: number of the run in the chief's count.
        describe: returns the description.
        """
        self._run, self._describe = run, describe
        self._found: concurrent.futures.Future | None = None

    def text(self) -> bytes:
        """JSON: the description and 'run'; without 'run' while the description is being computed.

        Raises:
          Exception: `describe` raised it.
        """
        if self._found is None:
            self._found = concurrent.futures.Future()
            threading.Thread(target=self._compute, daemon=True).start()
        if not self._found.done():
            return b"{}"
        return json.dumps({**self._found.result(), "run": self._run}).encode()

    def _compute(self) -> None:
        try:
            self._found.set_result(self._describe())
        except BaseException as error:  # `text` raises it
            self._found.set_exception(error)
