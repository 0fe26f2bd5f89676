"""Synchronous steps: which workers take part in the current round, and when it is complete.

A round is one step. With backup workers a round needs only the first `needed` gradients: a later worker's gradient
is turned away, and that worker begins the next round from new parameters (Chen et al. 2016, "Revisiting
distributed synchronous SGD").
"""

import threading


class Rounds:
    """The rounds of a run.

    Attributes:
      done: number of rounds applied, including those of the runs that this one resumes; it is also the step of the
        current round.
      turned_away: number of gradients that came too late.
    """

    def __init__(self, first: int, *, needed: int):
        """Args:
        first: step of the first round.
        needed: number of gradients that complete a round.
        """
        self.done, self.turned_away = first, 0
        self._needed, self._target, self._ended = needed, first, False
        self._begun: set[int] = set()
        self._admitted: set[int] = set()
        self._given: set[int] = set()
        self._late: set[int] = set()
        self._changed = threading.Condition()

    def run_to(self, target: int) -> None:
        """Lets the rounds of steps below `target` begin."""
        with self._changed:
            self._target = target
            self._changed.notify_all()

    def end(self) -> None:
        """Begins no more rounds."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self, worker: int, seconds: float) -> int | None:
        """The step that the worker may compute; None if there is none within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._may_begin(worker), seconds)
            if self._ended or not self._may_begin(worker):
                return None
            self._begun.add(worker)
            return self.done

    def admit(self, worker: int, step: int) -> bool:
        """Whether the round takes the worker's gradient; a worker asks before it sends the gradient anywhere."""
        with self._changed:
            if step == self.done and (worker in self._admitted or len(self._admitted) < self._needed):
                self._admitted.add(worker)
                return True
            self.turned_away += 1
            if step == self.done:
                self._late.add(worker)
            return False

    def give(self, worker: int, step: int) -> list[int] | None:
        """Counts a gradient that all servers hold.

        Returns:
          The workers whose gradients form the round, ascending, if this one completes it; else None.
        """
        with self._changed:
            if step != self.done or worker not in self._admitted or worker in self._given:
                return None
            self._given.add(worker)
            return sorted(self._given) if len(self._given) == self._needed else None

    def applied(self) -> None:
        """Ends the current round; the next one begins."""
        with self._changed:
            self.done += 1
            for members in (self._begun, self._admitted, self._given, self._late):
                members.clear()
            self._changed.notify_all()

    def lost(self, worker: int) -> None:
        """Lets a lost worker begin the round again, unless the servers hold its gradient.

        If it had been admitted, the workers that were turned away may begin again too: the first one replaces it.
        """
        with self._changed:
            if worker in self._given:
                return
            self._begun.discard(worker)
            if worker in self._admitted:
                self._admitted.discard(worker)
                self._begun -= self._late
                self._late.clear()
            self._changed.notify_all()

    def overdue(self, seconds: float) -> set[int]:
        """An empty set: no other worker can compute a worker's part of a round."""
        return set()

    def missing(self, workers: range) -> list[int]:
        """The workers that have given no gradient to the current round."""
        with self._changed:
            return [worker for worker in workers if worker not in self._given]

    def wait(self, done: int, seconds: float) -> bool:
        """Waits at most `seconds`; whether `done` rounds were applied."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.done >= done, seconds)

    def pause(self, seconds: float) -> bool:
        """Begins no round until the next `run_to` and waits at most `seconds`; whether no round is under way."""
        with self._changed:
            # A round that some workers have begun can end only if the others may begin it too.
            self._target = self.done + bool(self._begun)
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: not self._begun, seconds)
            if idle:
                # All workers that had begun the round may have been lost: it must not begin now.
                self._target = self.done
            return idle

    def _may_begin(self, worker: int) -> bool:
        return self.done < self._target and worker not in self._begun
