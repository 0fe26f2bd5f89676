"""Training flags on the benchmark's command line: forwards them to this project's rows, or refuses them."""

from absl import flags

from towers.errors import UserError

FLAGS = flags.FLAGS
# Flags that each row sets itself.
_OF_ROWS = ("strategy", "num_towers", "precision", "engine")
_FORWARDED = tuple(
    f"launch.flags.{name}"
    for name in ("devices", "grid", "slices", "branches", "pipeline", "ring", "servers", "step")
)
# Flags of a run's length, files and recipe. A row has --measured_steps and writes no files.
_WITHOUT_EFFECT = ("launch.flags.run", "launch.flags.recipes")


def forwarded_flags() -> tuple[str, ...]:
    """The given flags of devices, modes and the step, as words of a command; a row's own flags follow them."""
    names = [name for name in _given(*_FORWARDED) if name not in _OF_ROWS]
    return tuple(line for name in names for line in FLAGS[name].serialize().split("\n"))


def check_flags() -> None:
    """Raises UserError if a flag was given that can't change a row."""
    for name in _given(*_FORWARDED):
        if name in _OF_ROWS:
            raise UserError(
                f"--{name}: each row has its own; name it in a row, as --row=towers,2,resnet20,256,bfloat16 or "
                "--row=ring/own,2"
            )
    for name in _given(*_WITHOUT_EFFECT):
        raise UserError(f"--{name} has no effect on a row, which measures --measured_steps steps; omit it")


def _given(*modules: str) -> list[str]:
    found = (flag for module in modules for flag in FLAGS.get_flags_for_module(module))
    return [flag.name for flag in found if flag.present]
