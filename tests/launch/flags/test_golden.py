"""No flag of `launch.train` appears, disappears or changes its type or default unnoticed.

python -m tests.launch.flags.test_golden    updates flags.golden after an intended change
"""

import difflib
import pathlib

from absl import flags

from launch import train

GOLDEN = pathlib.Path(__file__).with_name("flags.golden")
UPDATE = "if this change is intended, run: python -m tests.launch.flags.test_golden, and name it in CHANGELOG.md"


def defined_flags() -> str:
    """A line for each flag that importing `launch.train` defines: name, type, default."""
    rows = sorted(
        (flag.name, flag.flag_type(), repr(flag.default))
        for module, of_module in flags.FLAGS.flags_by_module_dict().items()
        if module.startswith("launch.flags.") or module == train.__name__
        for flag in of_module
    )
    return "".join(f"{name:26} {kind:32} {default}\n" for name, kind, default in rows)


def test_flags_are_those_of_the_golden_file():
    expected, found = GOLDEN.read_text(encoding="utf-8"), defined_flags()
    changes = list(difflib.unified_diff(expected.splitlines(), found.splitlines(), "flags.golden", "now", n=0))
    assert not changes, "\n".join([*changes, UPDATE])


if __name__ == "__main__":
    GOLDEN.write_text(defined_flags(), encoding="utf-8")
