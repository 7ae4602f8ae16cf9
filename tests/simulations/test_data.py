import gzip
import hashlib
import io
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.simulations import data

PUBLISHED = {name: dict(source.md5) for name, source in data._SOURCES.items()}
RNG = np.random.default_rng(0)
IMAGES = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.array([0, 1, 2, 3, 4, 9], dtype=np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": np.array([5, 0, 7], dtype=np.uint8),
}
PERSON = (
    "{age}, {work}, {age}, HS-grad, {age}, Divorced, Sales, Wife, Black, Male, {age}, {age}, "
    "{age}, {land}"
)
ADULT = {
    "adult.data": "\n".join(
        f"{PERSON.format(age=age, work=work, land='Cuba')}, {label}"
        for age, work, label in ((20, "?", "<=50K"), (40, "Private", ">50K"), (60, "?", "<=50K"))
    ),
    "adult.test": "|1x3 Cross validator\n"
    f"{PERSON.format(age=40, work='Private', land='Peru')}, >50K.\n",
}


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.tobytes()


# One colour all over: next to nothing of it is lost.
COLOURS = np.array([[255, 0, 128], [10, 200, 30], [90, 90, 250]], dtype=np.uint8)


def jpegs(colours):
    parts = []
    for colour in colours:
        stream = io.BytesIO()
        image = Image.fromarray(np.broadcast_to(colour, (32, 32, 3)))
        image.save(stream, "JPEG", quality=100, subsampling=0)
        parts.append(stream.getvalue())
    joined = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return joined, np.cumsum([0, *map(len, parts)], dtype=np.int64)


def cifar10():
    arrays = {}
    for part, colours, labels in (
        ("train", COLOURS, [3, 0, 9]),
        ("test", COLOURS[::-1], [1, 2, 3]),
    ):
        arrays[f"{part}_bytes"], arrays[f"{part}_offsets"] = jpegs(colours)
        arrays[f"{part}_labels"] = np.array(labels, dtype=np.uint8)
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


CIFAR_FILES = {"cifar10_jpeg.npz": cifar10()}
IMAGE_FILES = {file: idx(array) for file, array in IMAGES.items()}
ADULT_FILES = {file: text.encode() for file, text in ADULT.items()}


@pytest.fixture(autouse=True)
def small_sources(monkeypatch):
    """Let the checksums be those of the small files."""
    for name, files in (
        ("mnist", IMAGE_FILES),
        ("adult", ADULT_FILES),
        ("adult-integers", ADULT_FILES),
        ("cifar10-jpeg", CIFAR_FILES),
    ):
        md5 = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
        monkeypatch.setitem(data._SOURCES, name, replace(data._SOURCES[name], md5=md5))


def write(folder: Path, files, *, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        if zipped:
            (folder / f"{file}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / file).write_bytes(content)


def test_digits_split_is_fixed_and_stratified():
    digits = data.load("digits")
    assert digits.features.shape == (1437, 64)
    assert digits.features.dtype == np.float32
    assert digits.labels.dtype == np.int64
    assert digits.features.min() == 0
    assert digits.features.max() == 1
    assert np.bincount(digits.test_labels).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    assert data.load("digits") is digits
    # Test records are not training records.
    rows = {row.tobytes() for row in digits.features}
    assert not any(row.tobytes() in rows for row in digits.test_features)


def test_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        data.load("digits").features[0] = 0


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_mnist_layouts(tmp_path, folder, zipped):
    write(tmp_path / folder, IMAGE_FILES, zipped=zipped)
    mnist = data.load("mnist", data_root=tmp_path)
    assert mnist.features.shape == (6, 1, 28, 28)
    assert mnist.features.dtype == np.float32
    assert mnist.labels.tolist() == [0, 1, 2, 3, 4, 9]
    assert mnist.test_labels.tolist() == [5, 0, 7]
    assert mnist.classes == 10
    for found, images in (
        (mnist.features, IMAGES["train-images-idx3-ubyte"]),
        (mnist.test_features, IMAGES["t10k-images-idx3-ubyte"]),
    ):
        np.testing.assert_allclose(found[:, 0], (images / 255 - 0.1307) / 0.3081, rtol=1e-6)
    assert data.load("mnist", data_root=str(tmp_path)) is mnist


@pytest.mark.parametrize("folder", ["cifar10", "."])
def test_cifar10_of_jpegs(tmp_path, folder):
    write(tmp_path / folder, CIFAR_FILES)
    cifar = data.load("cifar10-jpeg", data_root=tmp_path)
    assert cifar.features.shape == cifar.test_features.shape == (3, 3, 32, 32)
    assert cifar.features.dtype == np.float32
    assert cifar.labels.tolist() == [3, 0, 9]
    assert cifar.test_labels.tolist() == [1, 2, 3]
    assert cifar.classes == 10
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = (COLOURS / 255 - mean) / std
    for features, colours in ((cifar.features, expected), (cifar.test_features, expected[::-1])):
        shown = np.broadcast_to(colours[:, :, None, None], features.shape)
        np.testing.assert_allclose(features, shown, atol=3 / 255 / std.min())


def test_cifar10_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(DataError, match=r"CIFAR-10 \(JPEG\) not found in .*cifar10_jpeg\.npz"):
        data.load("cifar10-jpeg", data_root=tmp_path)
    write(tmp_path / "cifar10", {"cifar10_jpeg.npz": b"damaged"})
    with pytest.raises(DataError, match=r"cifar10_jpeg\.npz is damaged"):
        data.load("cifar10-jpeg", data_root=tmp_path)


def test_incomplete_folder_is_passed_over(tmp_path):
    write(tmp_path / "MNIST/raw", IMAGE_FILES)
    write(tmp_path / "mnist", {"train-images-idx3-ubyte": b"half a download"})
    assert data.load("mnist", data_root=tmp_path).labels.shape == (6,)


def test_adult(tmp_path):
    write(tmp_path / "adult", ADULT_FILES)
    adult = data.load("adult", data_root=tmp_path)
    # 6 numbers, then work "?" and "Private", then one category in each other column.
    assert adult.features.shape == (3, 6 + 2 + 7)
    age = np.array([20, 40, 60])
    for column in range(6):
        np.testing.assert_allclose(adult.features[:, column], (age - 40) / age.std(), rtol=1e-6)
    assert adult.features[:, 6:8].tolist() == [[1, 0], [0, 1], [1, 0]]
    assert adult.labels.tolist() == [0, 1, 0]
    assert adult.test_labels.tolist() == [1]
    assert adult.test_features[0, 0] == 0
    # Peru is not in the training file.
    assert adult.test_features[0, 6:].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert adult.classes == 2


def test_adult_with_categories_as_integers(tmp_path):
    write(tmp_path / "adult", ADULT_FILES)
    adult = data.load("adult-integers", data_root=tmp_path)
    assert adult.features.shape == (3, 14)
    assert adult.features.dtype == np.float32
    age = np.array([20, 40, 60])
    for column in (0, 2, 4, 10, 11, 12):
        np.testing.assert_allclose(adult.features[:, column], (age - 40) / age.std(), rtol=1e-6)
    # Work is 0 ("?"), 1 ("Private"), 0: mean 1/3, variance 2/9. The other categories are alike.
    work = (np.array([0, 1, 0]) - 1 / 3) / np.sqrt(2 / 9)
    np.testing.assert_allclose(adult.features[:, 1], work, rtol=1e-6)
    assert not adult.features[:, [3, 5, 6, 7, 8, 9, 13]].any()
    # Peru is not in the training file.
    expected = [0, work[1], *[0] * 11, -1]
    np.testing.assert_allclose(adult.test_features[0], expected, atol=1e-6)
    assert adult.labels.tolist() == [0, 1, 0]
    assert adult.test_labels.tolist() == [1]


def test_unknown_name():
    with pytest.raises(InvalidParameterError, match=r"dataset = 'mnits'.*nearest: 'mnist'"):
        data.load("mnits")


def test_no_data_root():
    with pytest.raises(DataError) as error:
        data.load("mnist")
    for part in ("MNIST", "--data-root DIR", "DIR/mnist", *IMAGE_FILES):
        assert part in str(error.value)


def test_missing_files(tmp_path):
    with pytest.raises(DataError) as error:
        data.load("fashion-mnist", data_root=tmp_path)
    for part in (
        "Fashion-MNIST not found",
        str(tmp_path / "fashion_mnist"),
        str(tmp_path / "FashionMNIST/raw"),
        *IMAGE_FILES,
        "--data-root",
    ):
        assert part in str(error.value)


def test_damaged_file(tmp_path):
    write(tmp_path / "mnist", {**IMAGE_FILES, "t10k-labels-idx1-ubyte": b"damaged"})
    with pytest.raises(DataError, match="is damaged or belongs to another data set") as error:
        data.load("mnist", data_root=tmp_path)
    expected = data._SOURCES["mnist"].md5["t10k-labels-idx1-ubyte"]
    for part in ("t10k-labels-idx1-ubyte", hashlib.md5(b"damaged").hexdigest(), expected):
        assert part in str(error.value)


@pytest.mark.parametrize("cut", [slice(0, -20), slice(3, None), slice(0, 0)])
def test_damaged_zip(tmp_path, cut):
    write(tmp_path / "mnist", IMAGE_FILES, zipped=True)
    path = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    stored = path.read_bytes()[cut]
    path.write_bytes(stored)
    with pytest.raises(DataError) as error:
        data.load("mnist", data_root=tmp_path)
    assert str(path) in str(error.value)
    assert data._SOURCES["mnist"].md5["train-images-idx3-ubyte"] in str(error.value)


def test_repaired_file_is_read(tmp_path):
    write(tmp_path / "mnist", {**IMAGE_FILES, "t10k-labels-idx1-ubyte": b"damaged"})
    with pytest.raises(DataError):
        data.load("mnist", data_root=tmp_path)
    write(tmp_path / "mnist", IMAGE_FILES)
    assert data.load("mnist", data_root=tmp_path).classes == 10


def torchvision(monkeypatch, mnist):
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchvision.datasets", SimpleNamespace(MNIST=mnist))


def test_download(tmp_path, monkeypatch):
    calls = []

    def mnist(root, *, download):
        calls.append((root, download))
        write(Path(root) / "MNIST/raw", IMAGE_FILES)

    torchvision(monkeypatch, mnist)
    assert data.load("mnist", data_root=tmp_path, download=True).classes == 10
    assert calls == [(str(tmp_path), True)]
    data.load("mnist", data_root=tmp_path, download=True)
    assert len(calls) == 1  # the files are there


@pytest.mark.parametrize("failure", [RuntimeError("Error downloading"), OSError("no network")])
def test_download_fails(tmp_path, monkeypatch, failure):
    def mnist(root, *, download):
        raise failure

    torchvision(monkeypatch, mnist)
    with pytest.raises(DataError) as error:
        data.load("mnist", data_root=tmp_path, download=True)
    for part in (str(failure), *IMAGE_FILES, str(tmp_path / "mnist")):
        assert part in str(error.value)


def test_download_without_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.datasets", raising=False)
    with pytest.raises(DataError, match="torchvision is not usable") as error:
        data.load("mnist", data_root=tmp_path, download=True)
    for part in (*IMAGE_FILES, str(tmp_path / "mnist")):
        assert part in str(error.value)


def test_adult_is_not_downloaded(tmp_path):
    with pytest.raises(DataError, match=r"Adult cannot be downloaded.*adult\.data, adult\.test"):
        data.load("adult", data_root=tmp_path, download=True)


def test_download_needs_a_data_root():
    with pytest.raises(DataError, match="--data-root DIR"):
        data.load("mnist", download=True)


def test_available(tmp_path):
    write(tmp_path / "mnist", IMAGE_FILES)
    write(tmp_path / "adult", {**ADULT_FILES, "adult.test": b"damaged"})
    state = data.available(tmp_path)
    assert set(state) == set(data.DATASETS)
    assert state["digits"] == state["mnist"] == "found"
    assert state["fashion-mnist"].startswith("missing: Fashion-MNIST not found in")
    assert state["adult"].startswith("damaged: ")
    assert "adult.test" in state["adult"]


def test_available_without_a_data_root():
    state = data.available()
    assert state.pop("digits") == "found"
    assert all(text.startswith("missing: ") for text in state.values())


def test_checksums_are_md5():
    for files in PUBLISHED.values():
        assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in files.values())
    labels = PUBLISHED["mnist"]["t10k-labels-idx1-ubyte"]
    assert labels == "27ae3e4e09519cfbb04c329615203637"


@pytest.mark.skipif("FLWR_PRIVACY_DATA" not in os.environ, reason="FLWR_PRIVACY_DATA is not set")
@pytest.mark.parametrize(
    ("name", "shape", "counts"),
    [
        (
            "mnist",
            (1, 28, 28),
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        ),
        ("fashion-mnist", (1, 28, 28), [6000] * 10),
        ("cifar10-jpeg", (3, 32, 32), [5000] * 10),
        ("adult", (108,), [24720, 7841]),
        ("adult-integers", (14,), [24720, 7841]),
    ],
)
def test_published_files(monkeypatch, name, shape, counts):
    published = replace(data._SOURCES[name], md5=PUBLISHED[name])
    monkeypatch.setitem(data._SOURCES, name, published)
    found = data.load(name, data_root=os.environ["FLWR_PRIVACY_DATA"])
    assert found.features.shape[1:] == found.test_features.shape[1:] == shape
    assert np.bincount(found.labels).tolist() == counts
    if not name.startswith("adult"):
        assert found.features.mean() == pytest.approx(0, abs=1e-3)
        # What was lost of the JPEGs is contrast.
        lost = 0.01 if name == "cifar10-jpeg" else 1e-3
        assert found.features.std() == pytest.approx(1, abs=lost)
