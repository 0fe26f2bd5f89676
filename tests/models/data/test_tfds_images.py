"""Sets that TFDS prepared: the examples that are read, and the messages when a set is missing."""

import os
import pathlib
import socket
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from models.data.image_store import ImageStore
from models.data.record_store import RecordStore
from models.data.tfds_images import DEFAULT_IMAGE_SIZE, NotPrepared, cifar10_set, tfds_set
from models.tasks import build_task
from tests.tiers import first_quick
from towers.errors import UserError
from towers.task import InputShard

SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data" / "tfds"
LABELLED = {"picture": tfds.features.Image(shape=(6, 5, 3)), "kind": tfds.features.ClassLabel(num_classes=4)}


def picture(number, shape=(6, 5, 3)):
    return np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)


def example(number):
    return {"picture": picture(number), "kind": number % 4}


def prepare(folder, name, features, splits, make=example, num_shards=1, file_format=None):
    """Lets TFDS write a set; `splits` gives each split's examples, by number."""

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def split_generators(self, dl_manager):
        return {split: ((number, make(number)) for number in numbers) for split, numbers in splits.items()}

    body = {
        "VERSION": tfds.core.Version("1.0.0"),
        "name": name,
        "_info": info,
        "_split_generators": split_generators,
        "_generate_examples": lambda self: (),
    }
    # Not registered: TFDS finds the set by its files, like a folder that was copied here.
    bases, unregistered = (tfds.core.GeneratorBasedBuilder,), {"skip_registration": True}
    builder_class = types.new_class(name.title(), bases, unregistered, lambda space: space.update(body))
    builder = builder_class(data_dir=os.fspath(folder), file_format=file_format)
    # TFDS's download manager needs importlib_resources, which TFDS does not install; nothing is downloaded here.
    builder._make_download_manager = lambda **unused: types.SimpleNamespace(downloaded_size=0)
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=num_shards)
    )
    return os.fspath(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tfds")


@pytest.fixture(scope="module")
def three_files(folder):
    # More than 16 examples in each file: by default TFDS would read 16 examples from each file in turn.
    return prepare(folder, "three_files", LABELLED, {"train": range(60), "test": range(60, 67)}, num_shards=3)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*unused, **also_unused):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def of(name, data_dir, **options):
    return tfds_set(name, **{"data_dir": data_dir, "cache_bytes": 2**20} | options)


def all_examples(store):
    images, labels = store.gather(tf.range(store.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def test_train_and_held_out_examples_are_those_of_the_splits(three_files):
    images = of("three_files", three_files)
    assert (images.image_shape, images.num_classes) == ((6, 5, 3), 4)
    assert images.num_examples == {"train": 60, "eval": 7}
    for store, numbers in ((images.train, range(60)), (images.evaluation, range(60, 67))):
        assert isinstance(store, ImageStore)
        read = {image.tobytes(): label for image, label in zip(*all_examples(store), strict=True)}
        assert read == {picture(number).tobytes(): number % 4 for number in numbers}


def test_memory_and_disk_have_the_same_examples_in_the_same_order(three_files):
    small, large = of("three_files", three_files), of("three_files", three_files, cache_bytes=7 * 90)
    assert isinstance(large.train, RecordStore) and isinstance(large.evaluation, ImageStore)
    assert len(set(large.train.index.files.tolist())) == 3
    for mine, other in zip(all_examples(small.train), all_examples(large.train), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert small.statistics == large.statistics


def test_batches_are_the_same_from_memory_and_disk(three_files):
    read = []
    for cache_bytes in (2**20, 0):
        task = build_task(
            "tfds:three_files",
            network="classic_cnn",
            batch_size=8,
            data_dir=three_files,
            cache_bytes=cache_bytes,
        )
        stream = task.dataset("train", InputShard(index=1, count=2, first_batch=1)).take(4)
        read.append([(batch.features.numpy(), batch.labels.numpy()) for batch in stream])
    for (mine, my_labels), (other, other_labels) in zip(*read, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(my_labels, other_labels)


def test_validation_replaces_a_missing_test_split(folder):
    splits = {"train": range(5), "validation": range(5, 8)}
    data_dir = prepare(folder, "validated", LABELLED, splits)
    assert of("validated", data_dir).num_examples == {"train": 5, "eval": 3}


@pytest.mark.parametrize("cache_bytes", [2**20, 0])
def test_a_set_with_only_train_is_divided(folder, cache_bytes):
    name = f"undivided{cache_bytes}"
    data_dir = prepare(folder, name, LABELLED, {"train": range(20)}, num_shards=2)
    images = of(name, data_dir, cache_bytes=cache_bytes)
    assert images.num_examples == {"train": 18, "eval": 2}
    parts = [{image.tobytes() for image in all_examples(store)[0]} for store in (images.train, images.evaluation)]
    assert parts[0] | parts[1] == {picture(number).tobytes() for number in range(20)}
    assert not parts[0] & parts[1]


def striped(number):
    """A centred blue square, red to its left and right, in one of two shapes."""
    high, wide = (40, 40 + 20 * number) if number % 2 else (60, 60)
    image = np.zeros((high, wide, 3), np.uint8)
    image[..., 0] = 255
    left = (wide - high) // 2
    image[:, left : left + high] = (0, 0, 200)
    return {"picture": image, "kind": 0}


@pytest.mark.parametrize("image_size, side", first_quick([(16, 16), (None, DEFAULT_IMAGE_SIZE)]))
def test_images_of_different_sizes_become_their_centred_square(folder, image_size, side):
    name = f"varied{side}"
    features = LABELLED | {"picture": tfds.features.Image(shape=(None, None, 3))}
    data_dir = prepare(folder, name, features, {"train": range(4), "test": range(1)}, make=striped)
    images = of(name, data_dir, image_size=image_size)
    assert images.image_shape == (side, side, 3)
    for store in (images.train, of(name, data_dir, image_size=image_size, cache_bytes=0).train):
        read, _ = all_examples(store)
        np.testing.assert_array_equal(read, np.broadcast_to(np.array([0, 0, 200], np.uint8), (4, side, side, 3)))


def test_grey_images_keep_one_channel(folder):
    features = LABELLED | {"picture": tfds.features.Image(shape=(6, 5, 1))}
    data_dir = prepare(
        folder,
        "grey",
        features,
        {"train": range(3), "test": range(2)},
        make=lambda number: {"picture": picture(number, (6, 5, 1)), "kind": 1},
    )
    assert of("grey", data_dir).train.images.shape == (3, 6, 5, 1)


@pytest.mark.parametrize(
    "name, features, said",
    [
        ("unlabelled", {"picture": LABELLED["picture"]}, "picture: Image"),
        ("twice_labelled", LABELLED | {"other": LABELLED["kind"]}, "other: ClassLabel"),
        ("deep", LABELLED | {"picture": tfds.features.Image(shape=(6, 5, 3), dtype=np.uint16)}, "uint16"),
    ],
)
def test_a_set_with_other_features_is_refused(folder, name, features, said):
    values = {"picture": picture(0).astype(features["picture"].np_dtype), "kind": 0, "other": 1}
    made = {key: values[key] for key in features}
    data_dir = prepare(folder, name, features, {"train": range(1)}, make=lambda number: made)
    with pytest.raises(UserError) as error:
        of(name, data_dir)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_set_without_train_is_refused(folder):
    data_dir = prepare(folder, "only_test", LABELLED, {"test": range(3)})
    with pytest.raises(UserError, match="only_test has test: must have a split 'train'"):
        of("only_test", data_dir)


@pytest.mark.parametrize("given", [None, "empty"])
@pytest.mark.parametrize(
    "make, name",
    [
        (cifar10_set, "cifar10"),
        (lambda **where: tfds_set("mnist", **where), "mnist"),
        (lambda **where: tfds_set("no_such_set", **where), "no_such_set"),
    ],
)
def test_a_set_that_is_not_prepared_is_refused_with_two_fixes(tmp_path, given, make, name):
    data_dir = given and os.fspath(tmp_path / given)
    with pytest.raises(NotPrepared) as error:
        make(data_dir=data_dir, cache_bytes=2**20)
    message, shown = str(error.value), data_dir or "D"
    assert (error.value.name, error.value.data_dir) == (name, data_dir)
    assert "\n" not in message and f"copy a prepared folder {name}/ into {shown}" in message
    assert f"tfds.builder('{name}', data_dir='{shown}').download_and_prepare()" in message
    assert not (tmp_path / "empty").exists()


LARGE = (400, 400, 3)


def uniform(number):
    """A large picture in a small file."""
    return {"picture": np.full(LARGE, number % 256, np.uint8), "kind": number % 4}


def memory_bytes(what: str) -> int:
    """This process's resident memory: 'VmRSS' now, 'VmHWM' at its peak."""
    (line,) = (
        line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return 1024 * int(line.split()[1])


@pytest.mark.full
def test_reading_a_split_into_memory_takes_little_more_than_its_size(folder):
    forget_maximum = pathlib.Path("/proc/self/clear_refs")
    if not os.access(forget_maximum, os.W_OK):
        pytest.skip("this system does not tell the most memory that a process had")
    features = {**LABELLED, "picture": tfds.features.Image(shape=LARGE)}
    data_dir = prepare(folder, "large", features, {"train": range(600), "test": range(1)}, make=uniform)
    images = of("large", data_dir, cache_bytes=2**30)
    forget_maximum.write_text("5")
    before = memory_bytes("VmRSS")
    store = images.train
    grown = memory_bytes("VmHWM") - before
    assert isinstance(store, ImageStore) and store.num_examples == 600
    assert grown < 1.6 * 600 * np.prod(LARGE)
    pictures, labels = (tensor.numpy() for tensor in store.gather(tf.range(0, 600, 100, dtype=tf.int64)))
    assert len(set(pictures[:, 7, 7, 1].tolist())) > 1
    np.testing.assert_array_equal(pictures, np.broadcast_to(pictures[:, :1, :1, :1], pictures.shape))
    np.testing.assert_array_equal(pictures[:, 7, 7, 1] % 4, labels)


def test_a_split_that_neither_memory_nor_its_files_allow_is_refused(folder):
    data_dir = prepare(folder, "other_format", LABELLED, {"train": range(60)}, file_format="array_record")
    with pytest.raises(UserError) as error:
        of("other_format", data_dir, cache_bytes=500)
    message = str(error.value)
    assert "other_format is stored as array_record, and its split train[:90%] takes 4860 bytes" in message
    assert "cache_bytes=500" in message and "use cache_bytes=4860" in message and "\n" not in message


def _cut(file):
    file.write_bytes(file.read_bytes()[:500])


def _change(file):
    content = bytearray(file.read_bytes())
    content[500] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage, said",
    [
        (_cut, r"train.tfrecord-00000-of-00001: ends at byte 500, inside record \d+ of 30"),
        (pathlib.Path.unlink, "train.tfrecord-00000-of-00001: No such file or directory"),
        (_change, r"damaged/1.0.0: its split train can't be read \(corrupted record at \d+\): a file is damaged"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, damage, said):
    data_dir = prepare(tmp_path, "damaged", LABELLED, {"train": range(30), "test": range(3)})
    damage(tmp_path / "damaged" / "1.0.0" / "damaged-train.tfrecord-00000-of-00001")
    with pytest.raises(UserError, match=said) as error:
        _ = of("damaged", data_dir).train
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, said",
    [
        ("cifar10:9.9.9", "Dataset cifar10 cannot be loaded at version 9.9.9, only: 3.0.2; give another version"),
        ("mnist/no_such", "tfds:mnist/no_such: BuilderConfig no_such not found; give another version"),
    ],
)
def test_a_version_or_configuration_that_tfds_does_not_have_is_refused(tmp_path, name, said):
    with pytest.raises(UserError, match=said) as error:
        of(name, os.fspath(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["huggingface:mnist", "", "a b", "../mnist", "mnist:latest"])
def test_names_for_which_tfds_uses_the_network_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="not a TFDS name"):
        of(name, os.fspath(tmp_path))


def test_an_image_size_below_one_is_refused(three_files):
    with pytest.raises(UserError, match="image_size=0"):
        of("three_files", three_files, image_size=0)


@pytest.mark.full
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")
def test_the_shared_cifar10_is_read_whole():
    task = build_task("cifar10", network="resnet20", batch_size=256, data_dir=os.fspath(SHARED))
    assert (task.num_examples("train"), task.num_examples("eval")) == (50_000, 10_000)
    labels = np.concatenate([batch.labels for batch in task.dataset("eval", InputShard())])
    assert np.bincount(labels).tolist() == [1_000] * 10
    # The usual normalisation constants fit these pixels.
    (batch,) = task.dataset("eval", InputShard()).take(1)
    np.testing.assert_allclose(batch.features.numpy().std(), 1, atol=0.1)
