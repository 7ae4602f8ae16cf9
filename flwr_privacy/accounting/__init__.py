"""Privacy accounting: charges, accountants and calibration."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .accountants import ACCOUNTANTS, Accountant, fitting, new_accountant, spent, supports
    from .calibration import noise_multiplier
    from .charges import ADD_REMOVE, RELATIONS, REPLACE_ONE, ZERO_OUT, Charge
    from .neighbours import as_replaced
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACCOUNTANTS",
    "ADD_REMOVE",
    "RELATIONS",
    "REPLACE_ONE",
    "ZERO_OUT",
    "Accountant",
    "Charge",
    "as_replaced",
    "fitting",
    "new_accountant",
    "noise_multiplier",
    "spent",
    "supports",
]
