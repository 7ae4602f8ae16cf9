"""UDP: noise on the client, from a budget over the whole training.

Wei, Li, Ding, Ma, Su, Zhang, Poor, "User-Level Privacy-Preserving Federated Learning: Analysis and
Performance Optimization". A client trains, adds Gaussian noise and uploads; the noise is the same
in every round, from a budget (epsilon, delta) over T of them. The paper's formula (10) is
`sigma_paper`; it is not sufficient (`epsilon_of_paper` has what it gives). The default is Gaussian
differential privacy, whose composition is exact.
"""

from .formulas import (
    eps_paper,
    eps_zcdp,
    participations,
    rounds_paper,
    sigma_gdp,
    sigma_paper,
    sigma_zcdp,
)
from .schedule import GRID_SHARE, NOISES, Schedule
from .sensitivity import RECORD_UNIT, USER_UNIT, sensitivity
from .terms import Terms

__all__ = [
    "GRID_SHARE",
    "NOISES",
    "RECORD_UNIT",
    "USER_UNIT",
    "Schedule",
    "Terms",
    "eps_paper",
    "eps_zcdp",
    "participations",
    "rounds_paper",
    "sensitivity",
    "sigma_gdp",
    "sigma_paper",
    "sigma_zcdp",
]
