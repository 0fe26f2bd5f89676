"""Lists the prepared datasets in a folder of TensorFlow Datasets (TFDS)."""

import os
import pathlib
import re

from launch.health.section import Section

_VERSION = re.compile(r"\d+\.\d+\.\d+")
# TFDS writes this file last, into NAME/VERSION or NAME/CONFIG/VERSION.
_INFO = "dataset_info.json"


def data(data_dir: str | None) -> Section:
    """The datasets that TFDS finds in --data_dir."""
    if data_dir is None:
        return Section(facts={"data_dir": "not given"})
    folder = pathlib.Path(os.path.expanduser(data_dir))
    facts = {"data_dir": str(folder)}
    try:
        sets = prepared_sets(folder)
    except OSError as error:
        problem = f"--data_dir={data_dir}: {error.strerror}; give the folder in which TFDS prepared its datasets"
        return Section(facts=facts, problems=(problem,))
    if sets:
        return Section(facts=facts | {"prepared sets": sets})
    problem = (
        f"--data_dir={data_dir} contains no prepared dataset; give the folder that contains cifar10/, "
        "or prepare a dataset as the README describes"
    )
    return Section(facts=facts | {"prepared sets": "none"}, problems=(problem,))


def prepared_sets(folder: pathlib.Path) -> list[str]:
    """'name:version' or 'name/config:version' of every dataset, sorted.

    Raises:
      OSError: the folder does not exist or can't be read.
    """
    os.listdir(folder)  # raises; glob would find nothing in a missing folder
    found = [path.parent for depth in ("*/*", "*/*/*") for path in folder.glob(f"{depth}/{_INFO}")]
    return sorted(
        f"{path.parent.relative_to(folder).as_posix()}:{path.name}"
        for path in found
        if _VERSION.fullmatch(path.name)
    )
