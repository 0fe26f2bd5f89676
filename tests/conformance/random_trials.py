"""Trains random models in random modes and compares each with one device, to find faults that no test expects.

    python -m tests.conformance.random_trials --first=0 --count=100

prints a line for each trial: the largest difference, or why the mode refuses the model. A number determines its
trial. Exit code 1 if a trial differs by more than rounding or fails. Started as a ring's workers, it tries rings:

    python -m launch.local --workers=2 -- python -m tests.conformance.random_trials --count=100
"""

import argparse
import dataclasses
import gc
import os
import sys
import tempfile
import traceback

import keras
import numpy as np

from launch.membership.tf_config import cluster_from
from strategies.contract import Strategy
from strategies.one_device_reference import reference_strategy
from strategies.registry import build_strategy
from strategies.ring.exchange.collectives import WireOptions
from strategies.ring.exchange.joining import Ring, RingOptions, join_ring
from strategies.slices import SliceOptions
from strategies.training.checkpoints import Checkpoints
from strategies.training.resuming import Resuming
from strategies.training.saving import Saving
from strategies.training.trainer_options import TrainerOptions
from strategies.training.verification import Difference, differences
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
      mode: strategy and grid, as text.
      difference: the largest relative difference from one device; None if the mode refuses the model.
      text: the variable that differs most, or why the mode refuses the model.
    """

    mode: str
    difference: float | None
    text: str

    @property
    def is_right(self) -> bool:
        return self.difference is None or self.difference <= TOLERANCE

    def __str__(self) -> str:
        figure = "refused" if self.difference is None else f"{self.difference:.1e}"
        return f"{self.mode}: {figure} {self.text}"


def trial(number: int, ring: Ring | None = None) -> Found:
    """Trains and evaluates in one mode and on one device. Raises any error but a mode's refusal.

    Args:
      number: determines everything, on all workers of a ring.
      ring: a ring of several workers, to try rings; None for all modes of one process.
    """
    draw = np.random.default_rng(number)
    has_branches = bool(draw.random() < 0.3)
    kind = str(draw.choice([kind for kind in KINDS if "images" in kind or not has_branches]))
    task = RandomModel(int(draw.integers(2**31)), kind, has_branches).task(draw, ring.num_workers if ring else 1)
    keras.utils.set_random_seed(number)
    options = random_options(draw)
    if draw.random() >= 0.4:
        return _leg(draw, task, options, has_branches, ring)
    with tempfile.TemporaryDirectory() as folder:
        found = _leg(draw, task, options, has_branches, ring, folder)
        if found.difference is None or not found.is_right:
            return found
        resumed = _leg(draw, task, options, has_branches, ring, folder)
    return dataclasses.replace(resumed, mode=f"{found.mode}, resumed by {resumed.mode}")


def _leg(
    draw: np.random.Generator,
    task,
    options: StepOptions,
    has_branches: bool,
    ring: Ring | None = None,
    folder: str | None = None,
) -> Found:
    """Trains in a random mode and on one device. With a folder, starts from its checkpoints and saves new ones."""
    rings = ["ring", "ring of groups"]
    names = rings if ring else ["towers", "mirrored", *rings, *_AXES]
    name = str(draw.choice([name for name in names if has_branches or name != "branches"]))
    axes = [axis for axis in _AXES.values() if has_branches or axis != "branch"]
    axis = _AXES.get(name) or (str(draw.choice(axes)) if "groups" in name else "")
    devices, grid = _devices(draw, name, axis, has_others=ring is not None)
    mode = f"{name} {grid}".strip()
    try:
        strategy = _strategy(draw, name, axis, task, devices, options, ring)
        reference, _ = reference_strategy(task, strategy, options)
    except UserError as error:
        return Found(mode, None, str(error))
    pairs = (("ours", strategy), ("theirs", reference)) if folder else ()
    saved = [_Saved(f"{folder}/{whose}", one) for whose, one in pairs]
    for one in saved:
        one.restore()
    found = compared(mode, strategy, reference, int(draw.integers(3, 7)))
    for one in saved:
        one.save()
    strategy.release()
    strategy.finish(completed=True)
    return found


class _Saved:
    """The checkpoints of a strategy, which one of its processes writes."""

    def __init__(self, folder: str, strategy: Strategy):
        checkpoints = Checkpoints(folder, strategy) if strategy.keeps_files else None
        self._resuming = Resuming(strategy, TrainerOptions(steps=1), checkpoints=checkpoints, settings={})
        self._saving = Saving(strategy, checkpoints, every_seconds=None)
        if checkpoints is not None:
            checkpoints.prepare()

    def restore(self) -> None:
        self._resuming.restore()

    def save(self) -> None:
        self._saving.save()


def compared(mode: str, strategy: Strategy, reference: Strategy, num_steps: int) -> Found:
    """Trains `num_steps` steps and evaluates with both strategies; the largest difference."""
    # A ring's worker with ZeRO 3 may have no whole variable to compare.
    worst = next(iter(differences(strategy, reference, num_steps)), Difference("no", "variable here", 0.0))
    found, expected = strategy.evaluate(), reference.evaluate()
    apart = max(abs(found[key] - expected[key]) / max(abs(expected[key]), 1e-6) for key in expected)
    # Figures are float32 sums.
    if apart > 2e-6:
        return Found(mode, apart, "evaluation")
    strategy.collect()
    if strategy.keeps_files:
        strategy.portable_model()
    return Found(mode, worst.relative, f"{worst.kind} {worst.name}")


def _devices(draw: np.random.Generator, name: str, axis: str, *, has_others: bool) -> tuple[Devices, str]:
    zero = {"zero": int(draw.integers(1, 4))} if draw.random() < 0.5 else {}
    if axis:
        towers, each = int(draw.integers(1, 3)), int(draw.integers(2, 4))
        grid = f"data:{towers},{axis}:{each}"
        devices = cpus_in_groups(grid, **(zero if towers > 1 or has_others else {}))
    else:
        spreads = {"towers": [{}, {"sharded": True}, {"replicated": True}, zero], "ring": [{}, zero]}.get(
            name, [{}]
        )
        devices, grid = cpus(int(draw.integers(1, 4)), **spreads[draw.integers(len(spreads))]), ""
    # Devices may work as GPUs do, or with the kernels of an AVX2 CPU.
    as_on_gpus = {"masks": bool(draw.random() < 0.25), "input_on_towers": bool(draw.random() < 0.2)}
    tuned = {"cpu_instructions": frozenset(["avx2"]), "threads_per_tower": 1} if draw.random() < 0.3 else {}
    return dataclasses.replace(devices, **as_on_gpus, **tuned), grid


def random_options(draw: np.random.Generator) -> StepOptions:
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


def _strategy(
    draw: np.random.Generator, name: str, axis: str, task, devices, options, ring: Ring | None
) -> Strategy:
    shares = random_shares(draw, devices.num_towers)
    of_mode: dict[str, object] = {}
    if axis == "stage":
        schedule = str(draw.choice(["1f1b", "gpipe", "zb_h1"]))
        of_mode["pipeline"] = PipelineOptions(microbatches=int(draw.integers(1, 5)), schedule=schedule)
    if name == "towers" and options.accumulation == 1:
        of_mode["steps_per_execution"] = int(draw.choice([1, 2, 4]))
    if name.startswith("ring"):
        # TensorFlow's engine has neither groups nor ZeRO.
        engine = "own" if axis or devices.zero else str(draw.choice(["own", "tensorflow"]))
        of_mode["ring"] = ring or Ring.alone()
        of_mode["ring"].options = _ring_options(draw, engine, of_mode["ring"].num_workers)
        of_mode |= {"slice": {"slices": SliceOptions()}, "branch": {"branches": BranchOptions()}}.get(axis, {})
    return build_strategy(name.split()[0], task, devices, options, shares=shares, **of_mode)


def random_shares(draw: np.random.Generator, count: int) -> tuple[float, ...] | None:
    return tuple(float(share) for share in draw.integers(1, 4, count)) if draw.random() < 0.5 else None


def _ring_options(draw: np.random.Generator, engine: str, num_workers: int) -> RingOptions:
    if num_workers == 1:
        return RingOptions(engine=engine)
    return RingOptions(
        engine=engine,
        wire=WireOptions(bytes_per_pack=int(draw.choice([2_000, 4_000_000]))),
        worker_shares=random_shares(draw, num_workers),
        check_divergence_every_steps=2 if draw.random() < 0.5 else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    chosen = parser.parse_args()
    configure_devices(num_towers=NUM_DEVICES, kind="cpu", threads_per_tower=1)
    ring = None
    if "TF_CONFIG" in os.environ:
        ring = join_ring(cluster_from(os.environ["TF_CONFIG"]), startup_timeout_seconds=100)
    wrong = []
    for number in range(chosen.first, chosen.first + chosen.count):
        try:
            found = trial(number, ring)
            is_right = found.is_right
            print(f"{number} {found}", flush=True)
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
