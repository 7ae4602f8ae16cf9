"""Parsers for data sets that are published without a test part; the split is drawn here.

``digits``: scikit-learn's handwritten digits, 64 pixels of 1,797 images, a fifth of them test
records.

``mfeat``: the six views of UCI's multiple features of handwritten digits, side by side, 649 columns
of 2,000 digits; 40 % of them are test records.

``credit``: UCI's default of credit card clients, 23 columns of 30,000 clients (never their number),
a fifth of them test records; class 1, a default, has 22 %.

``parkinsons``: UCI's detection of Parkinson's disease, 22 measures of 195 voice recordings of 31
people, 30 % of them test records; class 1 is ill. A person has about six recordings, and they fall
on both sides of the split. The FedVS paper describes these people, but gives the size of a later
set of 756 recordings, which is not this one.

``breast-cancer``: scikit-learn's, 30 columns of 569 people, a fifth of them test records; class 1
is benign.

``isolet``: the part "isolet5" of UCI's spoken letters, 617 columns of 1,559 recordings of the 26
letters, a fifth of them test records.

``leaves``: the three views of one hundred plant species' leaves side by side, 192 columns of 1,600
leaves, 16 of each species, a quarter of them test records.

``msrc``: the five views of MSRC-v1's photographs side by side, 1,622 columns of 210 images of 7
classes, a fifth of them test records.

All splits have the shares of the classes and are drawn with seed 0; no column is scaled.
"""

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError

from .records import Dataset

__all__ = [
    "MFEAT_VIEWS",
    "MSRC_VIEWS",
    "breast_cancer",
    "digits",
    "parse_credit",
    "parse_isolet",
    "parse_leaves",
    "parse_mfeat",
    "parse_msrc",
    "parse_parkinsons",
]

Contents = Mapping[str, bytes]

MFEAT_VIEWS = (240, 76, 216, 47, 64, 6)
"""Columns of pixel averages, Fourier coefficients, profile correlations, Zernike moments,
Karhunen-Loeve coefficients and shape."""
MSRC_VIEWS = (24, 576, 512, 256, 254)
"""Columns of colour moments, gradient histograms, GIST, local binary patterns and CENTRIST."""


@lru_cache(maxsize=1)
def digits() -> Dataset:
    """Return scikit-learn's handwritten digits, with pixels from 0 to 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return _split(images / 16, labels, test_share=0.2)


def breast_cancer() -> Dataset:
    """Return scikit-learn's data set."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return _split(features, labels, test_share=0.2)


def parse_mfeat(contents: Contents) -> Dataset:
    """Return the views of ``handwritten.mat`` side by side.

    Raises
    ------
    DataError
        If they have other sizes.
    """
    table = _matlab(contents, "handwritten.mat")
    features = _side_by_side(table["X"].ravel(), MFEAT_VIEWS, file="handwritten.mat")
    return _split(features, table["Y"].ravel(), test_share=0.4)


def parse_leaves(contents: Contents) -> Dataset:
    """Return the views of ``100Leaves.mat`` side by side.

    Raises
    ------
    DataError
        If they have other sizes.
    """
    table = _matlab(contents, "100Leaves.mat")
    features = _side_by_side(table["X"].ravel(), (64, 64, 64), file="100Leaves.mat")
    return _split(features, table["Y"].ravel() - 1, test_share=0.25)


def parse_msrc(contents: Contents) -> Dataset:
    """Return the views of ``MSRC_v1.mat`` side by side.

    Raises
    ------
    DataError
        If they have other sizes.
    """
    table = _matlab(contents, "MSRC_v1.mat")
    views = [table[f"msr{number}"] for number in range(1, len(MSRC_VIEWS) + 1)]
    features = _side_by_side(views, MSRC_VIEWS, file="MSRC_v1.mat")
    return _split(features, table["truth"].ravel() - 1, test_share=0.2)


def parse_isolet(contents: Contents) -> Dataset:
    """Return the columns of ``isolet5.data``; the letter, the last one, is the label."""
    table = np.loadtxt(io.BytesIO(contents["isolet5.data"]), delimiter=",")
    return _split(table[:, :-1], table[:, -1] - 1, test_share=0.2)


def _matlab(contents: Contents, file: str) -> dict[str, Any]:
    from scipy.io import loadmat

    table: dict[str, Any] = loadmat(io.BytesIO(contents[file]))
    return table


def _side_by_side(views: Sequence[Any], widths: Sequence[int], *, file: str) -> NDArray[np.float64]:
    """Return views as columns of one table, if they have the published widths."""
    found = [np.asarray(view, dtype=np.float64) for view in views]
    if (own := tuple(view.shape[1] for view in found)) != tuple(widths):
        raise DataError(f"{file} has views of {own} columns, not {tuple(widths)}")
    return np.concatenate(found, axis=1)


def parse_credit(contents: Contents) -> Dataset:
    """Return the columns of ``UCI_Credit_Card.csv`` between the number and the label."""
    label = "default.payment.next.month"
    return _table(contents["UCI_Credit_Card.csv"], label=label, without="ID", test_share=0.2)


def parse_parkinsons(contents: Contents) -> Dataset:
    """Return the measures of ``parkinsons.data``."""
    return _table(contents["parkinsons.data"], label="status", without="name", test_share=0.3)


def _table(content: bytes, *, label: str, without: str, test_share: float) -> Dataset:
    import pandas as pd

    table = pd.read_csv(io.BytesIO(content))
    features = table.drop(columns=[label, without]).to_numpy()
    return _split(features, table[label].to_numpy(), test_share=test_share)


def _split(features: NDArray[Any], labels: NDArray[Any], *, test_share: float) -> Dataset:
    from sklearn.model_selection import train_test_split

    train, test, train_labels, test_labels = train_test_split(
        features.astype(np.float32),
        labels.astype(np.int64),
        test_size=test_share,
        random_state=0,
        stratify=labels,
    )
    return Dataset(
        features=train,
        labels=train_labels,
        test_features=test,
        test_labels=test_labels,
        classes=int(labels.max()) + 1,
    )
