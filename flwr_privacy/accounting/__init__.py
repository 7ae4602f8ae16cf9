"""Privacy accounting: charges, accountants and calibration."""

from .accountants import ACCOUNTANTS, Accountant, fitting, new_accountant, spent, supports
from .calibration import noise_multiplier
from .charges import GAUSSIAN, LAPLACE, Charge

__all__ = [
    "ACCOUNTANTS",
    "GAUSSIAN",
    "LAPLACE",
    "Accountant",
    "Charge",
    "fitting",
    "new_accountant",
    "noise_multiplier",
    "spent",
    "supports",
]
