"""One worker of a ring with ZeRO: saves and restores, and writes by how much its memory grew meanwhile.

python -m tests.strategies.ring.saving_program FOLDER
    with TF_CONFIG set; writes FOLDER/RANK.json: for each thing that it did, the bytes
"""

import json
import os
import pathlib
import re
import sys
from collections.abc import Callable

from keras import layers

from launch.membership.tf_config import cluster_from
from strategies import pieces
from strategies.registry import build_strategy
from strategies.ring.joining import join_ring
from strategies.ring.zero_slots import SharedParts
from strategies.training.trainer import Trainer
from strategies.training.trainer_options import TrainerOptions
from tests.towers.tiny_tasks import TinyTask, stacked, vectors
from towers.devices import configure_devices
from towers.options import StepOptions
from towers.updates.rules import Adam
from towers.updates.schedules import Constant

NUM_LAYERS, WIDTH = 24, 1024
PARAMETER_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4


def wide_task() -> TinyTask:
    def build():
        wide = [layers.Dense(WIDTH, name=f"wide{index}") for index in range(NUM_LAYERS)]
        return stacked((4,), layers.Dense(WIDTH, name="first"), *wide, layers.Dense(3, name="logits"))

    return TinyTask(build=build, examples=vectors(8))


def growth(act: Callable[[], object]) -> int:
    """By how many bytes the resident memory grows while `act` runs, at most."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024


def collected_first(values):
    """`SharedParts.values` as it must not be: everything is brought before anything is written."""
    return lambda *arguments: iter(list(values(*arguments)))


def main(folder: pathlib.Path) -> None:
    pieces.PIECE_BYTES = 1 << 20
    devices = configure_devices(num_towers=1, kind="cpu", zero=1)
    ring = join_ring(cluster_from(os.environ["TF_CONFIG"]))
    options = StepOptions(rule=Adam(), schedule=Constant(0.001))
    strategy = build_strategy("ring", wide_task(), devices, options, ring=ring)
    strategy.run_steps(1)

    def trainer(name: str) -> Trainer:
        return Trainer(strategy, TrainerOptions(steps=1, directory=folder / name))

    def save(name: str) -> None:
        made = trainer(name)
        made.prepare()
        made._saved_at = -1
        made._save()

    found = {"first save": growth(lambda: save("first")), "save": growth(lambda: save("second"))}
    streamed = SharedParts.values
    SharedParts.values = collected_first(streamed)
    found["all at once"] = growth(lambda: save("third"))
    SharedParts.values = streamed
    found["restore"] = growth(trainer("second").restore)
    (folder / f"{ring.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
