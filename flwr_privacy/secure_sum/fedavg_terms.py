"""Federated averaging under a secure sum: updates on a grid that covers a declared range."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, ProtocolError, check_number
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.wire.arrays import Arrays

__all__ = ["FedAvgSumTerms"]

logger = logging.getLogger("flwr.privacy")


@dataclass(frozen=True, kw_only=True)
class FedAvgSumTerms:
    """The terms of a secure sum of plain federated averaging's updates.

    Parameters
    ----------
    grid : CodeGrid
        An update is rounded to the nearest multiple of its step.
    value_range : float
        Entries of an update lie between minus this and this.
    weighted_by : str
        Metric of the training that is the weight; empty where all weigh the same.
    keep_back : tuple of str, default ()
        Arrays that are not sent, beside those of integers, which never are.
    """

    grid: CodeGrid
    value_range: float
    weighted_by: str
    keep_back: tuple[str, ...] = ()

    def names(self, model: Arrays) -> list[str]:
        """Return the names of the arrays whose updates are sent, running statistics included.

        Raises
        ------
        InvalidParameterError
            If there are none.
        """
        return released_names(model, self.keep_back, statistics=True)

    def codes(self, values: NDArray[np.float64], what: str) -> NDArray[np.int32]:
        """Return values as codes, rounded to the nearest; the values are overwritten.

        Raises
        ------
        DataError
            If a value is beyond the range; the log has the largest one.
        """
        largest = float(max(values.max(initial=0.0), -values.min(initial=0.0)))
        if not largest <= self.value_range:
            logger.error("%s has values up to %g", what, largest)
            raise DataError(
                f"{what} is beyond value_range = {self.value_range:g}: raise it in the SecureSum, "
                "or train in smaller steps"
            )
        values *= 1 / self.grid.step  # exact: a power of two
        return np.rint(values, out=values).astype(np.int32)

    def write(self) -> dict[str, Any]:
        """Return the fields of a message."""
        return {
            "grid": self.grid.exponent,
            "value-range": self.value_range,
            "weighted-by": self.weighted_by,
            "keep-back": list(self.keep_back),
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "FedAvgSumTerms":
        """Read the fields of a message.

        Raises
        ------
        ProtocolError
            If a field is missing or has another type.
        InvalidParameterError
            If a value is out of range.
        """
        keep_back, weighted_by = fields.get("keep-back", []), fields.get("weighted-by", "")
        if (
            not isinstance(keep_back, list)
            or not all(type(name) is str for name in keep_back)
            or type(weighted_by) is not str
            or type(fields.get("grid")) is not int
            or type(fields.get("value-range")) is not float
        ):
            raise ProtocolError("the request has no terms of a secure sum, or malformed ones")
        value_range = check_number("value-range", fields["value-range"], minimum=0)
        return cls(
            grid=CodeGrid(fields["grid"]),
            value_range=value_range,
            weighted_by=weighted_by,
            keep_back=tuple(keep_back),
        )
