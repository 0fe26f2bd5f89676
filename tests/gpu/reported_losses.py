"""The losses that a run reported."""

import json
import pathlib


def reported_losses(directory: pathlib.Path) -> list[float]:
    """Losses of training and evaluations, in the order of the file."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]
