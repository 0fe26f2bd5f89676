"""Small archives in the form of CIFAR-10's binary version."""

import io
import os
import tarfile

import numpy as np

from launch.import_cifar import FOLDER, IMAGE_FILES, LABEL_NAMES_FILE

NAMES = [f"kind{number}" for number in range(10)]
PER_FILE = 4


def rows(seed):
    """uint8 [PER_FILE, 3073]: a label and the colour planes of an image."""
    made = np.random.default_rng(seed).integers(0, 256, (PER_FILE, 3073)).astype(np.uint8)
    made[:, 0] %= 10
    return made


def contents():
    files = {name: rows(number).tobytes() for number, name in enumerate(IMAGE_FILES)}
    return files | {LABEL_NAMES_FILE: ("\n".join(NAMES) + "\n\n").encode(), "readme.html": b"hello"}


def plain(name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, io.BytesIO(content)


def write_archive(path, members=None, more=()):
    members = (
        [plain(f"{FOLDER}/{name}", data) for name, data in contents().items()] if members is None else members
    )
    with tarfile.open(path, "w:gz") as archive:
        for member, data in [*members, *more]:
            archive.addfile(member, data)
    return os.fspath(path)
