"""UDP: clients add noise that follows from a budget for the whole training.

Wei, Li, Ding, Ma, Su, Zhang, Poor, "User-Level Privacy-Preserving Federated Learning: Analysis and
Performance Optimization". A client trains, adds Gaussian noise and uploads; the noise is from a
budget (epsilon, delta) over T rounds, and T may be discounted as training goes on. The paper's
formula (10) is `sigma_paper`; it is not sufficient. The default is Gaussian differential privacy,
whose composition is exact: `flwr_privacy.accounting.noise_multiplier`.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

from .sensitivity import RECORD_UNIT, USER_UNIT, sensitivity

if TYPE_CHECKING:
    from flwr_privacy.privacy.cohorts import participations

    from .budgets import budget
    from .loss import LossTerms, MeanLoss
    from .options import (
        DPSGD,
        ClientLosses,
        Discounting,
        LinearNoise,
        NoiseSchedule,
        PlateauNoise,
        RecordLevel,
        UserLevel,
    )
    from .pace import Discounted, LinearDecay, Uniform, discount_T
    from .paper_noise import sigma_paper
    from .plan import UDPPlan
    from .private_steps import PrivatelyTrained, PrivateStepsTerms
    from .schedule import NONE, PLD_SECRET, UDPNoisePlan
    from .terms import Steps, UDPTerms
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "DPSGD",
    "NONE",
    "PLD_SECRET",
    "RECORD_UNIT",
    "USER_UNIT",
    "ClientLosses",
    "Discounted",
    "Discounting",
    "LinearDecay",
    "LinearNoise",
    "LossTerms",
    "MeanLoss",
    "NoiseSchedule",
    "PlateauNoise",
    "PrivateStepsTerms",
    "PrivatelyTrained",
    "RecordLevel",
    "Steps",
    "UDPNoisePlan",
    "UDPPlan",
    "UDPTerms",
    "Uniform",
    "UserLevel",
    "budget",
    "discount_T",
    "participations",
    "sensitivity",
    "sigma_paper",
]
