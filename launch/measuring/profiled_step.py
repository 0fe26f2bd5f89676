"""Where the CPU time of a training step goes: a table of its operations by kind.

Look at it first when a step is slow. `--isa=avx2` shows a smaller CPU's step, `TF_ENABLE_ONEDNN_OPTS=0` in the
environment TensorFlow's own kernels. The table is right if each device has one thread, the default on CPUs.

CPU ms of a step of two towers in float32, batch 256 (Intel Xeon with AVX-512 without AMX, loaded; "AVX2" with
oneDNN's batch norm; "compiled" with ours on AVX2, in another hour under more load):

                                         ResNet-20                               cifar_fast
                                         Eigen     AVX2      compiled  AVX-512   AVX2      AVX-512
    convolutions, forward                365       273       285       172       832       416
    convolutions, gradients of inputs    512       283       305       178       694       415
    convolutions, gradients of kernels   1,072     299       309       171       783       448
    batch norm, forward                  139       390       108       43        157       14
    batch norm, gradients                281       82        86        77        25        29
    ReLU; pooling and GELU               44        39        38        36        127       95
    additions                            22        28        21        32
    all                                  2,438     1,396     1,156     713       2,621     1,423

ResNet-20 on AMD EPYCs (AVX-512, avx512_bf16), two cores. "Before" is a loaded Zen 4 before convolutions by
Winograd's method and compiled ReLUs. Another Zen 4 and a Zen 5 have both, and kernels' gradients that have the
examples as channels:

                                         Zen 4, before:       Zen 4:               Zen 5:
                                         float32   bfloat16   float32   bfloat16   float32   bfloat16
    convolutions, forward                204       105        149       127        94        75
    convolutions, gradients of inputs    210       109        160       103        97        59
    convolutions, gradients of kernels   207       163        143       94         87        64
    batch norm, forward                  24        19         17        13         16        11
    batch norm, gradients                45        43         38        32         21        17
    ReLU                                 16        35         12                   10
    additions                            17        16         12                   9
    compiled                                                  94        24         58        19
    casts, copies, layouts, updates      1         2          8         13         7         9
    all                                  726       492        632       406        398       255

Since then, on the Zen 4: in bfloat16 inputs of kernels' gradients are transposed as words, so copies take 4 ms
instead of 10; in float32 convolutions of 32 channels are Winograd's, and a step takes 588 ms instead of 620.

`cifar_fast` (batch 1,024) on the Zen 4 in bfloat16: gradients of kernels took 826 of 2,105 ms by oneDNN, forward
and gradients of inputs 527 each; with the examples as channels the step takes 1,790.

ResNet-20 on an Intel Xeon with AMX, two cores; each pair of columns is before and after a change. In bfloat16 the
change compiles ReLUs with their additions, without AMX (products in float32, `towers/layers/products.py`) and with
it; with AMX it also joins batch norms with their ReLUs. In float32 convolutions of 64 channels, with AVX2 (CPUID
masked) of 32, become Winograd's with tiles in the cache; with AVX2 those of 64 were Winograd's before, with tiles
in memory. "Compiled" are Winograd's convolutions (before, their transforms), ReLUs, and with AVX2 batch norm,
forward:

                                         bfloat16:                     float32:
                                         without AMX    with AMX       AVX-512       AVX2
    convolutions, forward                137    132     29     30      144    101    150     91
    convolutions, gradients of inputs    132    129     30     30      141    101    150     93
    convolutions, gradients of kernels   137    131     64     66      148    104    181    107
    batch norm, forward                  21     20      26     25      40     39
    batch norm, gradients                53     53      52     52      63     61     63      61
    ReLU                                 48             85             27     27     35      33
    additions                            33             31             20     19     20      18
    compiled                                    35             36             87     180     351
    casts                                112    108     2      2
    products, copies, layouts, others    2      2       8      8       3      4      64      12
    all                                  671    611     327    249     584    543    843     766

A core of the Zen 4 makes 83 (32x32x16) to 98 (8x8x64) billion multiply-adds a second in a bfloat16 convolution
forward, 57 to 66 in its kernel's gradient, 45 to 57 and 47 to 49 in float32. Forward, batch norms contain the ReLU
after them.
"""

import os
import pathlib
import tempfile
import time
from collections.abc import Mapping

from absl import flags
from tensorflow.python.eager import context  # the one way to collect the graphs that TensorFlow runs

from launch import training
from launch.health.machine import cpu_model
from launch.measuring.measured_program import measured_task
from launch.measuring.tables import table_row
from strategies.contract import Strategy
from strategies.reports.timeline import start_tracing, traced_until_now
from towers.errors import UserError
from towers.hardware.cpu_kernels import cpu_kernels
from towers.timeline.operation_kinds import shares_by_kind
from towers.timeline.operations import RunGraphs

FLAGS = flags.FLAGS
_WARM_UP_STEPS = 2
_LIMIT = "ONEDNN_MAX_CPU_ISA"


def measure_profile() -> dict:
    """Measures the CPU time of steps and traces as many; prints the table.

    Raises:
      UserError: the profiler traced no operation, as in a chief of servers, which computes none.
    """
    FLAGS.steps = 2 * FLAGS.measured_steps + _WARM_UP_STEPS + 1
    strategy = training.build_strategy(measured_task())
    graphs = _graphs_of_first_step(strategy)
    strategy.run_steps(_WARM_UP_STEPS)
    cpu_seconds = time.process_time()
    strategy.run_steps(FLAGS.measured_steps)
    cpu_seconds = (time.process_time() - cpu_seconds) / FLAGS.measured_steps
    with tempfile.TemporaryDirectory() as folder:
        start_tracing(pathlib.Path(folder))
        strategy.run_steps(FLAGS.measured_steps)
        operations = traced_until_now(pathlib.Path(folder), graphs).operations
    if not operations:
        raise UserError(
            f"--measure=profile: the profiler traced no operation of --strategy={FLAGS.strategy}; profile a "
            "strategy whose first process computes"
        )
    found = {
        "cpu_kernels": cpu_kernels(),
        "largest_instructions": os.environ.get(_LIMIT, ""),
        "cpu_seconds_per_step": cpu_seconds,
        "shares": dict(shares_by_kind(operations)),
    }
    print("\n".join(profile_table(found, cpu_model())))
    return found


def _graphs_of_first_step(strategy: Strategy) -> RunGraphs:
    context.enable_graph_collection()
    try:
        strategy.run_steps(1)
        return RunGraphs(context.export_run_metadata())
    finally:
        context.disable_graph_collection()


def profile_table(found: Mapping, cpu: str) -> list[str]:
    """The lines of a Markdown table: the CPU time of a step, divided in proportion to its operations' time."""
    milliseconds = 1e3 * found["cpu_seconds_per_step"]
    limit = f" up to {found['largest_instructions']}" if found["largest_instructions"] else ""
    head = f"{FLAGS.network}, {FLAGS.measured_batch}, {FLAGS.precision}: {found['cpu_kernels']}{limit}, {cpu}"
    return [
        table_row([head, "CPU ms a step", "share"]),
        table_row(["---"] * 3),
        *(
            table_row([kind, f"{milliseconds * share:.1f}", f"{share:.1%}"])
            for kind, share in found["shares"].items()
        ),
        table_row(["all", f"{milliseconds:.1f}", ""]),
    ]
