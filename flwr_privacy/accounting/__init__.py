"""Privacy accounting: charges, accountants and calibration."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .accountants import ACCOUNTANTS, Accountant, fitting, new_accountant, spent, supports
    from .calibration import noise_multiplier
    from .charges import Charge
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Charge",
    "fitting",
    "new_accountant",
    "noise_multiplier",
    "spent",
    "supports",
]
