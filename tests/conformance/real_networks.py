"""Compares modes with one device on ResNet-20, VGG-16, the transformer and Inception: 20 steps in float64.

python -m tests.conformance.real_networks [--networks=resnet20,vgg16] [--optimizers=adamw] [--modes=pipeline_2]

Runs `launch.train --verify` for each case in turn and prints a line for each: the largest relative difference of a
parameter, moving statistic or slot. Modes that divide branches run on Inception alone: the others have none. It
takes an hour or two on two cores, so the tests don't run it: the rows of `tests.conformance.rows` train small
networks in seconds. Exits with 1 if a case differs or fails.
"""

import argparse
import itertools
import re
import subprocess
import sys
from types import MappingProxyType

TIMEOUT_SECONDS = 1200
# The network with branches.
BRANCHED = "inception"
NETWORKS = MappingProxyType(
    {
        "resnet20": ("--model=resnet20", "--batch_size=30"),
        "vgg16": ("--model=vgg16", "--batch_size=8", "--augment=false", "--batch_stats=average"),
        "transformer": ("--task=text", "--model=transformer", "--batch_size=30"),
        # One device can't draw the dropout masks of towers with synced statistics.
        BRANCHED: ("--model=inception", "--batch_size=12", "--batch_stats=average"),
    }
)
OPTIMIZERS = MappingProxyType(
    {
        "momentum": ("--optimizer=momentum", "--learning_rate=0.01"),
        "adamw": ("--optimizer=adamw", "--learning_rate=0.001"),
    }
)
# Flags of the launcher, if there are several processes, and flags of the mode.
MODES = MappingProxyType(
    {
        "towers_3_shares": ((), ("--num_towers=3", "--tower_shares=5,3,2")),
        "sharded_2": ((), ("--num_towers=2", "--parameter_device=sharded")),
        "sharded_4": ((), ("--num_towers=4", "--parameter_device=sharded")),
        "replicated_2": ((), ("--num_towers=2", "--parameter_device=replicated")),
        "zero_1": ((), ("--num_towers=2", "--zero=1")),
        "zero_2": ((), ("--num_towers=2", "--zero=2", "--accumulation=2")),
        "zero_3": ((), ("--num_towers=3", "--zero=3")),
        "offload": ((), ("--num_towers=2", "--offload=optimizer")),
        "pipeline_2_1f1b": ((), ("--strategy=pipeline", "--stages=2", "--microbatches=4")),
        "pipeline_4_zb_h1": (
            (),
            ("--strategy=pipeline", "--stages=4", "--microbatches=8", "--pipeline_schedule=zb_h1"),
        ),
        "pipeline_3_gpipe": (
            (),
            ("--strategy=pipeline", "--stages=3", "--microbatches=2", "--pipeline_schedule=gpipe"),
        ),
        "slices_2": ((), ("--strategy=slices", "--slices=2")),
        "slices_3": ((), ("--strategy=slices", "--slices=3")),
        "grid_slices": ((), ("--strategy=slices", "--grid=data:2,slice:2")),
        "recompute_full": ((), ("--num_towers=2", "--recompute=full")),
        "pipeline_2_recompute": (
            (),
            ("--strategy=pipeline", "--stages=2", "--microbatches=4", "--recompute=blocks"),
        ),
        "slices_2_recompute": ((), ("--strategy=slices", "--slices=2", "--recompute=blocks")),
        "mirrored_2": ((), ("--strategy=mirrored", "--num_towers=2")),
        "ring_2": (("--workers=2",), ("--strategy=ring", "--num_towers=1")),
        "own_ring_2": (("--workers=2",), ("--strategy=ring", "--engine=own", "--num_towers=1")),
        "ring_2_zero_1": (("--workers=2",), ("--strategy=ring", "--zero=1", "--num_towers=1")),
        "ring_3_zero_2": (("--workers=3",), ("--strategy=ring", "--zero=2", "--num_towers=1")),
        "ring_2_zero_3": (("--workers=2",), ("--strategy=ring", "--zero=3", "--num_towers=1")),
        "ring_2_of_2_towers_zero_3": (("--workers=2",), ("--strategy=ring", "--zero=3", "--num_towers=2")),
        "ring_2_of_2_towers_of_slices_2_zero_3": (
            ("--workers=2",),
            ("--strategy=ring", "--grid=data:2,slice:2", "--zero=3"),
        ),
        "ring_2_of_2_towers_of_stages_2_zero_3": (
            ("--workers=2",),
            (
                "--strategy=ring",
                "--grid=data:2,stage:2",
                "--zero=3",
                "--microbatches=2",
                "--batch_stats=average",
            ),
        ),
        "ring_2_of_stages_2": (
            ("--workers=2",),
            ("--strategy=ring", "--grid=stage:2", "--microbatches=2", "--batch_stats=average"),
        ),
        "ring_2_of_slices_2": (("--workers=2",), ("--strategy=ring", "--grid=slice:2")),
        "ring_2_of_branches_2": (("--workers=2",), ("--strategy=ring", "--grid=branch:2")),
        "ring_2_of_stages_2_zero_2": (
            ("--workers=2",),
            (
                "--strategy=ring",
                "--grid=stage:2",
                "--zero=2",
                "--microbatches=2",
                "--accumulation=2",
                "--batch_stats=average",
            ),
        ),
        "ring_2_of_slices_2_zero_3": (("--workers=2",), ("--strategy=ring", "--grid=slice:2", "--zero=3")),
        "ring_2_of_slices_2_zero_1": (("--workers=2",), ("--strategy=ring", "--grid=slice:2", "--zero=1")),
        "ring_2_of_branches_2_zero_1": (("--workers=2",), ("--strategy=ring", "--grid=branch:2", "--zero=1")),
        "branches_2": ((), ("--strategy=branches", "--branch_devices=2")),
        "grid_branches_zero_1": ((), ("--strategy=branches", "--grid=data:2,branch:2", "--zero=1")),
        "grid_stages_zero_1": (
            (),
            ("--strategy=pipeline", "--grid=data:2,stage:2", "--zero=1", "--batch_stats=average"),
        ),
        "grid_slices_zero_2": ((), ("--strategy=slices", "--grid=data:2,slice:2", "--zero=2")),
        "grid_slices_zero_3": ((), ("--strategy=slices", "--grid=data:2,slice:2", "--zero=3")),
        "grid_branches_zero_3": ((), ("--strategy=branches", "--grid=data:2,branch:2", "--zero=3")),
        "grid_stages_zero_3": (
            (),
            ("--strategy=pipeline", "--grid=data:2,stage:2", "--zero=3", "--batch_stats=average"),
        ),
    }
)


def command_of(network: str, optimizer: str, mode: str) -> list[str]:
    launcher, flags = MODES[mode]
    train = [sys.executable, "-m", "launch.train", "--verify", "--batch_stats=synced"]
    train += [*NETWORKS[network], *OPTIMIZERS[optimizer], *flags]
    return [sys.executable, "-m", "launch.local", *launcher, "--", *train] if launcher else train


def outcome_of(network: str, optimizer: str, mode: str) -> tuple[bool, str]:
    """Whether the case agrees with one device, and the largest difference or the last line of the error."""
    try:
        done = subprocess.run(
            command_of(network, optimizer, mode), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT_SECONDS} seconds"
    largest = re.search(r"largest (\S+),", done.stdout)
    if largest is None:
        return False, (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
    return done.returncode == 0, largest[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    tables = {"networks": NETWORKS, "optimizers": OPTIMIZERS, "modes": MODES}
    for name, table in tables.items():
        parser.add_argument(f"--{name}", default=",".join(table), help="default: %(default)s")
    chosen = vars(parser.parse_args())
    all_agree = True
    for case in itertools.product(*(chosen[name].split(",") for name in tables)):
        network, _, mode = case
        if "branches" in mode and network != BRANCHED:
            continue
        agrees, shown = outcome_of(*case)
        all_agree &= agrees
        print(*(word.ljust(20) for word in case), shown if agrees else f"DIFFERS: {shown}", flush=True)
    return 0 if all_agree else 1


if __name__ == "__main__":
    sys.exit(main())
