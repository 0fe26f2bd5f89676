"""The flags of a run, saved in its directory as flags.txt for `launch.evaluate` and `launch.export`."""

import pathlib
from collections.abc import Collection, Mapping

from absl import flags

from launch import binary
from launch.flags.grid import divided_by
from launch.flags.paths import absolute_value
from strategies.atomic_write import write_atomically
from strategies.callbacks import Callback, Run, writing
from strategies.registry import cluster_kind
from towers.errors import UserError
from towers.grid import Grid

FLAGS = flags.FLAGS
FLAG_FILE = "flags.txt"

# These describe one call of a program, not the run.
_NOT_SAVED = (
    "directory",
    "resume",
    "dry_run",
    "verify",
    "verify_precision",
    "verify_tolerance",
    "profile_steps",
    "show_layout",
)
# Flags that other strategies refuse.
_OF_ONE_STRATEGY = (
    "grid",
    "slices",
    "layout",
    "branch_devices",
    "stages",
    "microbatches",
    "pipeline_schedule",
    "balance",
)
# A flag on the command line replaces these of the run, which would contradict it: the errors would advise to omit
# what nobody typed, and most have no value that switches them off.
_REPLACED_BY = {
    "strategy": (*_OF_ONE_STRATEGY, "tower_shares", "parameter_device", "zero", "offload", "batch_stats"),
    "zero": ("parameter_device", "offload"),
    "parameter_device": ("zero",),
    "offload": ("zero",),
    "grid": ("num_towers", "slices", "branch_devices", "stages", "tower_shares"),
    "num_towers": ("grid", "tower_shares", "parameter_device"),
    "slices": ("grid", "tower_shares"),
    "branch_devices": ("grid", "tower_shares"),
}
# With these the command line may ask for one tower, over which ZeRO of the run can't divide anything.
_OF_TOWERS = frozenset(("grid", "num_towers", "slices", "branch_devices"))
# Flags of training alone. They may exclude other flags that the command line overrides. The values of a recipe are
# saved as those of the flags that it set.
_OF_TRAINING = ("steps_per_execution", "recipe")
# Flags that change nothing in a program that reads a checkpoint.
_WITHOUT_EFFECT = (
    *_OF_TRAINING,
    *("steps", "epochs", "on_nan", "recompute"),
    *("augment", "crop_padding", "crop_fill", "flip"),
    *("learning_rate", "schedule", "warmup_steps", "boundaries", "decay_factor"),
    *("momentum", "adam_beta_1", "adam_beta_2", "weight_decay", "decay_all", "norm_bias_rate_factor"),
    *("clip_value", "clip_norm", "clip_global_norm"),
    *("checkpoint_every_seconds", "checkpoint_every_steps", "keep_checkpoints", "report_every_steps"),
    *("evaluate_every_epochs", "evaluate_every_steps", "profile_steps", "timeline_steps"),
)


def flag_settings() -> Mapping[str, object]:
    """The values of all flags that `launch` defines, by name."""
    return {
        flag.name: flag.value
        for module, of_module in FLAGS.flags_by_module_dict().items()
        if module.startswith("launch.")
        for flag in of_module
    }


def save_flags(directory: pathlib.Path) -> None:
    """Writes the flags of this run to `directory`/flags.txt.

    Paths are written absolute: programs that read the run start in any folder, and a directory of runs is moved
    more often than the data sets beside it. Where these moved too, a flag on the command line names the new path.
    """
    lines = []
    for name in flag_settings():
        value = absolute_value(FLAGS[name])
        if value is not None and value != [] and name not in _NOT_SAVED:
            lines.append(f"--{name}={_text(value)}\n")
    with writing(directory / FLAG_FILE):
        write_atomically(directory / FLAG_FILE, "".join(lines))


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


class SavedFlags(Callback):
    """Saves the flags of a run at its start, but keeps those of a run that is already complete."""

    def begin(self, run: Run) -> None:
        if run.directory is not None and (
            run.first_step < run.last_step or not (run.directory / FLAG_FILE).exists()
        ):
            save_flags(run.directory)


def load_flags(directory: str | None) -> None:
    """Sets the program's flags to those of the run in `directory`; those on the command line override them.

    A run of several processes becomes one of --strategy=towers, because its checkpoint needs no cluster. Flags
    that this version lacks are left out, with a warning. Call this before devices are configured.

    Raises:
      UserError: `directory` is None or empty, or holds no run, or one of a program without flags of tasks; its
        flags.txt can't be read, or a value in it is wrong; or a flag on the command line has no effect without
        training.
    """
    if not directory:
        raise UserError("--directory is missing: give the directory of a run, for example --directory=runs/NAME")
    path = pathlib.Path(directory) / FLAG_FILE
    if not _exists(path):
        raise UserError(
            f"--directory={directory} holds no run (there is no {FLAG_FILE}): give the directory that "
            "launch.train printed"
        )
    given = {name for name in FLAGS if FLAGS[name].present}
    saved = _read(path)
    if "task" in FLAGS and "task" not in saved:
        # Otherwise the checkpoint would be read into the model of the default task.
        raise UserError(
            f"--directory={directory} holds a run of a program of your own ({FLAG_FILE} names no task), which "
            "alone knows its model and data: start that program again, which evaluates a complete run, or load "
            f"{path.with_name('model.keras')}"
        )
    has_processes = bool(cluster_kind(saved.get("strategy", "towers")))
    omitted = {*given, *_OF_TRAINING, *(name for flag in given for name in _REPLACED_BY.get(flag, ()))}
    if has_processes:
        omitted |= {"strategy", *_OF_ONE_STRATEGY}
    _warn_of_unknown(path, {name: value for name, value in saved.items() if name not in FLAGS})
    for name, value in saved.items():
        if name in FLAGS and name not in omitted:
            try:
                FLAGS[name].parse(value)
            except flags.Error as error:
                raise UserError(f"{path}: {error}; correct this line, or give --{name} here too") from error
            # It is not on the command line, which `present` means elsewhere.
            FLAGS[name].present = 0
    if "zero" not in given and _OF_TOWERS & given and _is_one_divided_tower():
        FLAGS["zero"].value = FLAGS["zero"].default
    _check_effect(given, saved)


def _is_one_divided_tower() -> bool:
    """Whether the flags ask for a single tower, whose layers several devices divide."""
    num_towers = FLAGS.num_towers if FLAGS.grid is None else Grid.parse(FLAGS.grid).data
    return divided_by() is not None and num_towers in (None, 1)


def _warn_of_unknown(path: pathlib.Path, unknown: Mapping[str, str]) -> None:
    """Prints a warning that names all flags of the run that this program lacks, if there are any."""
    if unknown:
        named = ", ".join(f"--{name}={value}" for name, value in unknown.items())
        binary.warn(f"{path}: this version has no {named}; left out")


def _check_effect(given: Collection[str], saved: Mapping[str, str]) -> None:
    """Raises UserError if a flag of training alone has another value on the command line than in the run."""
    for flag in (FLAGS[name] for name in _WITHOUT_EFFECT if name in given):
        if flag.value != flag.default and _text(flag.value) != saved.get(flag.name):
            raise UserError(
                f"{flag.serialize()} has no effect, because this program does not train: omit it, or give it to "
                "launch.train"
            )


def saved_precision(directory: pathlib.Path | None) -> str | None:
    """The precision of the run in `directory`; None if it holds no run."""
    path = None if directory is None else directory / FLAG_FILE
    return _read(path).get("precision") if path is not None and _exists(path) else None


def _exists(path: pathlib.Path) -> bool:
    """Whether the file exists; raises UserError if its folder may not be read."""
    try:
        return path.exists()
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror}); make it readable, or give another --directory"
        ) from error


def _read(path: pathlib.Path) -> dict[str, str]:
    """The values of a file that `save_flags` wrote, as text by name.

    Raises:
      UserError: the file can't be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"{path}: can't be read ({why}); put back the file that the run wrote") from error
    parts = (line.removeprefix("--").partition("=") for line in lines if line.strip())
    return {name: value for name, _, value in parts}
