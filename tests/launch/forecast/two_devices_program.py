"""Predicts and measures modes of two CPU devices, all in this process, and prints the errors.

TF_CPU_ALLOCATOR_USE_BFC=1 TF_ENABLE_ONEDNN_OPTS=0 python -m tests.launch.forecast.two_devices_program \
    --model=classic_cnn --batch_size=64 --num_towers=2
        prints a JSON object: for each mode, by how much the predicted peak is above the median and the largest
        of five steps
"""

import json
import statistics

from launch import binary
from launch.flags.devices import devices_from_flags
from launch.flags.run import run_length
from launch.flags.step import options_from_flags
from launch.flags.task import task_from_flags
from launch.forecast import columns
from launch.forecast.columns import Run
from launch.forecast.measured_modes import passing_of_steps
from launch.forecast.modes_of_a_process import ProcessModes
from towers.stages.options import PipelineOptions

MODES = (
    columns.central_towers,
    columns.recomputed_blocks,
    columns.pipeline,
)
# The first step is not measured.
NUM_STEPS = 6


def main(_) -> int:
    task = task_from_flags()
    options = options_from_flags(run_length(task))
    modes = ProcessModes(task, devices_from_flags(), options, PipelineOptions(microbatches=4))
    errors = {}
    for mode in MODES:
        column, *_ = mode(Run(modes))
        predicted = column.process.total_bytes
        held = predicted - modes.memory(column.mode).passing_bytes(task.batch_size)
        steps = passing_of_steps(modes.strategy(column.mode).engine, task, NUM_STEPS)
        errors[column.name] = [
            predicted / (held + passing) - 1 for passing in (statistics.median(steps), max(steps))
        ]
    print(json.dumps(errors))
    return binary.DONE


if __name__ == "__main__":
    binary.run(main)
