"""Prepares TFDS's cifar10 from a local archive, without network access.

    python -m launch.import_cifar --archive=cifar-10-binary.tar.gz --data_dir=tensorflow_datasets

prints, after half a minute:

    cifar10 3.0.2: 50000 train and 10000 test images in tensorflow_datasets/cifar10/3.0.2

Afterwards `tfds.load('cifar10', data_dir=..., download=False)` and --task=cifar10 work. The archive is the binary
version from https://www.cs.toronto.edu/~kriz/cifar.html; TFDS's own builder reads it and writes the data set.
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile

import tensorflow_datasets as tfds
from absl import flags

from launch import binary
from towers.errors import UserError

FLAGS = flags.FLAGS

# From TFDS: tensorflow_datasets/url_checksums/cifar10.txt.
OFFICIAL_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
VERSION = "3.0.2"

FOLDER = "cifar-10-batches-bin"
LABEL_NAMES_FILE = "batches.meta.txt"
IMAGE_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
NUM_CLASSES = 10
RECORD_BYTES = 1 + 3 * 32 * 32  # a label and an image

# Each real file has 31 MB; an archive whose files are far larger is not CIFAR-10.
MAX_FILE_BYTES = 64 << 20
MAX_MEMBERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractedArchive:
    """Replaces TFDS's download manager: gives the builder local files and downloads nothing.

    Attributes:
      folder: the folder that contains the archive's `FOLDER`.
      downloaded_size: bytes downloaded, which TFDS records.
    """

    folder: pathlib.Path
    downloaded_size: int = 0

    def download_and_extract(self, url: str) -> str:
        """The folder, whatever the URL."""
        del url
        return os.fspath(self.folder)


def import_cifar(*, archive: str, data_dir: str, allow_any_checksum: bool = False) -> pathlib.Path:
    """Prepares cifar10 in `data_dir` from `archive` and returns the data set's folder.

    Writes to a temporary folder in `data_dir` and renames it at the end, so that an interrupted import leaves
    nothing behind.

    Raises:
      UserError: the archive is missing, not the official one, damaged or unsafe, or the data set already exists.
    """
    source, target = pathlib.Path(archive).expanduser(), pathlib.Path(data_dir).expanduser()
    prepared = target / "cifar10" / VERSION
    # Not the methods of pathlib: they raise an error in a folder that this user may not enter.
    if os.path.exists(prepared):
        raise UserError(
            f"{prepared} already exists and is not overwritten: use it, remove it, or give another --data_dir"
        )
    if not os.path.isfile(source):
        raise UserError(f"--archive={archive}: no such file; give the path of cifar-10-binary.tar.gz")
    if not os.access(source, os.R_OK):
        raise UserError(f"--archive={archive}: no permission to read it; change its mode, or give your own copy")
    if not allow_any_checksum:
        check_checksum(source)
    staging = _make_staging_folder(target)
    try:
        with _told_if_full(target):
            extract(source, staging / "archive")
            check_records(staging / "archive" / FOLDER)
            written = _prepare(staging / "archive", staging / "tfds")
        _move_in_place(written, prepared)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return prepared


@contextlib.contextmanager
def _told_if_full(data_dir: pathlib.Path):
    """Context manager: raises UserError if a write failed because the disk is full."""
    try:
        yield
    except Exception as error:
        if not _says_full(error):
            raise
        raise UserError(
            f"--data_dir={data_dir}: the disk is full, and nothing was imported; make room there, or give another "
            "folder"
        ) from error


def _says_full(error: Exception) -> bool:
    """Whether a write failed because the disk is full; TFDS's errors say so only in their text."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def check_checksum(archive: pathlib.Path) -> None:
    """Raises UserError if the SHA-256 of `archive` is not that of the official archive."""
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != OFFICIAL_SHA256:
        raise UserError(
            f"{archive}: SHA-256 is {found}, but that of the official cifar-10-binary.tar.gz is "
            f"{OFFICIAL_SHA256}: the file is damaged or another one; download it again, or pass "
            "--allow_any_checksum if you made it"
        )


def extract(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Extracts the files that the builder reads to `folder`, and checks every member of the archive on the way.

    Raises:
      UserError: `archive` is not a gzipped tar file, or has too many members, or one that is too large or is not a
        regular file in `FOLDER`.
    """
    wanted = {f"{FOLDER}/{name}" for name in (*IMAGE_FILES, LABEL_NAMES_FILE)}
    (folder / FOLDER).mkdir(parents=True)
    seen: set[str] = set()
    try:
        # "r|gz" reads the archive once, in order: each member that is extracted is the one that was checked.
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                name = os.path.normpath(member.name)
                _check_member(archive, member, name, seen)
                if name in wanted:
                    with members.extractfile(member) as data, (folder / name).open("xb") as file:
                        shutil.copyfileobj(data, file)
                seen.add(name)
    except (tarfile.TarError, EOFError, OSError) as error:
        if _says_full(error):
            raise
        raise UserError(
            f"{archive}: {error}: the file is not a complete .tar.gz file; download it again"
        ) from error
    missing = sorted(wanted - seen)
    if missing:
        raise UserError(f"{archive}: {missing[0]} is missing: give the binary version, cifar-10-binary.tar.gz")


def _check_member(archive: pathlib.Path, member: tarfile.TarInfo, name: str, seen: set[str]) -> None:
    """Raises UserError if a member is neither the folder itself nor a regular file directly in it."""
    shown = member.name if member.name.isprintable() else ascii(member.name)
    if len(seen) >= MAX_MEMBERS:
        raise UserError(
            f"{archive}: more than {MAX_MEMBERS} members: this is no CIFAR-10 archive; download it again"
        )
    if name in seen:
        raise UserError(
            f"{archive}: two members are named {shown}: this is no CIFAR-10 archive; download it again"
        )
    if member.isdir() and name == FOLDER:
        return
    if not member.isreg():
        raise UserError(
            f"{archive}: {shown} is not a regular file: links, devices and other folders are refused; download "
            "it again"
        )
    # normpath has resolved "..": a name directly in FOLDER cannot point elsewhere.
    if os.path.dirname(name) != FOLDER or member.name.startswith("/"):
        raise UserError(
            f"{archive}: {shown} does not lie in {FOLDER}/: this is no CIFAR-10 archive; download it again"
        )
    if member.size > MAX_FILE_BYTES:
        raise UserError(
            f"{archive}: {shown} unpacks to {member.size} bytes, above {MAX_FILE_BYTES}: this is no CIFAR-10 "
            "archive; download it again"
        )


def check_records(folder: pathlib.Path) -> None:
    """Checks that image files consist of whole records with labels 0 to 9, and that there are ten label names.

    TFDS's builder would fail late on a wrong file, or not at all.

    Raises:
      UserError: a file fails a check.
    """
    names = [line for line in (folder / LABEL_NAMES_FILE).read_text("utf-8", "replace").split("\n") if line]
    if len(names) != NUM_CLASSES:
        raise UserError(
            f"{LABEL_NAMES_FILE}: {len(names)} names, but CIFAR-10 has {NUM_CLASSES}: download the archive again"
        )
    for name in IMAGE_FILES:
        content = (folder / name).read_bytes()
        if not content or len(content) % RECORD_BYTES:
            raise UserError(
                f"{name}: {len(content)} bytes, not a multiple of {RECORD_BYTES}, the size of a record: download "
                "the archive again"
            )
        largest = max(content[::RECORD_BYTES])
        if largest >= NUM_CLASSES:
            raise UserError(
                f"{name}: label {largest}, but labels are 0 to {NUM_CLASSES - 1}: download the archive again"
            )


def _make_staging_folder(data_dir: pathlib.Path) -> pathlib.Path:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=".import_cifar_", dir=data_dir))
    except OSError as error:
        raise UserError(
            f"--data_dir={data_dir}: cannot write there ({error.strerror}); give another folder"
        ) from error


def _prepare(archive_folder: pathlib.Path, data_dir: pathlib.Path) -> pathlib.Path:
    """Writes the data set to `data_dir` with TFDS's builder; returns the folder of its version."""
    builder = tfds.builder("cifar10", data_dir=os.fspath(data_dir), try_gcs=False)
    if str(builder.version) != VERSION or not hasattr(builder, "_make_download_manager"):
        raise UserError(
            f"tensorflow-datasets {tfds.__version__} cannot import cifar10 {VERSION}: install "
            "tensorflow-datasets 4.9.10"
        )
    # TFDS's own download manager imports a package that TFDS 4.9 forgets to require (importlib_resources), and
    # could use the network. ExtractedArchive has only what the builder calls.
    builder._make_download_manager = lambda **unused: ExtractedArchive(folder=archive_folder)
    # TFDS prints its progress to stdout, where this program prints only its result.
    with contextlib.redirect_stdout(sys.stderr):
        builder.download_and_prepare(
            download_dir=os.fspath(data_dir / "downloads"),
            download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )
    return pathlib.Path(builder.data_dir)


def _move_in_place(written: pathlib.Path, prepared: pathlib.Path) -> None:
    try:
        prepared.parent.mkdir(exist_ok=True)
        # A rename within one file system: the whole set appears at once, and does not replace another import's.
        written.rename(prepared)
    except OSError as error:
        raise UserError(
            f"{prepared}: cannot move the data set there ({error.strerror}); check this folder and run again"
        ) from error


def _define_flags() -> None:
    flags.DEFINE_string(
        "archive", None, "Path of cifar-10-binary.tar.gz, the binary version of CIFAR-10.", required=True
    )
    flags.DEFINE_string(
        "data_dir",
        None,
        "Folder of prepared TensorFlow Datasets; the data set is written to cifar10/ in it.",
        required=True,
    )
    flags.DEFINE_boolean(
        "allow_any_checksum",
        False,
        "Accept an archive that is not the official one. Use it only for an archive that you made yourself.",
    )


def main(_) -> None:
    """Imports the archive and prints the data set's folder."""
    prepared = import_cifar(
        archive=FLAGS.archive, data_dir=FLAGS.data_dir, allow_any_checksum=FLAGS.allow_any_checksum
    )
    splits = tfds.builder("cifar10", data_dir=FLAGS.data_dir, try_gcs=False).info.splits
    counts = " and ".join(f"{splits[name].num_examples} {name}" for name in ("train", "test"))
    print(f"cifar10 {VERSION}: {counts} images in {prepared}")


def cli() -> None:
    """Console script."""
    _define_flags()
    binary.run(main, trains=False)


if __name__ == "__main__":
    cli()
