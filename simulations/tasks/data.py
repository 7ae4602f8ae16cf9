"""The data sets of the tasks, read from files whose checksums are known.

``digits`` and ``breast-cancer`` come with scikit-learn. The others are files in a folder that the
user names (``--data-root``), in a folder of their own there or in torchvision's layout.
"""

import gzip
import hashlib
import importlib
import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, check_choice

from . import adult, unsplit_data
from .records import Dataset

__all__ = ["DATASETS", "Dataset", "available", "load"]

Contents = Mapping[str, bytes]
FloatArray = NDArray[np.float32]
LabelArray = NDArray[np.int64]


def load(name: str, *, data_root: str | Path | None = None, download: bool = False) -> Dataset:
    """Return a data set; a process reads each data set once.

    Parameters
    ----------
    name : {"adult", "adult-integers", "breast-cancer", "cifar10-jpeg", "credit", "digits", \
"fashion-mnist", "isolet", "leaves", "mfeat", "mnist", "msrc", "parkinsons"}
        Name of the data set. ``digits``: 64 features in [0, 1]; ``mnist``, ``fashion-mnist``:
        (1, 28, 28) images, normalised with the published mean and standard deviation;
        ``cifar10-jpeg``: (3, 32, 32) images, normalised likewise, that were stored with loss, so
        that accuracies on them are not the published ones of CIFAR-10; ``adult``: 6 numeric
        columns, standardised with the training file's statistics, then 102 one-hot columns ("?" is
        a category like any other; a category which the training file lacks is all zeros);
        ``adult-integers``: the same 14 columns in the order of the file, a category as its position
        among those of the training file (one that is not there: -1), all standardised with the
        training file's statistics; for the others see
        `flwr_privacy.simulations.tasks.unsplit_data`.
    data_root : str or Path, optional
        Folder with the files; ``digits`` and ``breast-cancer`` need none.
    download : bool, default False
        Let torchvision fetch missing files of ``mnist`` and ``fashion-mnist`` into `data_root`.

    Raises
    ------
    InvalidParameterError
        If no data set has that name.
    DataError
        If files are missing, cannot be downloaded, or are damaged.

    Examples
    --------
    >>> digits = load("digits")
    >>> digits.features.shape, digits.test_features.shape, digits.classes
    ((1437, 64), (360, 64), 10)
    """
    check_choice("dataset", name, DATASETS)
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    source = _SOURCES[name]
    root = _absolute(data_root)
    if download and root is not None and _complete_folder(source, root) is None:
        _download(source, root)
    return _load(name, root)


def available(data_root: str | Path | None = None) -> dict[str, str]:
    """Report for each data set whether it can be used; does not raise.

    Returns
    -------
    dict of str to str
        ``"found"``, ``"missing: ..."`` or ``"damaged: ..."`` per name.

    Examples
    --------
    >>> available()["digits"]
    'found'
    """
    state = dict.fromkeys(_BUILT_IN, "found")
    for name, source in _SOURCES.items():
        try:
            _read(source, _absolute(data_root))
        except _MissingError as error:
            state[name] = f"missing: {error}"
        except _DamagedError as error:
            state[name] = f"damaged: {error}"
        else:
            state[name] = "found"
    return state


class _MissingError(DataError):
    """Files are not there."""


class _DamagedError(DataError):
    """A file is there, but it is not what its publisher distributes."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    title: str
    folders: tuple[str, ...]  # below the data root, in the order in which they are tried
    md5: Mapping[str, str]  # of each file's unzipped content
    parse: Callable[[Contents], Dataset]
    torchvision: str | None = None  # the class that downloads it


@lru_cache(maxsize=4)
def _load(name: str, root: Path | None) -> Dataset:
    source = _SOURCES[name]
    return source.parse(_read(source, root))


def _read(source: _Source, root: Path | None) -> dict[str, bytes]:
    if root is None:
        raise _MissingError(
            f"{source.title} comes with no library: name the folder that has it with "
            f"--data-root DIR. Put {_wanted(source)} into DIR/{source.folders[0]}"
        )
    folder = _complete_folder(source, root)
    if folder is None:
        looked = ", ".join(str(root / folder) for folder in source.folders)
        raise _MissingError(
            f"{source.title} not found in {looked}: put {_wanted(source)} into "
            f"{root / source.folders[0]}, or name another folder with --data-root"
        )
    return {file: _content(_present(folder, file), md5) for file, md5 in source.md5.items()}


def _content(path: Path | None, md5: str) -> bytes:
    assert path is not None  # the folder was found complete
    expected = f"expected {md5} (MD5 of the content, unzipped): put the publisher's file there"
    stored = path.read_bytes()
    try:
        content = gzip.decompress(stored) if path.suffix == ".gz" else stored
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _DamagedError(
            f"{path} cannot be unzipped ({error}); checksum of the zipped file {_md5(stored)}, "
            f"{expected}"
        ) from error
    found = _md5(content)
    if found != md5:
        raise _DamagedError(
            f"{path} is damaged or belongs to another data set: checksum {found}, {expected}"
        )
    return content


def _complete_folder(source: _Source, root: Path) -> Path | None:
    for folder in source.folders:
        if all(_present(root / folder, file) for file in source.md5):
            return root / folder
    return None


def _present(folder: Path, file: str) -> Path | None:
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    return None


def _wanted(source: _Source) -> str:
    return f"the files {', '.join(source.md5)} (unzipped, or zipped with .gz at the end)"


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _absolute(data_root: str | Path | None) -> Path | None:
    return None if data_root is None else Path(data_root).expanduser().absolute()


def _download(source: _Source, root: Path) -> None:
    by_hand = f"put {_wanted(source)} into {root / source.folders[0]} by hand"
    if source.torchvision is None:
        raise _MissingError(f"{source.title} cannot be downloaded by torchvision: {by_hand}")
    try:
        downloads = importlib.import_module("torchvision.datasets")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        advice = "pip install 'flwr-privacy[vision]'"
        if not isinstance(error, ImportError):
            advice = "install torch and torchvision from one index, so that they fit each other"
        raise _MissingError(
            f"{source.title} cannot be downloaded, torchvision is not usable ({error}): "
            f"{advice}, or {by_hand}"
        ) from error
    try:
        getattr(downloads, source.torchvision)(str(root), download=True)
    except (OSError, RuntimeError, HTTPException) as error:  # HTTPException: no server for files
        raise _MissingError(
            f"{source.title} could not be downloaded ({error}): {by_hand}"
        ) from error


def _parse_images(mean: float, std: float) -> Callable[[Contents], Dataset]:
    pixels = _normalised(mean, std)

    def parse(contents: Contents) -> Dataset:
        return Dataset(
            features=pixels[_idx(contents["train-images-idx3-ubyte"])][:, None],
            labels=_idx(contents["train-labels-idx1-ubyte"]).astype(np.int64),
            test_features=pixels[_idx(contents["t10k-images-idx3-ubyte"])][:, None],
            test_labels=_idx(contents["t10k-labels-idx1-ubyte"]).astype(np.int64),
            classes=10,
        )

    return parse


def _normalised(mean: float, std: float) -> FloatArray:
    # The 256 possible pixels are normalised once, then looked up.
    return ((np.arange(256) / 255 - mean) / std).astype(np.float32)


def _idx(content: bytes) -> NDArray[np.uint8]:
    # Two zero bytes, the type, the number of axes, then the length of each axis.
    axes = content[3]
    shape = np.frombuffer(content, dtype=">i4", count=axes, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape)


_CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR10_STD = (0.2470, 0.2435, 0.2616)


def _parse_cifar10(contents: Contents) -> Dataset:
    # As bytes the 60,000 images take 184 MB, as floats 740 MB: one part after the other.
    with np.load(io.BytesIO(contents["cifar10_jpeg.npz"])) as archive:
        return Dataset(
            features=_jpegs(archive["train_bytes"], archive["train_offsets"]),
            labels=archive["train_labels"].astype(np.int64),
            test_features=_jpegs(archive["test_bytes"], archive["test_offsets"]),
            test_labels=archive["test_labels"].astype(np.int64),
            classes=10,
        )


def _jpegs(stream: NDArray[np.uint8], offsets: NDArray[np.int64]) -> FloatArray:
    """Decode images of 32 x 32 that follow one another in a stream."""
    from PIL import Image

    images = np.empty((len(offsets) - 1, 32, 32, 3), dtype=np.uint8)
    for index, (start, end) in enumerate(pairwise(offsets)):
        with Image.open(io.BytesIO(stream[start:end].tobytes())) as image:
            images[index] = np.asarray(image.convert("RGB"))
    features = np.empty((len(images), 3, 32, 32), dtype=np.float32)
    for channel, (mean, std) in enumerate(zip(_CIFAR10_MEAN, _CIFAR10_STD, strict=True)):
        features[:, channel] = _normalised(mean, std)[images[..., channel]]
    return features


_ADULT = _Source(
    title="Adult",
    folders=("adult", "."),
    md5={
        "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
        "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
    },
    parse=adult.parse_adult,
)

_BUILT_IN: Mapping[str, Callable[[], Dataset]] = {
    "breast-cancer": unsplit_data.breast_cancer,
    "digits": unsplit_data.digits,
}

_SOURCES: dict[str, _Source] = {
    "adult": _ADULT,
    "adult-integers": replace(_ADULT, parse=adult.parse_adult_integers),
    "cifar10-jpeg": _Source(
        title="CIFAR-10 (JPEG)",
        folders=("cifar10", "."),
        md5={"cifar10_jpeg.npz": "4d1823968bd315052eb2ec8d3d6452ed"},
        parse=_parse_cifar10,
    ),
    "credit": _Source(
        title="Default of credit card clients",
        folders=("credit_default", "."),
        md5={"UCI_Credit_Card.csv": "940b416bb13a9b24bb5c9e1589284005"},
        parse=unsplit_data.parse_credit,
    ),
    "fashion-mnist": _Source(
        title="Fashion-MNIST",
        folders=("fashion_mnist", "FashionMNIST/raw", "."),
        md5={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        parse=_parse_images(0.2860, 0.3530),
        torchvision="FashionMNIST",
    ),
    "isolet": _Source(
        title="ISOLET, its fifth part",
        folders=("isolet", "."),
        md5={"isolet5.data": "b9fa171e8494aad3c44f7141f58a3147"},
        parse=unsplit_data.parse_isolet,
    ),
    "leaves": _Source(
        title="One hundred plant species' leaves",
        folders=("multiview", "."),
        md5={"100Leaves.mat": "469ec192613697bc99fb331d10632a70"},
        parse=unsplit_data.parse_leaves,
    ),
    "mfeat": _Source(
        title="Multiple features",
        folders=("multiview", "."),
        md5={"handwritten.mat": "da4db5add0c187d76ff6017555082205"},
        parse=unsplit_data.parse_mfeat,
    ),
    "mnist": _Source(
        title="MNIST",
        folders=("mnist", "MNIST/raw", "."),
        md5={
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
        parse=_parse_images(0.1307, 0.3081),
        torchvision="MNIST",
    ),
    "msrc": _Source(
        title="MSRC-v1",
        folders=("multiview", "."),
        md5={"MSRC_v1.mat": "83b641287b2ca0245253afb3308e069b"},
        parse=unsplit_data.parse_msrc,
    ),
    "parkinsons": _Source(
        title="Parkinsons",
        folders=("parkinsons", "."),
        md5={"parkinsons.data": "d39150ece93cc717703cfa072d3219b2"},
        parse=unsplit_data.parse_parkinsons,
    ),
}

DATASETS = (*_BUILT_IN, *_SOURCES)
