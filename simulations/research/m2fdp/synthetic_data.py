"""Data for simulations of M2FDP: labelled records, with few labels on each device.

The paper ("Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation")
says of its split only that it is not i.i.d.; here every device has a few of the labels, and equally
many records of each. Its images are not in here: a
`SyntheticData` is made from any labelled records, or from the synthetic ones of `generated_data`.

Everything here comes from ordinary seeded generators: it is data, and protects nobody.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, InvalidParameterError, check_integer
from flwr_privacy.wire.identity import stream

__all__ = ["SyntheticData", "generated_data", "labelled_data", "random_patches", "split"]

Features = NDArray[np.float32]
Labels = NDArray[np.int64]

_BLOCK = 500  # images whose patches are in memory at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticData:
    """The records of all devices, equally many of each, and those for tests.

    Parameters
    ----------
    features : ndarray of float32, shape (N, m, d)
        Records of N devices.
    labels : ndarray of int64, shape (N, m)
        Their classes, 0 to ``classes - 1``.
    test_features : ndarray of float32, shape (n, d)
        Records that no device has.
    test_labels : ndarray of int64, shape (n,)
        Their classes.
    classes : int
        Number of classes, at least 2.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or a label is out of range.
    """

    features: Features
    labels: Labels
    test_features: Features
    test_labels: Labels
    classes: int

    def __post_init__(self) -> None:
        if self.features.ndim != 3 or 0 in self.features.shape:
            raise InvalidParameterError("features", self.features.shape, "a shape (N, m, d)")
        devices, records, d = self.features.shape
        if self.test_features.ndim != 2 or self.test_features.shape[1] != d:
            raise InvalidParameterError("test_features", self.test_features.shape, f"(n, {d})")
        check_integer("classes", self.classes, minimum=2)
        for name, labels, shape in (
            ("labels", self.labels, (devices, records)),
            ("test_labels", self.test_labels, self.test_features.shape[:1]),
        ):
            if labels.shape != shape or 0 in shape:
                raise InvalidParameterError(name, labels.shape, f"the shape {shape}")
            if labels.min() < 0 or labels.max() >= self.classes:
                allowed = f"labels from 0 to {self.classes - 1}"
                raise InvalidParameterError(name, [labels.min(), labels.max()], allowed)

    @property
    def devices(self) -> int:
        """Number of devices, N."""
        return int(self.features.shape[0])

    @property
    def parameters(self) -> int:
        """Values of a linear model without bias, M."""
        return int(self.features.shape[2]) * self.classes


def split(labels: Labels, *, devices: int, each: int, seed: int) -> Labels:
    """Deal records to devices that have few labels each.

    Every device has `each` labels and equally many records of each; all labels have equally many
    devices, or one more. Records that are over when all devices have equally many are left out.

    Parameters
    ----------
    labels : ndarray of int64, shape (n,)
        Classes of the records.
    devices : int
        N, at least 1.
    each : int
        Labels of a device, from 1 to the number of classes that are there.
    seed : int
        Root of the draws.

    Returns
    -------
    ndarray of int64, shape (N, m)
        Indices of each device's records; nobody shares one.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    DataError
        If a label has fewer records than devices that are to have it.

    Examples
    --------
    >>> labels = np.arange(120) % 4
    >>> parts = split(labels, devices=6, each=2, seed=0)
    >>> parts.shape, [len(np.unique(labels[part])) for part in parts]
    ((6, 20), [2, 2, 2, 2, 2, 2])
    """
    check_integer("devices", devices, minimum=1)
    classes, numbers = np.unique(labels, return_counts=True)
    check_integer("each", each, minimum=1, maximum=len(classes))
    draws = stream(seed, "m2fdp scene", "split")
    holders = np.zeros(len(classes), dtype=np.int64)
    own = []
    for _ in range(devices):
        fewest = np.lexsort((draws.random(len(classes)), holders))[:each]
        holders[fewest] += 1
        own.append(fewest)
    share = int((numbers[holders > 0] // holders[holders > 0]).min())
    if share == 0:
        raise DataError(
            f"a label has {numbers.min()} records, too few for {holders.max()} devices that are to "
            f"have it: ask for fewer devices than {devices}, or for fewer labels each"
        )
    order = draws.permutation(len(labels))
    left = [order[labels[order] == name] for name in classes]
    parts = np.empty((devices, each * share), dtype=np.int64)
    for device, chosen in enumerate(own):
        parts[device] = np.concatenate([left[index][:share] for index in chosen])
        for index in chosen:
            left[index] = left[index][share:]
    return parts


def labelled_data(
    features: Features,
    labels: Labels,
    test_features: Features,
    test_labels: Labels,
    *,
    devices: int,
    seed: int,
    each: int = 3,
    records: int | None = None,
) -> SyntheticData:
    """Split labelled records over devices; see `split`.

    Parameters
    ----------
    features : ndarray, shape (n, ...)
        Records for training; each becomes a vector.
    labels : ndarray of int64, shape (n,)
        Their classes.
    test_features, test_labels : ndarray
        Records for tests, likewise.
    devices : int
        N.
    seed : int
        Root of the split.
    each : int, default 3
        Labels of a device.
    records : int, optional
        Most records of a device; by default as many as there are.

    Raises
    ------
    InvalidParameterError, DataError
        As of `split` and of `SyntheticData`.
    """
    parts = split(labels, devices=devices, each=each, seed=seed)
    if records is not None:
        check_integer("records", records, minimum=1)
        shuffled = stream(seed, "m2fdp scene", "records").permuted(parts, axis=1)
        parts = shuffled[:, :records]
    flat = np.asarray(features, dtype=np.float32).reshape(len(features), -1)
    return SyntheticData(
        features=flat[parts],
        labels=np.asarray(labels)[parts],
        test_features=np.asarray(test_features, dtype=np.float32).reshape(len(test_features), -1),
        test_labels=np.asarray(test_labels),
        classes=int(max(labels.max(), test_labels.max())) + 1,
    )


def generated_data(
    seed: int, *, N: int = 50, m: int = 60, d: int = 40, classes: int = 10, each: int = 3
) -> SyntheticData:
    """Return records of Gaussian classes (ours): means on a sphere, and noise as large as that.

    Parameters
    ----------
    seed : int
        Root of the draws.
    N, m : int, default 50, 60
        Devices, and about how many records each has.
    d, classes : int, default 40, 10
        Features, and classes.
    each : int, default 3
        Labels of a device.

    Examples
    --------
    >>> data = generated_data(0, N=10)
    >>> data.features.shape, data.parameters
    ((10, 60, 40), 400)
    """
    for name, value in (("N", N), ("m", m), ("d", d)):
        check_integer(name, value, minimum=1)
    check_integer("classes", classes, minimum=2)
    draws = stream(seed, "m2fdp scene", "synthetic")
    means = draws.normal(size=(classes, d))
    means *= 3 / np.linalg.norm(means, axis=1, keepdims=True)

    def records(number: int) -> tuple[Features, Labels]:
        labels = np.arange(number) % classes
        features = (means[labels] + draws.normal(size=(number, d))) / np.sqrt(d)
        return features.astype(np.float32), labels

    features, labels = records(N * m)
    test_features, test_labels = records(100 * classes)
    return labelled_data(
        features, labels, test_features, test_labels, devices=N, seed=seed, each=each
    )


def random_patches(
    images: Features, *, filters: int, seed: int, width: int = 6, stride: int = 2, pools: int = 3
) -> Features:
    """Return fixed features of images: a layer of random convolutions, rectified and pooled.

    The filters are public numbers: they are drawn from `seed`, and no image has a part in them. A
    filter's responses above and below zero are two features in each of ``pools * pools`` fields.

    Parameters
    ----------
    images : ndarray of float32, shape (n, channels, height, height)
        Images.
    filters : int
        Number of filters, at least 1.
    seed : int
        Of the filters.
    width, stride : int, default 6, 2
        Size of a filter, and how far apart its places are.
    pools : int, default 3
        Fields along a side, over which responses are averaged; at most the places along a side.

    Returns
    -------
    ndarray of float32, shape (n, 2 * filters * pools * pools)

    Raises
    ------
    InvalidParameterError
        If the images have another shape, or a value is not allowed.

    Examples
    --------
    >>> images = np.zeros((2, 3, 32, 32), dtype=np.float32)
    >>> random_patches(images, filters=5, seed=0).shape
    (2, 90)
    """
    if images.ndim != 4 or images.shape[2] != images.shape[3]:
        allowed = "a shape (n, channels, height, height)"
        raise InvalidParameterError("images", images.shape, allowed)
    check_integer("filters", filters, minimum=1)
    check_integer("width", width, minimum=1, maximum=images.shape[2])
    check_integer("stride", stride, minimum=1)
    places = (images.shape[2] - width) // stride + 1
    check_integer("pools", pools, minimum=1, maximum=places)
    size = images.shape[1] * width * width
    draws = stream(seed, "m2fdp scene", "filters").normal(size=(size, filters))
    draws -= draws.mean(axis=0)  # a flat patch has no response
    draws /= np.linalg.norm(draws, axis=0)
    weights = draws.astype(np.float32)
    ends = np.linspace(0, places, pools + 1).round().astype(int)
    fields = [
        (slice(ends[row], ends[row + 1]), slice(ends[column], ends[column + 1]))
        for row in range(pools)
        for column in range(pools)
    ]
    features = np.empty((len(images), 2, len(fields), filters), dtype=np.float32)
    for start in range(0, len(images), _BLOCK):
        windows = np.lib.stride_tricks.sliding_window_view(
            images[start : start + _BLOCK], (width, width), axis=(2, 3)
        )[:, :, ::stride, ::stride]
        patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, size)
        patches = patches - patches.mean(axis=1, keepdims=True)
        patches /= np.sqrt(patches.var(axis=1, keepdims=True) + 0.1)
        found = (patches @ weights).reshape(len(windows), places, places, filters)
        for index, (rows, columns) in enumerate(fields):
            field = found[:, rows, columns].reshape(len(windows), -1, filters)
            features[start : start + len(windows), 0, index] = np.maximum(field, 0).mean(axis=1)
            features[start : start + len(windows), 1, index] = np.maximum(-field, 0).mean(axis=1)
    return features.reshape(len(images), -1)
