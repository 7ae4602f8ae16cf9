"""One coding of the data on a FedVS client: the agreed parameters and the coded rows."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.node.data_cache import DataCache
from flwr_privacy.errors import DataError, ProtocolError
from flwr_privacy.fedvs.terms import CodeTerms
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.documents import loads
from flwr_privacy.wire.message import METRICS, Fields

from .coded_files import CodedRows
from .columns import Expanded, GivenData, Owned
from .sealed_shares import SealedShares

__all__ = ["Coding", "agreed", "complete_coding", "owned", "replied"]

logger = logging.getLogger("flwr.privacy")


@dataclass(frozen=True, eq=False, repr=False)
class Coding:
    """One coding of the data.

    Parameters
    ----------
    store : StepStore
        What the node lends to the client's step.
    data : VerticalData or callable
        The client's columns.
    terms : CodeTerms
        What was agreed on.
    """

    store: StepStore
    data: GivenData
    terms: CodeTerms

    @property
    def me(self) -> int:
        """The client's place in the code."""
        return self.terms.place(self.store.client_id)

    @property
    def width(self) -> int:
        """Columns of the client's expanded data."""
        return self.terms.widths[self.me]

    @cached_property
    def seals(self) -> SealedShares:
        """The object that seals and opens shares of this coding."""
        return SealedShares(self.store, self.terms)

    def file(self, part: str) -> CodedRows:
        """Return the file with the shares of a part's rows, which may not exist yet."""
        shape = (self.terms.segments(part).length, self.terms.offsets[-1])
        return CodedRows(self.store.folder, self.terms.generation, part, shape)

    def places(self, part: str, coded: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the rows that are in some coded rows, without the pads."""
        segments = self.terms.segments(part)
        return segments.real_rows(coded)[segments.counted(coded)]

    def expanded(self) -> Expanded:
        """Return the powers of the client's columns, on their grid.

        Raises
        ------
        DataError
            If the data are none, or have other sizes than were agreed on.
        """
        terms = self.terms
        expanded = owned(self.store, self.data).expanded(
            order=terms.orders[self.me],
            bias=terms.bias,
            x_max=terms.x_max,
            data_bits=terms.data_bits,
            generation=terms.generation,
        )
        rows = zip(terms.parts, terms.rows, strict=True)
        said = {name: (count, self.width) for name, count in rows}
        own = {name: part.shape for name, part in expanded.parts.items()}
        if said != own:
            raise DataError(f"the terms are about data of shapes {said}: the client's have {own}")
        return expanded

    def integers(self, part: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return rows in steps of their grid."""
        rows = self.expanded().rows(part, places) * 2.0**self.terms.data_bits
        return rows.astype(np.int64)


def owned(store: StepStore, data: GivenData) -> Owned:
    """Return the client's own data, in an experiment."""
    return Owned(data, str(store.folder), store.experiment_id)


def agreed(state: Mapping[str, Any]) -> CodeTerms:
    """Return the terms that a client has agreed on.

    Raises
    ------
    ProtocolError
        If it has not.
    """
    if "terms" not in state:
        raise ProtocolError("there was no coding of the data")
    terms = state["terms"]
    return _kept_terms.get(terms, lambda: _KeptTerms(_read_terms(loads(terms)))).terms


def complete_coding(store: StepStore, data: GivenData, generation: str) -> Coding | None:
    """Return a coding if the client has all of its shares, else None."""
    if store.state.get("generation") != generation or not store.state["complete"]:
        return None
    coding = Coding(store, data, agreed(store.state))
    if all(coding.file(part).is_there() for part in coding.terms.parts):
        return coding
    logger.error("client %s: coded rows are gone", store.client_id)
    return None


def replied(**fields: Any) -> Fields:
    """Return the scheme's own fields of a reply; every client weighs the same."""
    return {METRICS: {"num-examples": 1}, **fields}


@dataclass(frozen=True, eq=False)
class _KeptTerms:
    """Terms that were read, which remember what follows from them."""

    terms: CodeTerms
    size: ClassVar[int] = 2**14


_kept_terms: DataCache[_KeptTerms] = DataCache(room=2**26)


def _read_terms(record: Mapping[str, Any]) -> CodeTerms:
    terms = records.read(CodeTerms, record)
    terms.check()
    return terms
