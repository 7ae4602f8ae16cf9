"""ACFL: linear regression that does not wait for stragglers, by coded data and adaptive weights.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024). Every device uploads noised moments of its data once; in each round the server mixes the
gradient that it computes from their sum with the gradients that came in time. The paper protects
one upload and not the gradients, which give the moments away; `flwr_privacy.strategies.ACFL` noises
both by default. The package shows what a user of the strategy needs.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .encoding import one_hot
    from .features import FourierFeatures, predict
    from .options import DataBounds, Exact, NoisedRecords, NoisedSetup, SetupVariances, Weighting
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "DataBounds",
    "Exact",
    "FourierFeatures",
    "NoisedRecords",
    "NoisedSetup",
    "SetupVariances",
    "Weighting",
    "one_hot",
    "predict",
]
