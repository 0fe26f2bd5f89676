"""Writes arguments in a message as the flags that a user of our programs types: num_towers=4 as --num_towers=4.

Below launch/ messages name arguments, because a user's own program may have no flags.
"""

import re

from absl import flags

from towers.pipeline.builders import NAMES as PIPELINE_SCHEDULES

# Arguments whose flags have other names; `schedule` is also the flag of learning rates.
_OTHER_NAMES = {"network": "model", "schedule": "pipeline_schedule"}
_CALL = r"\w\([^()]*\)"
_NAMED = r"(?<![\w./-])(?P<name>[a-z][a-z_]*)=(?:'(?P<quoted>[^'\s]*)'|(?P<switch>True|False)\b)?"
_STRATEGY = r"\bstrategy '(?P<strategy>\w+)'"
_OMITTED = r"\bomit (?P<omitted>[a-z_]+)\b(?!=)"
_ARGUMENT = re.compile("|".join((_CALL, _NAMED, _STRATEGY, _OMITTED)))


def in_flags(text: str) -> str:
    """The text with arguments written as this program's flags.

    zero=1 with strategy 'pipeline': omit zero        --zero=1 with --strategy=pipeline: omit --zero
    grid='data:2,stage:2' or xla=False                --grid=data:2,stage:2 or --noxla

    Arguments of a call, as in shuffle(..., seed=1), and names that are no flags here are not changed.
    """
    return _ARGUMENT.sub(_in_flags, text)


def _in_flags(match: re.Match) -> str:
    whole, name = match[0], match["name"]
    if match["strategy"] is not None and "strategy" in flags.FLAGS:
        return f"--strategy={match['strategy']}"
    if match["omitted"] is not None and match["omitted"] in flags.FLAGS:
        return f"omit --{match['omitted']}"
    if name is None:
        return whole
    rest = match.string[match.end() :]
    if name != "schedule" or rest.startswith(PIPELINE_SCHEDULES):
        name = _OTHER_NAMES.get(name, name)
    if name == "precision" and "verify" in flags.FLAGS and flags.FLAGS["verify"].value:
        name = "verify_precision"
    if name not in flags.FLAGS:
        return whole
    if match["switch"] is not None and flags.FLAGS[name].boolean:
        return f"--{'' if match['switch'] == 'True' else 'no'}{name}"
    value = match["quoted"] if match["quoted"] is not None else whole.partition("=")[2]
    return f"--{name}={value}"
