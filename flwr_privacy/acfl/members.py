"""The clients that have encoded their data for a training, and the global coded data set."""

from typing import Any

from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.wire import fields as records

from .descent import GlobalCodedData
from .encoding import Moments
from .sums import moments_of, sums_of
from .terms import SetupTerms

__all__ = ["CodedMembers"]


class CodedMembers:
    """The clients that were set up, and the sum of their coded data.

    Parameters
    ----------
    symmetrised : bool
        Whether the server makes the coded features symmetric.

    Attributes
    ----------
    names : list of str
        The clients.
    terms : SetupTerms, optional
        What they were asked.
    coded : GlobalCodedData, optional
        The sum; None before there is one.
    """

    def __init__(self, *, symmetrised: bool) -> None:
        self._symmetrised = symmetrised
        self.names: list[str] = []
        self.terms: SetupTerms | None = None
        self.coded: GlobalCodedData | None = None

    def join(self, mean: WeightedMean, terms: SetupTerms) -> None:
        """Add the answers of clients that were set up."""
        moments, came = moments_of(sums_of(mean, terms), terms), set(mean.clients)
        if self.coded is None:
            self.coded = GlobalCodedData(
                moments=moments, terms=terms, devices=len(came), symmetrised=self._symmetrised
            )
        else:
            self.coded = self.coded.joined(moments, len(came))
        self.names = sorted({*self.names, *came})

    def state(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "coded": None if self.coded is None else self.coded.moments._asdict(),
            "members": self.names,
            "setup": None if self.terms is None else records.write(self.terms),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.names = list(state["members"])
        if state["setup"] is not None:
            self.terms = records.read(SetupTerms, state["setup"])
        if state["coded"] is not None and self.terms is not None:
            self.coded = GlobalCodedData(
                moments=Moments(**state["coded"]),
                terms=self.terms,
                devices=len(self.names),
                symmetrised=self._symmetrised,
            )
