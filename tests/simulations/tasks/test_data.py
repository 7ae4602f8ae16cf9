import hashlib
import io
import os
import re
import sys
from dataclasses import replace
from http.client import BadStatusLine
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from image_files import idx, write
from PIL import Image
from scipy.io import savemat

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.simulations.tasks import data, unsplit_data

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


def comma_separated(names, rows):
    return "\n".join(",".join(map(str, row)) for row in [names, *rows]).encode()


# Ten rows; the last column of credit, and one in the middle of parkinsons, has the labels.
DEFAULTS = [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
CREDIT_FILES = {
    "UCI_Credit_Card.csv": comma_separated(
        ["ID", *(f"x{i}" for i in range(23)), "default.payment.next.month"],
        [[1000 + row, *(100 * row + np.arange(23)), DEFAULTS[row]] for row in range(10)],
    )
}
PARKINSONS_FILES = {
    "parkinsons.data": comma_separated(
        ["name", *(f"x{i}" for i in range(16)), "status", *(f"x{i}" for i in range(16, 22))],
        [
            [
                f"S{row}",
                *(100 * row + np.arange(16)),
                DEFAULTS[row],
                *(100 * row + np.arange(16, 22)),
            ]
            for row in range(10)
        ],
    )
}


def mfeat():
    cells = np.empty((1, 6), dtype=object)
    first = 0
    for view, width in enumerate(unsplit_data.MFEAT_VIEWS):
        cells[0, view] = 1000.0 * np.arange(20)[:, None] + first + np.arange(width)
        first += width
    stream = io.BytesIO()
    savemat(stream, {"X": cells, "Y": np.repeat(np.arange(2), 10)[:, None]})
    return stream.getvalue()


def leaves():
    cells = np.empty((1, 3), dtype=object)
    for view in range(3):
        cells[0, view] = 1000.0 * np.arange(16)[:, None] + 64 * view + np.arange(64)
    stream = io.BytesIO()
    savemat(stream, {"X": cells, "Y": np.repeat([1, 2], 8)[:, None]})
    return stream.getvalue()


def msrc():
    views, first = {}, 0
    for number, width in enumerate(unsplit_data.MSRC_VIEWS, start=1):
        views[f"msr{number}"] = 10_000.0 * np.arange(20)[:, None] + first + np.arange(width)
        first += width
    stream = io.BytesIO()
    savemat(stream, {**views, "truth": np.repeat([1, 2], 10)[:, None]})
    return stream.getvalue()


def isolet():
    rows = np.column_stack([100.0 * np.arange(20)[:, None] + np.arange(5), np.repeat([1, 2], 10)])
    return "\n".join(", ".join(f"{value:.4f}" for value in row) for row in rows).encode()


MFEAT_FILES = {"handwritten.mat": mfeat()}
LEAVES_FILES = {"100Leaves.mat": leaves()}
MSRC_FILES = {"MSRC_v1.mat": msrc()}
ISOLET_FILES = {"isolet5.data": isolet()}
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
        ("credit", CREDIT_FILES),
        ("mfeat", MFEAT_FILES),
        ("leaves", LEAVES_FILES),
        ("msrc", MSRC_FILES),
        ("isolet", ISOLET_FILES),
        ("parkinsons", PARKINSONS_FILES),
    ):
        md5 = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
        monkeypatch.setitem(data._SOURCES, name, replace(data._SOURCES[name], md5=md5))


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


def places(found, *, rows, step):
    """Return which row each record is, after a look at all of its columns."""
    assert found.features.dtype == np.float32
    columns = np.arange(found.features.shape[1])
    drawn = []
    for features in (found.features, found.test_features):
        where = (features[:, 0] / step).astype(int)
        np.testing.assert_array_equal(features, step * where[:, None] + columns)
        drawn.append(where.tolist())
    assert sorted(drawn[0] + drawn[1]) == list(range(rows))
    return drawn


@pytest.mark.parametrize(
    ("name", "folder", "files", "columns", "tests"),
    [
        ("credit", "credit_default", CREDIT_FILES, 23, 2),
        ("parkinsons", "parkinsons", PARKINSONS_FILES, 22, 3),
    ],
)
def test_tables_have_neither_names_nor_labels_in_their_columns(
    tmp_path, name, folder, files, columns, tests
):
    write(tmp_path / folder, files)
    found = data.load(name, data_root=tmp_path)
    assert found.features.shape == (10 - tests, columns)
    assert found.classes == 2
    train, test = places(found, rows=10, step=100)
    assert found.labels.tolist() == [DEFAULTS[row] for row in train]
    assert found.test_labels.tolist() == [DEFAULTS[row] for row in test]
    assert found.test_labels.sum() == 1  # 40 % of them, rounded


def test_the_views_of_mfeat_stand_side_by_side(tmp_path):
    write(tmp_path / "multiview", MFEAT_FILES)
    found = data.load("mfeat", data_root=tmp_path)
    assert found.features.shape == (12, 649)
    train, test = places(found, rows=20, step=1000)
    assert found.labels.tolist() == [row // 10 for row in train]
    assert found.test_labels.tolist() == [row // 10 for row in test]
    assert np.bincount(found.test_labels).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("name", "folder", "files", "step", "rows", "columns", "tests"),
    [
        ("leaves", "multiview", LEAVES_FILES, 1000, 16, 192, 4),
        ("msrc", "multiview", MSRC_FILES, 10_000, 20, 1622, 4),
        ("isolet", "isolet", ISOLET_FILES, 100, 20, 5, 4),
    ],
)
def test_stand_ins_have_the_columns_and_classes_of_their_files(
    tmp_path, name, folder, files, step, rows, columns, tests
):
    write(tmp_path / folder, files)
    found = data.load(name, data_root=tmp_path)
    assert found.features.shape == (rows - tests, columns)
    assert found.classes == 2
    train, test = places(found, rows=rows, step=step)
    assert found.labels.tolist() == [row // (rows // 2) for row in train]
    assert found.test_labels.tolist() == [row // (rows // 2) for row in test]
    assert np.bincount(found.test_labels).tolist() == [tests // 2] * 2


def test_views_of_other_sizes_are_refused():
    stream = io.BytesIO()
    cells = np.empty((1, 2), dtype=object)
    cells[0, 0], cells[0, 1] = np.zeros((3, 2)), np.zeros((3, 5))
    savemat(stream, {"X": cells, "Y": np.zeros((3, 1))})
    with pytest.raises(DataError, match=r"views of \(2, 5\) columns"):
        unsplit_data.parse_mfeat({"handwritten.mat": stream.getvalue()})


def test_breast_cancer_comes_with_scikit_learn():
    found = data.load("breast-cancer")
    assert found.features.shape == (455, 30)
    assert np.bincount(found.labels).tolist() == [170, 285]
    assert np.bincount(found.test_labels).tolist() == [42, 72]


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


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("Error downloading"), OSError("no network"), BadStatusLine("no server of files")],
)
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
    for part in ("pip install 'flwr-privacy[vision]'", *IMAGE_FILES, str(tmp_path / "mnist")):
        assert part in str(error.value)


def test_download_with_a_torchvision_of_another_torch(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    text = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision/__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torchvision", "torchvision.datasets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        DataError, match=r"nms does not exist\): install torch and torchvision from"
    ):
        data.load("mnist", data_root=tmp_path, download=True)


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
    assert state.pop("digits") == state.pop("breast-cancer") == "found"
    assert all(text.startswith("missing: ") for text in state.values())


def test_checksums_are_md5():
    for files in PUBLISHED.values():
        assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in files.values())
    labels = PUBLISHED["mnist"]["t10k-labels-idx1-ubyte"]
    assert labels == "27ae3e4e09519cfbb04c329615203637"


@pytest.mark.long
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
        ("mfeat", (649,), [120] * 10),
        ("leaves", (192,), [12] * 100),
        ("msrc", (1622,), [24] * 7),
        ("isolet", (617,), [48] * 12 + [47] + [48] * 13),
        ("credit", (23,), [18691, 5309]),
        ("parkinsons", (22,), [33, 103]),
    ],
)
def test_published_files(monkeypatch, name, shape, counts):
    published = replace(data._SOURCES[name], md5=PUBLISHED[name])
    monkeypatch.setitem(data._SOURCES, name, published)
    found = data.load(name, data_root=os.environ["FLWR_PRIVACY_DATA"])
    assert found.features.shape[1:] == found.test_features.shape[1:] == shape
    assert np.bincount(found.labels).tolist() == counts
    if len(shape) == 3:
        assert found.features.mean() == pytest.approx(0, abs=1e-3)
        # What was lost of the JPEGs is contrast.
        lost = 0.01 if name == "cifar10-jpeg" else 1e-3
        assert found.features.std() == pytest.approx(1, abs=lost)
