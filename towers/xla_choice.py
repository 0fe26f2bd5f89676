"""Whether XLA compiles the step where the options leave it open: on one GPU, if it can compile the whole tower.

Images/s on an H100 (batch 1,024, bfloat16, TensorFlow 2.21):

                 without XLA    tower compiled    all of the step    Keras fit, compiled    PyTorch 2.11
    ResNet-20    30,100         73,200            118,200            86,600
    cifar_fast   46,300         124,600           151,900                                   218,600

Most of the difference is cuDNN's batch norm over few channels: its backward pass took 26 of 52 ms of ResNet-20.
The first step takes 31 to 38 s instead of 12. Several GPUs were not measured: there XLA compiles only if asked to.

The host then keeps the GPU waiting. A step of `cifar_fast` on that host, under the profiler, in ms: 0.7 for
`next(batch)`, 1.2 in Python before the call, 1.4 in TensorFlow before XLA begins, 3.2 to start 200 kernels (less
without the profiler, which disables CUDA graphs), 0.4 after it. The causes of the first three are fixed, but not
measured again: two iterators, hashes of all variables' types in each call, and scalars that waited for the copy of
the next batch, 1.6 ms for 12 MiB. So the call takes nothing from the host: the learning rates of several steps are
one copy, and the number of examples is taken from the part's shape.
"""

import dataclasses
import re
from typing import NamedTuple

import keras
import tensorflow as tf

from towers import split
from towers.devices import Devices
from towers.one_process_engine import reads_rows
from towers.options import StepOptions
from towers.task import Batch, Task
from towers.tower import ModelVariables, TowerFunction
from towers.tracing.drawn_numbers import drawn_otherwise

# XLA's name for the platform of all GPUs; conversion works without a GPU.
_PLATFORM = "GPU"
_WITHOUT_KERNEL = re.compile(r" on XLA_\w+: (\w+) \(")
# In an error of a step, the lines before the one with the reason begin so.
_AROUND = ("Graph execution error", "Detected at node", "<stack traces")
# Operations with results of unknown lengths, which XLA pads to the maximum length.
_OF_UNKNOWN_LENGTH = {"Where", "Unique", "UniqueV2"}


class XlaChoice(NamedTuple):
    """Attributes:
    compiles: whether XLA compiles the step.
    why_not: a notice for the user: why XLA does not compile; '' if there is nothing to say.
    """

    compiles: bool
    why_not: str = ""


def xla_choice(
    task: Task, model: keras.Model, devices: Devices, options: StepOptions, batch_spec: Batch
) -> XlaChoice:
    """Whether XLA compiles the step: as the options say, or else as suits the model and the devices.

    Args:
      task, model: what is trained; the model is built.
      devices: devices of the towers.
      options: how a step computes.
      batch_spec: spec of a (micro)batch as the towers get it, dimension 0 open.

    Raises:
      UserError: tracing a tower's pass raised it (see `TowerFunction`).
    """
    if options.xla is not None:
        return XlaChoice(options.xla)
    one_gpu = devices.num_towers == 1 and not devices.on_cpu and not devices.groups
    # Not all operations that XLA compiles give the same bits each time; recomputation is not for XLA.
    is_usual = not devices.deterministic and devices.zero != 3 and options.recompute == "none"
    # XLA reads whole tables.
    if not one_gpu or not is_usual or reads_rows(model, batch_spec, options):
        return XlaChoice(False)
    why_not = _known_problem(model, batch_spec)
    if not why_not and not _works_on(devices.towers[0]):
        why_not = f"it lacks files of CUDA's compiler for {devices.towers[0]}"
    why_not = why_not or _problem_of_pass(task, model, devices, options, batch_spec)
    return XlaChoice(not why_not, why_not)


def _known_problem(model: keras.Model, batch_spec: Batch) -> str:
    """Why XLA should not compile a model, as far as the model shows it without a graph; '' if nothing does."""
    shapes = [spec.shape for spec in tf.nest.flatten(batch_spec)]
    if any(shape.rank is None or None in shape[1:] for shape in shapes):
        return "the shapes of batches vary, and it would compile the step for each"
    not_for_xla = [layer.name for layer in model._flatten_layers() if not layer.supports_jit]
    if not_for_xla:
        return f"Keras's layers {', '.join(not_for_xla)} don't support XLA"
    return ""


def _works_on(device: str) -> bool:
    """Whether XLA compiles for a device. For GPUs it needs files of CUDA's compiler, which drivers lack."""
    try:
        with tf.device(device):
            # An argument, not a constant, whose exp the host would compute.
            tf.function(tf.exp, jit_compile=True, autograph=False)(tf.zeros([8]))
    except tf.errors.OpError:
        return False
    return True


def _problem_of_pass(
    task: Task, model: keras.Model, devices: Devices, options: StepOptions, batch_spec: Batch
) -> str:
    """`conversion_problem` of a tower's training pass."""
    num_examples = split.fewest_examples(task.batch_size, options.accumulation, (1.0,))
    options = dataclasses.replace(options, xla=True)
    kernels = options.kernels(devices, num_examples)
    tower = TowerFunction(
        task, model, xla=True, kernels=kernels, traced=lambda function, **_: function, batch_spec=batch_spec
    )
    return conversion_problem(tower.traced, *_specs(tower.variables, batch_spec, num_examples))


def _specs(variables: ModelVariables, batch_spec: Batch, num_examples: int) -> list:
    """The arguments of a tower's pass over so many examples."""
    of_batch = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([num_examples, *spec.shape[1:]], spec.dtype), batch_spec
    )
    values = [
        [tf.TensorSpec(variable.shape, variable.dtype) for variable in of_kind]
        for of_kind in (variables.parameters, variables.state)
    ]
    return [*values, of_batch, tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.float32)]


def conversion_problem(function, *specs) -> str:
    """What keeps XLA from compiling a function for a GPU, found without a GPU; '' if nothing does.

    XLA converts the function to its own operations, which is a small part of the compilation. (A look into
    TensorFlow's registry of kernels missed the problems of five of 180 layers and losses: gradients without a
    kernel, loops of unknown length, shapes that depend on values.)

    Args:
      function: takes tensors in structures, and has no side effects.
      *specs: the arguments, of known shapes.
    """
    flat = tf.function(
        lambda *tensors: function(*tf.nest.pack_sequence_as(list(specs), tensors)),
        jit_compile=True,
        autograph=False,
    )
    specs_of_tensors = tf.nest.flatten(list(specs))
    kinds = _kinds(flat.get_concrete_function(*specs_of_tensors))
    if unknown := kinds & _OF_UNKNOWN_LENGTH:
        return f"{', '.join(sorted(unknown))} has results of unknown lengths"
    if random := drawn_otherwise(kinds):
        return f"it would draw other random numbers in {', '.join(sorted(random))}; xla=True compiles it anyway"
    try:
        flat.experimental_get_compiler_ir(*specs_of_tensors)(stage="hlo_serialized", platform_name=_PLATFORM)
    except (ValueError, tf.errors.OpError) as error:
        return conversion_reason(str(error))
    return ""


def _kinds(concrete) -> set[str]:
    """The types of the operations whose results are used, in a function and in the functions that it calls."""
    described = concrete.graph.as_graph_def()
    found = _used_kinds(described.node, [tensor.name for tensor in concrete.outputs])
    for function in described.library.function:
        found |= _used_kinds(function.node_def, function.ret.values())
    return found


def _used_kinds(nodes, results) -> set[str]:
    """Args:
    nodes: the operations.
    results: names of the tensors that they are computed for.
    """
    names = [*results, *(name for node in nodes for name in node.input)]
    used = {name.lstrip("^").partition(":")[0] for name in names}
    return {node.op for node in nodes if node.name in used}


def conversion_reason(error: str) -> str:
    """The sentence in TensorFlow's error that says why XLA can't convert a function."""
    if found := _WITHOUT_KERNEL.search(error):
        return f"it has no kernel for {found[1]}"
    lines = [line.removeprefix("Failed getting HLO text: '") for line in error.splitlines()]
    # Lines of a stack trace are indented.
    telling = [line for line in lines if line.strip() and not line.startswith((*_AROUND, " ", "\t"))]
    return (telling or lines)[0].partition(". ")[0].rstrip(".")
