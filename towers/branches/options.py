"""How the branches of a model are assigned to the devices of a tower."""

import dataclasses

from towers.errors import UserError
from towers.stages.options import BALANCES, PARAMETERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchOptions:
    """The options of branches.

    Attributes:
      balance: the cost of a branch: 'parameters' counts its parameters, 'time' measures its forward and backward
        pass.

    Raises:
      UserError: `balance` is unknown.
    """

    balance: str = PARAMETERS

    def __post_init__(self):
        if self.balance not in BALANCES:
            raise UserError(
                f"balance={self.balance!r} with branches: use one of {', '.join(BALANCES)}; the number of "
                "operations of each stage is for pipelines"
            )
