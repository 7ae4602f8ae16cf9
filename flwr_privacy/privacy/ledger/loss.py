"""Notes in a ledger that charges are missing which a witness has seen, by the operator's word."""

import json
from dataclasses import dataclass

from flwr_privacy.errors import check_integer

from .entries import check_time
from .lines import record_text

__all__ = ["Loss"]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The operator's word that a ledger goes on although charges are missing.

    Parameters
    ----------
    time : str
        When the operator said so, in UTC.
    charges : int
        Charges in the ledger at that time.
    witnessed : int
        Charges that the witness had seen. Those that are missing are in no total.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    time: str
    charges: int
    witnessed: int

    def __post_init__(self) -> None:
        check_time(self.time)
        check_integer("charges", self.charges, minimum=0)
        check_integer("witnessed", self.witnessed, minimum=0)

    def text(self) -> bytes:
        """Return the record of a ledger."""
        return record_text("loss", [self.time, self.charges, self.witnessed])

    @classmethod
    def read(cls, body: bytes) -> "Loss":
        """Read the record.

        Raises
        ------
        ValueError
            If it is none.
        """
        try:
            time, charges, witnessed = json.loads(body)["loss"]
            return cls(time=time, charges=charges, witnessed=witnessed)
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError("no record of a loss") from error
