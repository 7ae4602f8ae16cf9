"""UDP: noise on the client, from a budget over the whole training.

Wei, Li, Ding, Ma, Su, Zhang, Poor, "User-Level Privacy-Preserving Federated Learning: Analysis and
Performance Optimization". A client trains, adds Gaussian noise and uploads; the noise is from a
budget (epsilon, delta) over T rounds, and T may be discounted as training goes on. The paper's
formula (10) is `sigma_paper`; it is not sufficient. The
default is Gaussian differential privacy, whose composition is exact.
"""

from .formulas import (
    budget,
    eps_paper,
    eps_spent,
    eps_zcdp,
    mu_star,
    participations,
    rounds_paper,
    sigma_crd,
    sigma_gdp,
    sigma_paper,
    sigma_zcdp,
)
from .loss import LossTerms, MeanLoss
from .moments import eps_moments, eps_server, ln_moment, ln_moment_paper
from .options import (
    ClientLosses,
    Discounting,
    LinearNoise,
    NoiseSchedule,
    PlateauNoise,
    PrivacyLevel,
    RecordLevel,
    UserLevel,
)
from .pace import (
    Discounted,
    LinearDecay,
    Pace,
    PlateauDecay,
    Uniform,
    discount_T,
    m_t,
)
from .plan import Plan
from .schedule import GRID_SHARE, NOISES, NONE, PLD_SECRET, Schedule
from .sensitivity import BOUNDS, RECORD_UNIT, USER_UNIT, sensitivity
from .shared import RECORDS_NAME, SharedMean
from .terms import Steps, Terms
from .theory import (
    SEARCH_GRID,
    PLProblem,
    SearchCost,
    b_corrected,
    b_paper,
    bound_corrected,
    bound_paper,
    c_corrected,
    c_paper,
    optimal_rounds,
    search_cost,
    stationary_rounds,
)

__all__ = [
    "BOUNDS",
    "GRID_SHARE",
    "NOISES",
    "NONE",
    "PLD_SECRET",
    "RECORDS_NAME",
    "RECORD_UNIT",
    "SEARCH_GRID",
    "USER_UNIT",
    "ClientLosses",
    "Discounted",
    "Discounting",
    "LinearDecay",
    "LinearNoise",
    "LossTerms",
    "MeanLoss",
    "NoiseSchedule",
    "PLProblem",
    "Pace",
    "Plan",
    "PlateauDecay",
    "PlateauNoise",
    "PrivacyLevel",
    "RecordLevel",
    "Schedule",
    "SearchCost",
    "SharedMean",
    "Steps",
    "Terms",
    "Uniform",
    "UserLevel",
    "b_corrected",
    "b_paper",
    "bound_corrected",
    "bound_paper",
    "budget",
    "c_corrected",
    "c_paper",
    "discount_T",
    "eps_moments",
    "eps_paper",
    "eps_server",
    "eps_spent",
    "eps_zcdp",
    "ln_moment",
    "ln_moment_paper",
    "m_t",
    "mu_star",
    "optimal_rounds",
    "participations",
    "rounds_paper",
    "search_cost",
    "sensitivity",
    "sigma_crd",
    "sigma_gdp",
    "sigma_paper",
    "sigma_zcdp",
    "stationary_rounds",
]
