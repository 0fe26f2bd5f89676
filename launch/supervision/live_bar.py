"""One progress bar for a whole cluster, drawn from the progress lines of one of its processes."""

import re

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# The line that strategies/reports/progress_display.py prints when its output is not a terminal.
_PROGRESS_LINE = re.compile(r"step (\d+)/(\d+)  (.*)")


class LiveBar:
    """Appears at the bottom of a terminal with the first progress line; is redrawn for each line."""

    def __init__(self, console: Console):
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            auto_refresh=False,  # it would need a thread
            # Everything is printed through the console anyway.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = None

    def takes(self, line: str) -> bool:
        """Shows the line in the bar if it is a progress line; returns whether it is."""
        found = _PROGRESS_LINE.fullmatch(line)
        if found is None:
            return False
        step, last_step, numbers = int(found[1]), int(found[2]), found[3]
        if self._task is None:
            self._task = self._bar.add_task("", total=last_step, numbers=numbers)
            self._bar.start()
        self._bar.update(self._task, completed=step, total=last_step, numbers=numbers, refresh=True)
        return True

    def close(self) -> None:
        """Leaves the bar on the terminal as it is; later lines appear below it."""
        if self._task is not None:
            self._bar.stop()
