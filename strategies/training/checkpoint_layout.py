"""The layout of a checkpoint: its variables' shapes by kind and name, which detect another model's checkpoint."""

from collections.abc import Mapping

from towers.errors import UserError


def layout_of(contents: Mapping) -> dict:
    """Shapes of a checkpoint's variables by kind and name, without the counters, which every model has."""

    def shapes(node):
        if isinstance(node, Mapping):
            return {name: shapes(child) for name, child in node.items()}
        return node.shape.as_list()

    return {kind: shapes(node) for kind, node in contents.items() if kind != "counters"}


def check_layout(prefix: str, stored: Mapping, wanted: Mapping) -> None:
    """Raises UserError with the first difference if a checkpoint is of another model or update rule."""
    for kind in wanted:
        theirs, ours = stored.get(kind, {}), wanted[kind]
        for name in [*ours, *theirs]:
            if theirs.get(name) != ours.get(name):
                fix = (
                    "the same optimizer"
                    if kind == "slots" and name not in ours.keys() & theirs.keys()
                    else "the same model"
                )
                raise UserError(
                    f"checkpoint {prefix} is of another model: {kind}/{name} is {_described(theirs.get(name))} "
                    f"in it and {_described(ours.get(name))} here; use {fix} or another directory"
                )


def _described(shape) -> str:
    if shape is None:
        return "absent"
    return "present" if isinstance(shape, Mapping) else f"of shape {shape}"
