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

All splits have the shares of the classes and are drawn with seed 0; no column is scaled.
"""

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError

from .records import Dataset

__all__ = [
    "MFEAT_VIEWS",
    "breast_cancer",
    "digits",
    "parse_credit",
    "parse_mfeat",
    "parse_parkinsons",
]

Contents = Mapping[str, bytes]

MFEAT_VIEWS = (240, 76, 216, 47, 64, 6)
"""Columns of pixel averages, Fourier coefficients, profile correlations, Zernike moments,
Karhunen-Loeve coefficients and shape."""


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
    from scipy.io import loadmat

    table = loadmat(io.BytesIO(contents["handwritten.mat"]), variable_names=["X", "Y"])
    views = [np.asarray(view, dtype=np.float64) for view in table["X"].ravel()]
    widths = tuple(view.shape[1] for view in views)
    if widths != MFEAT_VIEWS:
        raise DataError(f"handwritten.mat has views of {widths} columns, not {MFEAT_VIEWS}")
    return _split(np.concatenate(views, axis=1), table["Y"].ravel(), test_share=0.4)


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
