"""One progress bar for a whole cluster, drawn from the plain progress lines of one of its processes."""

import re

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# As strategies/reports/progress_display.py prints it where it finds no terminal.
_PROGRESS_LINE = re.compile(r"step (\d+)/(\d+)  (.*)")


class LiveBar:
    """Stands at the bottom of a terminal from the first progress line on; draws when a line comes."""

    def __init__(self, console: Console):
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            auto_refresh=False,  # it would need a thread
            # All that is printed passes through the console anyway.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = None

    def takes(self, line: str) -> bool:
        """Whether the line is one of progress, which the bar then shows."""
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
        """Leaves the bar as it is, above what comes."""
        if self._task is not None:
            self._bar.stop()
