"""Prepares TFDS's cifar10 from an archive that is already here, without any network.

    python -m launch.import_cifar --archive cifar-10-binary.tar.gz --data_dir ~/tensorflow_datasets

prints, after half a minute,

    cifar10 3.0.2: 50000 train and 10000 test images in /home/me/tensorflow_datasets/cifar10/3.0.2

Then `tfds.load('cifar10', data_dir=..., download=False)` works, and so does --task cifar10. The archive is
the binary version of https://www.cs.toronto.edu/~kriz/cifar.html; TFDS's own builder reads and writes it.
"""

import contextlib
import dataclasses
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

# As TFDS registers it: tensorflow_datasets/url_checksums/cifar10.txt.
OFFICIAL_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
VERSION = "3.0.2"

FOLDER = "cifar-10-batches-bin"
LABEL_NAMES_FILE = "batches.meta.txt"
IMAGE_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
NUM_CLASSES = 10
RECORD_BYTES = 1 + 3 * 32 * 32  # a label and a picture

# The real files are of 31 MB each; whatever unpacks to far more is no CIFAR-10.
MAX_FILE_BYTES = 64 << 20
MAX_MEMBERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractedArchive:
    """What TFDS's builder asks for its files: the face of a download manager that downloads nothing.

    Attributes:
      folder: where the archive's `FOLDER` lies.
      downloaded_size: bytes that came over the network, which TFDS writes down.
    """

    folder: pathlib.Path
    downloaded_size: int = 0

    def download_and_extract(self, url: str) -> str:
        """The folder, whatever the address."""
        del url
        return os.fspath(self.folder)


def import_cifar(*, archive: str, data_dir: str, allow_any_checksum: bool = False) -> pathlib.Path:
    """Prepares cifar10 in `data_dir` from `archive` and gives its folder.

    All is written to a temporary folder in data_dir and moved in place at the end: an import that is
    interrupted leaves no half of a set.

    Raises:
      UserError: the archive is missing, another one, damaged or unsafe; or the set is already there.
    """
    source, target = pathlib.Path(archive).expanduser(), pathlib.Path(data_dir).expanduser()
    prepared = target / "cifar10" / VERSION
    if prepared.exists():
        raise UserError(
            f"{prepared} exists: nothing is overwritten; use it, remove it, or take another --data_dir"
        )
    if not source.is_file():
        raise UserError(f"--archive={archive}: no such file; give the path of cifar-10-binary.tar.gz")
    if not allow_any_checksum:
        check_checksum(source)
    staging = _make_staging_folder(target)
    try:
        extract(source, staging / "archive")
        check_records(staging / "archive" / FOLDER)
        written = _prepare(staging / "archive", staging / "tfds")
        _move_in_place(written, prepared)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return prepared


def check_checksum(archive: pathlib.Path) -> None:
    """Refuses any file but the official archive.

    Raises:
      UserError: the SHA-256 differs.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != OFFICIAL_SHA256:
        raise UserError(
            f"{archive}: SHA-256 is {found}, the official cifar-10-binary.tar.gz has {OFFICIAL_SHA256}: "
            "it is damaged or another file; fetch it again, or pass --allow_any_checksum if you made it"
        )


def extract(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the files that the builder reads to `folder`; everything in the archive is checked, as a stream.

    Raises:
      UserError: no gzipped tar file; a member that is no plain file in `FOLDER`, or too large; too many.
    """
    wanted = {f"{FOLDER}/{name}" for name in (*IMAGE_FILES, LABEL_NAMES_FILE)}
    (folder / FOLDER).mkdir(parents=True)
    seen: set[str] = set()
    try:
        # "r|gz" reads along: a member is never looked up behind the checks.
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                name = os.path.normpath(member.name)
                _check_member(archive, member, name, seen)
                if name in wanted:
                    with members.extractfile(member) as data, (folder / name).open("xb") as file:
                        shutil.copyfileobj(data, file)
                seen.add(name)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive}: {error}: a whole .tar.gz file is needed; fetch it again") from error
    missing = sorted(wanted - seen)
    if missing:
        raise UserError(f"{archive}: holds no {missing[0]}: the binary version is needed, cifar-10-binary.tar.gz")


def _check_member(archive: pathlib.Path, member: tarfile.TarInfo, name: str, seen: set[str]) -> None:
    """One member may be the folder itself or a plain file right in it.

    Raises:
      UserError: it is anything else.
    """
    shown = member.name if member.name.isprintable() else ascii(member.name)
    if len(seen) >= MAX_MEMBERS:
        raise UserError(f"{archive}: more than {MAX_MEMBERS} members: this is no CIFAR-10 archive; fetch it again")
    if name in seen:
        raise UserError(f"{archive}: holds {shown} twice: this is no CIFAR-10 archive; fetch it again")
    if member.isdir() and name == FOLDER:
        return
    if not member.isreg():
        raise UserError(f"{archive}: {shown} is no plain file: links, devices and other folders are refused")
    # normpath has resolved "..": what is right in FOLDER now cannot lie elsewhere.
    if os.path.dirname(name) != FOLDER or member.name.startswith("/"):
        raise UserError(f"{archive}: {shown} does not lie in {FOLDER}/: this is no CIFAR-10 archive")
    if member.size > MAX_FILE_BYTES:
        raise UserError(f"{archive}: {shown} unpacks to {member.size} bytes, above {MAX_FILE_BYTES}: refused")


def check_records(folder: pathlib.Path) -> None:
    """Each image file must be whole records with labels 0 to 9, and there must be ten names.

    Raises:
      UserError: one is not; TFDS's builder would fail late, or not at all.
    """
    names = [line for line in (folder / LABEL_NAMES_FILE).read_text("utf-8", "replace").split("\n") if line]
    if len(names) != NUM_CLASSES:
        raise UserError(
            f"{LABEL_NAMES_FILE}: {len(names)} names: CIFAR-10 has {NUM_CLASSES}; fetch the archive again"
        )
    for name in IMAGE_FILES:
        content = (folder / name).read_bytes()
        if not content or len(content) % RECORD_BYTES:
            raise UserError(
                f"{name}: {len(content)} bytes: records have {RECORD_BYTES} each; fetch the archive again"
            )
        largest = max(content[::RECORD_BYTES])
        if largest >= NUM_CLASSES:
            raise UserError(f"{name}: label {largest}: labels are 0 to {NUM_CLASSES - 1}; fetch the archive again")


def _make_staging_folder(data_dir: pathlib.Path) -> pathlib.Path:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=".import_cifar_", dir=data_dir))
    except OSError as error:
        raise UserError(f"--data_dir={data_dir}: {error.strerror}: give a folder that can be written") from error


def _prepare(archive_folder: pathlib.Path, data_dir: pathlib.Path) -> pathlib.Path:
    """Lets TFDS's builder write the set to `data_dir`; gives the folder of its version."""
    builder = tfds.builder("cifar10", data_dir=os.fspath(data_dir), try_gcs=False)
    if str(builder.version) != VERSION or not hasattr(builder, "_make_download_manager"):
        raise UserError(f"tensorflow-datasets {tfds.__version__} cannot import cifar10 {VERSION}; install 4.9.10")
    # TFDS's own download manager looks for a package that TFDS 4.9 forgets to require (importlib_resources),
    # and could reach for the network. This one has what the builder asks for, and nothing else.
    builder._make_download_manager = lambda **unused: ExtractedArchive(folder=archive_folder)
    # TFDS tells its progress; the binary's own output is the line at the end.
    with contextlib.redirect_stdout(sys.stderr):
        builder.download_and_prepare(
            download_dir=os.fspath(data_dir / "downloads"),
            download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )
    return pathlib.Path(builder.data_dir)


def _move_in_place(written: pathlib.Path, prepared: pathlib.Path) -> None:
    try:
        prepared.parent.mkdir(exist_ok=True)
        # Within one file system: all of it appears at once, and not over another import's.
        written.rename(prepared)
    except OSError as error:
        raise UserError(
            f"{prepared}: {error.strerror}: the set could not be moved there; look what lies there"
        ) from error


def _define_flags() -> None:
    flags.DEFINE_string("archive", None, "Path of cifar-10-binary.tar.gz.", required=True)
    flags.DEFINE_string("data_dir", None, "Folder that TFDS's prepared sets lie in.", required=True)
    flags.DEFINE_boolean("allow_any_checksum", False, "Take an archive that is not the official one.")


def main(_) -> None:
    """Imports what the flags say and prints where it lies."""
    prepared = import_cifar(
        archive=FLAGS.archive, data_dir=FLAGS.data_dir, allow_any_checksum=FLAGS.allow_any_checksum
    )
    splits = tfds.builder("cifar10", data_dir=FLAGS.data_dir, try_gcs=False).info.splits
    counts = " and ".join(f"{splits[name].num_examples} {name}" for name in ("train", "test"))
    print(f"cifar10 {VERSION}: {counts} images in {prepared}")


def cli() -> None:
    """Runs the binary."""
    _define_flags()
    binary.run(main)


if __name__ == "__main__":
    cli()
