"""Steps that all workers take together: who is in the current one, and when it is complete.

With backup workers a round needs only the first `needed` gradients; who comes later is turned away and begins the
next round from new parameters (Chen et al. 2016, "Revisiting distributed synchronous SGD").
"""

import threading


class Rounds:
    """The rounds of a run.

    Attributes:
      done: rounds applied, those of earlier runs included; also the number of the current one.
      turned_away: gradients that came too late.
    """

    def __init__(self, first: int, *, needed: int):
        """Args:
        first: number of the first round.
        needed: gradients of a round.
        """
        self.done, self.turned_away = first, 0
        self._needed, self._target, self._ended = needed, first, False
        self._begun: set[int] = set()
        self._admitted: set[int] = set()
        self._given: set[int] = set()
        self._late: set[int] = set()
        self._changed = threading.Condition()

    def run_to(self, target: int) -> None:
        """Begins no round from `target` on."""
        with self._changed:
            self._target = target
            self._changed.notify_all()

    def end(self) -> None:
        """Begins nothing more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self, worker: int, seconds: float) -> int | None:
        """The round that the worker may compute for; None if there is none in that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._may_begin(worker), seconds)
            if self._ended or not self._may_begin(worker):
                return None
            self._begun.add(worker)
            return self.done

    def admit(self, worker: int, number: int) -> bool:
        """Whether the worker's gradient for a round is wanted; asked before it is sent anywhere."""
        with self._changed:
            if number == self.done and (worker in self._admitted or len(self._admitted) < self._needed):
                self._admitted.add(worker)
                return True
            self.turned_away += 1
            if number == self.done:
                self._late.add(worker)
            return False

    def give(self, worker: int, number: int) -> list[int] | None:
        """The worker's gradient is with all servers; if it was the last one, those who gave one, in order."""
        with self._changed:
            if number != self.done or worker not in self._admitted or worker in self._given:
                return None
            self._given.add(worker)
            return sorted(self._given) if len(self._given) == self._needed else None

    def applied(self) -> None:
        """The round is over, the next one begins."""
        with self._changed:
            self.done += 1
            for members in (self._begun, self._admitted, self._given, self._late):
                members.clear()
            self._changed.notify_all()

    def lost(self, worker: int) -> None:
        """A worker that has not given yet may begin again; so may, in its place, those who came too late."""
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
        """None: nobody could do a worker's part for it."""
        return set()

    def missing(self, workers: range) -> list[int]:
        """Those whose gradients the current round waits for."""
        with self._changed:
            return [worker for worker in workers if worker not in self._given]

    def wait(self, done: int, seconds: float) -> bool:
        """Whether so many were applied, after at most that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self.done >= done, seconds)

    def pause(self, seconds: float) -> bool:
        """Begins no round more before the next `run_to`; whether none is under way, after at most that time."""
        with self._changed:
            # A round that some have begun needs the others.
            self._target = self.done + bool(self._begun)
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: not self._begun, seconds)
            if idle:
                # Those that had begun it may have been lost.
                self._target = self.done
            return idle

    def _may_begin(self, worker: int) -> bool:
        return self.done < self._target and worker not in self._begun
