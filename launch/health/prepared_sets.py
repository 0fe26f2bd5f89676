"""What lies ready in a folder of TensorFlow Datasets."""

import os
import pathlib
import re

from launch.health.section import Section

_VERSION = re.compile(r"\d+\.\d+\.\d+")
# TFDS writes it last, into NAME/VERSION or NAME/CONFIG/VERSION.
_INFO = "dataset_info.json"


def data(data_dir: str | None) -> Section:
    """The sets that TFDS finds in --data_dir."""
    if data_dir is None:
        return Section(facts={"data_dir": "not given"})
    folder = pathlib.Path(os.path.expanduser(data_dir))
    facts = {"data_dir": str(folder)}
    try:
        sets = prepared_sets(folder)
    except OSError as error:
        problem = f"--data_dir={data_dir}: {error.strerror}; give the folder that TFDS prepared its sets in"
        return Section(facts=facts, problems=(problem,))
    if sets:
        return Section(facts=facts | {"prepared sets": sets})
    problem = (
        f"--data_dir={data_dir}: no prepared set lies there; give the folder above cifar10/, "
        "or prepare one as the README says"
    )
    return Section(facts=facts | {"prepared sets": "none"}, problems=(problem,))


def prepared_sets(folder: pathlib.Path) -> list[str]:
    """'name:version' and 'name/config:version' of every set, in order.

    Raises:
      OSError: the folder is not there, or can't be read.
    """
    os.listdir(folder)  # glob says nothing of a folder that is missing.
    found = [path.parent for depth in ("*/*", "*/*/*") for path in folder.glob(f"{depth}/{_INFO}")]
    return sorted(
        f"{path.parent.relative_to(folder).as_posix()}:{path.name}"
        for path in found
        if _VERSION.fullmatch(path.name)
    )
