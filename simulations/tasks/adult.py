"""Parsers for the census data set Adult: with one-hot categories, and with integers for them."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .records import Dataset

__all__ = ["parse_adult", "parse_adult_integers"]

Contents = Mapping[str, bytes]
FloatArray = NDArray[np.float32]

_NUMERIC = (0, 2, 4, 10, 11, 12)
_CATEGORIES = (1, 3, 5, 6, 7, 8, 9, 13)
_INCOME = 14


def parse_adult(contents: Contents) -> Dataset:
    """Return the numeric columns, standardised, then one column for each category."""
    train, test = _tables(contents)
    numeric = train[list(_NUMERIC)].to_numpy(dtype=float)
    mean, std = numeric.mean(axis=0), numeric.std(axis=0)
    categories = [np.unique(train[column].to_numpy(dtype=str)) for column in _CATEGORIES]

    def features(table: Any) -> FloatArray:
        standardised = (table[list(_NUMERIC)].to_numpy(dtype=float) - mean) / std
        one_hot = [
            table[column].to_numpy(dtype=str)[:, None] == names
            for column, names in zip(_CATEGORIES, categories, strict=True)
        ]
        return np.concatenate([standardised, *one_hot], axis=1, dtype=np.float32)

    return _dataset(train, test, features)


def parse_adult_integers(contents: Contents) -> Dataset:
    """Return the columns in the order of the file, with integers for categories, standardised."""
    train, test = _tables(contents)
    places = {
        column: {name: place for place, name in enumerate(sorted(set(train[column])))}
        for column in _CATEGORIES
    }

    def numbers(table: Any) -> NDArray[np.float64]:
        columns = [
            table[column].map(places[column]).fillna(-1) if column in places else table[column]
            for column in range(_INCOME)
        ]
        return np.stack([column.to_numpy(dtype=float) for column in columns], axis=1)

    known = numbers(train)
    mean, std = known.mean(axis=0), known.std(axis=0)
    std[std == 0] = 1  # a column with one value
    return _dataset(train, test, lambda table: ((numbers(table) - mean) / std).astype(np.float32))


def _dataset(train: Any, test: Any, features: Callable[[Any], FloatArray]) -> Dataset:
    return Dataset(
        features=features(train),
        labels=_labels(train),
        test_features=features(test),
        test_labels=_labels(test),
        classes=2,
    )


def _tables(contents: Contents) -> list[Any]:
    import pandas as pd

    return [
        pd.read_csv(
            io.BytesIO(contents[file]),
            header=None,
            skiprows=skipped,
            skipinitialspace=True,
            keep_default_na=False,
        )
        for file, skipped in (("adult.data", 0), ("adult.test", 1))
    ]


def _labels(table: Any) -> NDArray[np.int64]:
    # The test file ends its labels with a full stop.
    income: NDArray[np.str_] = table[_INCOME].str.rstrip(".").to_numpy(dtype=str)
    return np.equal(income, ">50K").astype(np.int64)
