"""Trains random models in random modes and compares each with one device. A search for what nobody thought of.

    python -m tests.conformance.random_trials --first=0 --count=100

prints a line for each trial, which its number decides: the largest difference, or why the mode refuses the model.
Exit code 1 if a trial differs by more than rounding or fails.
"""

import argparse
import dataclasses
import gc
import sys
import traceback

import keras
import numpy as np

from strategies.contract import Strategy
from strategies.one_device_reference import reference_strategy
from strategies.registry import build_strategy
from strategies.ring.joining import Ring, RingOptions
from strategies.slices import SliceOptions
from strategies.training.verification import differences
from tests.conformance.random_models import KINDS, RandomModel
from tests.towers.logical_cpus import cpus, cpus_in_groups
from towers.branches.options import BranchOptions
from towers.device_setup import configure_devices
from towers.devices import Devices
from towers.errors import UserError
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD, Momentum
from towers.updates.schedules import Constant

# In float64. Rounding errors of some steps are a thousand times smaller.
TOLERANCE = 1e-9
NUM_DEVICES = 6
_AXES = {"pipeline": "stage", "slices": "slice", "branches": "branch"}
# No Adam: it turns the rounding errors of a gradient of 0 (a bias before a batch norm) into updates.
_RULES = SGD(), SGD(weight_decay=0.05), Momentum(momentum=0.9), Momentum(nesterov=True, weight_decay=0.01)
_CLIPPINGS = Clipping(), Clipping(), Clipping(norm=0.5), Clipping(global_norm=0.5), Clipping(value=0.05)


@dataclasses.dataclass(frozen=True)
class Found:
    """How a trial ended.

    Attributes:
      mode: strategy and grid, for a person.
      difference: the largest relative difference from one device; None if the mode refuses the model.
      text: the variable that differs most, or why it is refused.
    """

    mode: str
    difference: float | None
    text: str

    @property
    def is_right(self) -> bool:
        return self.difference is None or self.difference <= TOLERANCE


def trial(number: int) -> Found:
    """Trains and evaluates in one mode and on one device. Raises what no mode should raise."""
    draw = np.random.default_rng(number)
    name = str(draw.choice(["towers", "mirrored", "ring", "ring of groups", *_AXES]))
    axis = _AXES.get(name) or (str(draw.choice(list(_AXES.values()))) if "groups" in name else "")
    has_branches = axis == "branch"
    kind = str(draw.choice([kind for kind in KINDS if "images" in kind or not has_branches]))
    task = RandomModel(int(draw.integers(2**31)), kind, has_branches).task(draw)
    devices, grid = _devices(draw, name, axis)
    mode = f"{name} {grid}".strip()
    keras.utils.set_random_seed(number)
    try:
        options = _options(draw)
        strategy = _strategy(draw, name, axis, task, devices, options)
        reference, _ = reference_strategy(task, strategy, options)
    except UserError as error:
        return Found(mode, None, str(error))
    worst = differences(strategy, reference, int(draw.integers(3, 7)))[0]
    found, expected = strategy.evaluate(), reference.evaluate()
    apart = max(abs(found[key] - expected[key]) / max(abs(expected[key]), 1e-6) for key in expected)
    # Figures are float32 sums.
    if apart > 2e-6:
        return Found(mode, apart, "evaluation")
    strategy.portable_model()
    return Found(mode, worst.relative, f"{worst.kind} {worst.name}")


def _devices(draw: np.random.Generator, name: str, axis: str) -> tuple[Devices, str]:
    zero = {"zero": int(draw.integers(1, 4))} if draw.random() < 0.5 else {}
    if axis:
        towers, each = int(draw.integers(1, 3)), int(draw.integers(2, 4))
        grid = f"data:{towers},{axis}:{each}"
        devices = cpus_in_groups(grid, **(zero if towers > 1 else {}))
    else:
        spreads = {"towers": [{}, {"sharded": True}, {"replicated": True}, zero], "ring": [{}, zero]}.get(
            name, [{}]
        )
        devices, grid = cpus(int(draw.integers(1, 4)), **spreads[draw.integers(len(spreads))]), ""
    # Each may be as on GPUs, or with the kernels of an AVX2 CPU.
    as_on_gpus = {"masks": bool(draw.random() < 0.25), "input_on_towers": bool(draw.random() < 0.2)}
    tuned = {"cpu_instructions": frozenset(["avx2"]), "threads_per_tower": 1} if draw.random() < 0.3 else {}
    return dataclasses.replace(devices, **as_on_gpus, **tuned), grid


def _options(draw: np.random.Generator) -> StepOptions:
    return StepOptions(
        rule=_RULES[draw.integers(len(_RULES))],
        schedule=Constant(0.02),
        clipping=_CLIPPINGS[draw.integers(len(_CLIPPINGS))],
        accumulation=int(draw.choice([1, 1, 1, 2, 4])),
        batch_stats=str(draw.choice(["average", "average", "synced", "first"])),
        precision="float64",
        recompute=str(draw.choice(["none", "none", "blocks", "sqrt", "full"])),
        on_nan=str(draw.choice(["stop", "skip"])),
        seed=int(draw.integers(100)),
    )


def _strategy(draw: np.random.Generator, name: str, axis: str, task, devices, options) -> Strategy:
    shares = (
        tuple(float(share) for share in draw.integers(1, 4, devices.num_towers)) if draw.random() < 0.5 else None
    )
    of_mode: dict[str, object] = {}
    if axis == "stage":
        schedule = str(draw.choice(["1f1b", "gpipe", "zb_h1"]))
        of_mode["pipeline"] = PipelineOptions(microbatches=int(draw.integers(1, 5)), schedule=schedule)
    if name.startswith("ring"):
        engine = "own" if axis else str(draw.choice(["own", "tensorflow"]))
        of_mode["ring"] = Ring.alone(RingOptions(engine=engine))
        of_mode |= {"slice": {"slices": SliceOptions()}, "branch": {"branches": BranchOptions()}}.get(axis, {})
    return build_strategy(name.split()[0], task, devices, options, shares=shares, **of_mode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    chosen = parser.parse_args()
    configure_devices(num_towers=NUM_DEVICES, kind="cpu", threads_per_tower=1)
    wrong = []
    for number in range(chosen.first, chosen.first + chosen.count):
        try:
            found = trial(number)
            is_right, figure = found.is_right, "refused" if found.difference is None else f"{found.difference:.1e}"
            print(f"{number} {found.mode}: {figure} {found.text}", flush=True)
        except Exception:
            is_right = False
            print(f"{number}: {traceback.format_exc()}", flush=True)
        if not is_right:
            wrong.append(number)
        keras.backend.clear_session()
        gc.collect()
    print(f"wrong: {', '.join(map(str, wrong))}" if wrong else "all are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
