"""An import writes an archive as TFDS's own cifar10, or says in one line why not and writes nothing."""

import errno
import os
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from launch import import_cifar as binary
from launch.import_cifar import FOLDER, LABEL_NAMES_FILE, import_cifar
from models.tasks import build_task
from tests.launch.cifar_archive import NAMES, contents, plain, rows, write_archive
from towers.errors import UserError
from towers.task import InputShard


def refused(archive, data_dir, **options):
    """The error message of an import, which must leave nothing behind."""
    with pytest.raises(UserError) as error:
        import_cifar(archive=archive, data_dir=os.fspath(data_dir), **{"allow_any_checksum": True} | options)
    assert "\n" not in str(error.value)
    assert not data_dir.exists() or not list(data_dir.rglob("*"))
    return str(error.value)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported")
    import_cifar(
        archive=write_archive(folder / "a.tar.gz"),
        data_dir=os.fspath(folder / "tfds"),
        allow_any_checksum=True,
    )
    return folder / "tfds"


def test_tfds_loads_what_was_imported(imported):
    data, info = tfds.load(
        "cifar10",
        data_dir=os.fspath(imported),
        download=False,
        as_supervised=True,
        with_info=True,
        batch_size=-1,
    )
    assert info.features["label"].names == NAMES
    for split, seeds in (("train", range(5)), ("test", [5])):
        expected = np.concatenate([rows(seed) for seed in seeds])
        pictures = {row[1:].reshape(3, 32, 32).transpose(1, 2, 0).tobytes(): row[0] for row in expected}
        images, labels = (tensor.numpy() for tensor in data[split])
        assert {image.tobytes(): label for image, label in zip(images, labels, strict=True)} == pictures


def test_no_temporary_files_are_left(imported):
    assert [path.name for path in imported.iterdir()] == ["cifar10"]
    assert [path.name for path in (imported / "cifar10").iterdir()] == ["3.0.2"]


def test_the_task_reads_what_was_imported(imported):
    task = build_task("cifar10", network="classic_cnn", batch_size=6, data_dir=os.fspath(imported))
    sizes = [len(batch.labels) for batch in task.dataset("train", InputShard()).take(4)]
    assert sizes == [6, 6, 6, 2]


def test_nothing_is_overwritten(imported, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in imported.rglob("*")}
    with pytest.raises(UserError, match="already exists and is not overwritten"):
        import_cifar(
            archive=write_archive(tmp_path / "a.tar.gz"),
            data_dir=os.fspath(imported),
            allow_any_checksum=True,
        )
    assert before == {path: path.stat().st_mtime_ns for path in imported.rglob("*")}


def test_a_full_disk_is_not_called_a_damaged_archive(tmp_path, monkeypatch):
    def fails(*unused):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails_in_tfds(*unused):
        raise RuntimeError(
            "ResourceExhaustedError: Failed to finalize writing of 'train': No space left on device"
        )

    archive = write_archive(tmp_path / "a.tar.gz")
    with monkeypatch.context() as patched:
        patched.setattr(binary.shutil, "copyfileobj", fails)
        assert "the disk is full" in refused(archive, tmp_path / "tfds")
    monkeypatch.setattr(binary, "_prepare", fails_in_tfds)
    assert "the disk is full" in refused(archive, tmp_path / "tfds")


def test_an_archive_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    archive = write_archive(tmp_path / "a.tar.gz")
    monkeypatch.setattr(binary.os, "access", lambda path, mode: False)
    assert "no permission to read it" in refused(archive, tmp_path / "tfds")


def test_another_checksum_is_refused(tmp_path):
    archive = write_archive(tmp_path / "a.tar.gz")
    assert binary.OFFICIAL_SHA256 in refused(archive, tmp_path / "tfds", allow_any_checksum=False)


def test_the_checksum_is_the_one_that_tfds_registers():
    registered = tfds.core.tfds_path() / "url_checksums" / "cifar10.txt"
    assert binary.OFFICIAL_SHA256 in registered.read_text()


def link(kind):
    member = tarfile.TarInfo(f"{FOLDER}/link")
    member.type, member.linkname = kind, "/etc/passwd"
    return member, None


@pytest.mark.parametrize(
    "more, message",
    [
        ([plain("../outside", b"x")], "../outside does not lie in"),
        ([plain(f"{FOLDER}/../../outside", b"x")], "does not lie in"),
        ([plain("/tmp/outside", b"x")], "does not lie in"),
        ([plain(f"/{FOLDER}/data_batch_9.bin", b"x")], "does not lie in"),
        ([plain(f"{FOLDER}/deeper/file", b"x")], "does not lie in"),
        ([link(tarfile.SYMTYPE)], "not a regular file"),
        ([link(tarfile.LNKTYPE)], "not a regular file"),
        ([link(tarfile.CHRTYPE)], "not a regular file"),
        ([link(tarfile.FIFOTYPE)], "not a regular file"),
        ([plain(f"{FOLDER}/data_batch_1.bin", b"x")], "two members are named"),
        ([plain(f"{FOLDER}/./data_batch_1.bin", b"x")], "two members are named"),
        ([plain(f"{FOLDER}/{number}", b"") for number in range(80)], "more than 64"),
    ],
)
def test_unsafe_members_are_refused(tmp_path, more, message):
    assert message in refused(write_archive(tmp_path / "a.tar.gz", more=more), tmp_path / "tfds")


def test_a_member_of_absurd_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(binary, "MAX_FILE_BYTES", 1_000)
    assert "unpacks to 12292 bytes" in refused(write_archive(tmp_path / "a.tar.gz"), tmp_path / "tfds")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("data_batch_2.bin", None, "data_batch_2.bin is missing"),
        ("data_batch_2.bin", b"", "0 bytes"),
        ("data_batch_2.bin", rows(0).tobytes()[:-1], "not a multiple of 3073"),
        ("test_batch.bin", b"\x0a" + bytes(3072), "label 10"),
        (LABEL_NAMES_FILE, b"one\ntwo\n", "2 names"),
    ],
)
def test_files_that_are_no_cifar_are_refused(tmp_path, name, content, message):
    files = contents() | {name: content}
    members = [plain(f"{FOLDER}/{name}", data) for name, data in files.items() if data is not None]
    assert message in refused(write_archive(tmp_path / "a.tar.gz", members), tmp_path / "tfds")


@pytest.mark.parametrize("num_bytes", [0, 10, 20_000])
def test_a_truncated_archive_is_refused(tmp_path, num_bytes):
    archive = write_archive(tmp_path / "a.tar.gz")
    os.truncate(archive, num_bytes)
    assert "download it again" in refused(archive, tmp_path / "tfds")


def test_a_missing_archive_is_refused(tmp_path):
    assert "no such file" in refused(os.fspath(tmp_path / "none"), tmp_path / "tfds")


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_a_data_dir_that_cannot_be_one_is_refused(tmp_path, name):
    """The long name stands for a folder that this user may not enter; it fails for root too."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write there"):
        import_cifar(
            archive=write_archive(tmp_path / "a.tar.gz"),
            data_dir=os.fspath(tmp_path / name),
            allow_any_checksum=True,
        )


def test_an_interrupted_import_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*unused):
        raise KeyboardInterrupt

    monkeypatch.setattr(binary, "_move_in_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_cifar(
            archive=write_archive(tmp_path / "a.tar.gz"),
            data_dir=os.fspath(tmp_path / "tfds"),
            allow_any_checksum=True,
        )
    assert not list((tmp_path / "tfds").rglob("*"))


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "launch.import_cifar", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        cwd=os.path.dirname(os.path.dirname(binary.__file__)),
        check=False,
    )


@pytest.mark.full
def test_the_program_prints_the_folder_of_the_data_set(tmp_path):
    archive = write_archive(tmp_path / "a.tar.gz")
    done = run(f"--archive={archive}", f"--data_dir={tmp_path}/tfds", "--allow_any_checksum")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"cifar10 3.0.2: 20 train and 4 test images in {tmp_path}/tfds/cifar10/3.0.2\n"
    assert (tmp_path / "tfds/cifar10/3.0.2/dataset_info.json").exists()


def test_the_program_reports_a_mistake_in_one_line(tmp_path):
    done = run("--archive=/none.tar.gz", f"--data_dir={tmp_path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "import_cifar: error: --archive=/none.tar.gz: no such file; give the path of cifar-10-binary.tar.gz"
    ]


def test_records_have_the_same_order_in_every_store(imported):
    def labels(cache_bytes):
        task = build_task(
            "cifar10",
            network="classic_cnn",
            batch_size=5,
            data_dir=os.fspath(imported),
            cache_bytes=cache_bytes,
        )
        return [
            tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), batch)
            for batch in task.dataset("train", InputShard()).take(5)
        ]

    assert labels(cache_bytes=2**30) == labels(cache_bytes=0)
