"""Checks bounds of a server against limits of the client's data that its operator sets."""

import math
from dataclasses import dataclass, fields

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

from .terms import DataTerms

__all__ = ["DataLimits"]


@dataclass(frozen=True, kw_only=True)
class DataLimits:
    """Bounds of a client's data that its operator knows without reading them.

    Parameters
    ----------
    feature_bound, label_bound, feature_norm, label_norm, max_records : float or int, optional
        As of `flwr_privacy.acfl.terms.DataTerms`; by default whatever the server names.

    Raises
    ------
    InvalidParameterError
        If a limit is no number above 0.

    Examples
    --------
    >>> limits = DataLimits(feature_norm=1.0, max_records=1000)
    """

    feature_bound: float | None = None
    label_bound: float | None = None
    feature_norm: float | None = None
    label_norm: float | None = None
    max_records: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and entry.name == "max_records":
                check_integer(entry.name, value, minimum=1)
            elif value is not None:
                check_number(entry.name, value, minimum=math.ulp(0.0))

    def check(self, terms: DataTerms) -> None:
        """Refuse bounds that are tighter than these.

        Raises
        ------
        InvalidParameterError
            If one is. It says nothing of the data: these limits do not depend on them.
        """
        for entry in fields(self):
            mine, asked = getattr(self, entry.name), getattr(terms, entry.name)
            if mine is not None and asked < mine:
                raise InvalidParameterError(entry.name, asked, f"at least {mine}, the node's limit")
