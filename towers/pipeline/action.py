"""One step of a schedule: a pass of one microbatch through one stage."""

import dataclasses
import enum


class Kind(enum.StrEnum):
    """Which pass.

    In a split schedule (Qi et al. 2023, arXiv 2401.10241) BACKWARD computes the gradients of a stage's inputs and
    WEIGHTS those of its parameters, which no other stage waits for. Otherwise BACKWARD computes both.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


@dataclasses.dataclass(frozen=True)
class Action:
    """A pass of microbatch `microbatch` through stage `stage`; both are counted from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.short}"

    @property
    def short(self) -> str:
        """The action without its stage, such as 'F3'."""
        return f"{self.kind}{self.microbatch}"

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """The actions whose results this one reads, in a pipeline of `num_stages` stages."""
        if self.kind is Kind.FORWARD:
            return (Action(Kind.FORWARD, self.stage - 1, self.microbatch),) if self.stage > 0 else ()
        if self.kind is Kind.WEIGHTS:
            return (Action(Kind.BACKWARD, self.stage, self.microbatch),)
        own_forward = Action(Kind.FORWARD, self.stage, self.microbatch)
        if self.stage == num_stages - 1:
            return (own_forward,)
        return own_forward, Action(Kind.BACKWARD, self.stage + 1, self.microbatch)
