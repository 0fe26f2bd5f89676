"""--verify: some steps in the chosen mode beside one device on the same batches."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from strategies.contract import Strategy
from strategies.synchronous import SynchronousStrategy
from strategies.towers import towers_strategy
from towers.devices import Devices
from towers.errors import UserError
from towers.layers import batch_norm
from towers.options import StepOptions
from towers.task import Task
from towers.tower import ModelVariables

_ONE_DEVICE = "/device:CPU:0"
# Values below this are rounding noise (a bias before a batch norm has no gradient but that): they are compared
# with it, not with each other.
_SMALLEST_SCALE = 1e-6


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two strategies are apart in one variable: largest |a - b| over largest |b|."""

    kind: str
    name: str
    relative: float


def reference_strategy(task: Task, strategy: SynchronousStrategy, options: StepOptions) -> tuple[Strategy, str]:
    """What one device would do, and in words how.

    Where an example's gradient depends on the others of its part (batch statistics that are not synced) or on
    the part's own random numbers (dropout), one device takes the same parts, one after another; else it takes
    each batch undivided.

    Raises:
      UserError: a strategy that does not give one device's numbers; or synced statistics beside dropout, which no
        single device can repeat.
    """
    if not strategy.is_exact:
        raise UserError(
            "verify of asynchronous updates: what they come to depends on who is first; use --staleness=sync or 0"
        )
    model = strategy.model
    coupled = bool(batch_norm.batch_norm_layers(model)) and options.batch_stats != "synced"
    random = bool(ModelVariables.of(model).seeds)
    if random and options.batch_stats == "synced" and batch_norm.batch_norm_layers(model):
        raise UserError(
            "verify with batch_stats=synced and dropout: each tower draws masks of its own, which one device "
            "can't repeat; verify with batch_stats=average"
        )
    count = strategy.num_towers if coupled or random else 1
    devices = Devices(towers=(_ONE_DEVICE,) * count, parameters=_ONE_DEVICE)
    own_shares = strategy.part_shares if count > 1 else None
    how = "undivided" if count == 1 else f"in the same {count} parts, one after another"
    # XLA is under test with the mode; the reference goes without.
    plain = dataclasses.replace(options, xla=False)
    return towers_strategy(task, devices, plain, shares=own_shares), f"one device, each batch {how}"


def differences(strategy: Strategy, reference: Strategy, num_steps: int) -> list[Difference]:
    """Runs both for `num_steps` from their present state; every variable's difference, largest first."""
    strategy.run_steps(num_steps)
    reference.run_steps(num_steps)
    found = []
    theirs = reference.checkpointables()
    for kind, values in strategy.checkpointables().items():
        if kind == "slots":
            for slot, by_name in values.items():
                found += _compared(f"slots/{slot}", by_name, theirs[kind][slot])
        elif kind != "counters":
            found += _compared(kind, values, theirs[kind])
    return sorted(found, key=lambda difference: -difference.relative)


def _compared(kind: str, ours: Mapping, theirs: Mapping) -> list[Difference]:
    pairs = zip(ours.items(), theirs.values(), strict=True)
    return [Difference(kind, name, relative_difference(a.numpy(), b.numpy())) for (name, a), b in pairs]


def relative_difference(value: np.ndarray, reference: np.ndarray) -> float:
    """Largest |value - reference| over largest |reference|; what is not finite is infinitely far."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if not (np.isfinite(value).all() and np.isfinite(reference).all()):
        return float("inf")
    largest = np.abs(reference).max(initial=0.0)
    apart = np.abs(value - reference).max(initial=0.0)
    return 0.0 if apart == 0 else float(apart / max(largest, _SMALLEST_SCALE))
