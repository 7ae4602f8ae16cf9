"""The privacy ledger of a data set: its file, its entries, and the chains that commit to them."""

from .chain import Head
from .entries import Entry, Question
from .ledger import Ledger, LockedLedger
from .loss import Loss
from .view import LedgerView, Totals

__all__ = ["Entry", "Head", "Ledger", "LedgerView", "LockedLedger", "Loss", "Question", "Totals"]
