"""The privacy ledger of a data set: its journal, its witness, and the chains of its charges."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .chain import Head
    from .entries import Entry, Question
    from .ledger import Ledger, LockedLedger
    from .loss import Loss
    from .view import LedgerView, Totals
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Entry", "Head", "Ledger", "LedgerView", "LockedLedger", "Loss", "Question", "Totals"]
