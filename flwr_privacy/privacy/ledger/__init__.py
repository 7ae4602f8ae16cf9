"""The privacy ledger of a data set: its journal, its witness, and the chains of its charges."""

from .chain import Head
from .entries import Entry, Question
from .ledger import Ledger, LockedLedger
from .loss import Loss
from .view import LedgerView, Totals

__all__ = ["Entry", "Head", "Ledger", "LedgerView", "LockedLedger", "Loss", "Question", "Totals"]
