"""The privacy ledger of a data set: its file, its entries, and the chains that commit to them."""

from .chain import Head
from .ledger import Entry, Ledger, LockedLedger, Question

__all__ = ["Entry", "Head", "Ledger", "LockedLedger", "Question"]
