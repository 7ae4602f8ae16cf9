"""ACFL: linear regression that does not wait for stragglers, by coded data and adaptive weights.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024). Every device uploads noised moments of its data once; in each round the server mixes the
gradient that it computes from their sum with the gradients that came in time. The paper protects
one upload and not the gradients, which give the moments away; `flwr_privacy.strategies.ACFL` noises
both by default.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .encoding import (
        Moments,
        check_data,
        clipped_gradient,
        encode,
        gradient,
        mirrored,
        moments,
        moments_gradient,
        one_hot,
        symmetrise,
        upper,
    )
    from .features import FeatureMap, FourierFeatures, accuracy, predict
    from .options import (
        DataBounds,
        Exact,
        Noise,
        NoisedRecords,
        NoisedSetup,
        SetupVariances,
        Weighting,
    )
    from .plan import ACFLPlan, Wish
    from .privacy import (
        eps_feature,
        eps_feature_symmetric,
        eps_feature_tight,
        eps_label,
        eps_label_tight,
        mi_epsilon,
        noise_split,
        record_epsilon,
        record_mu,
        sigma2_for_eps,
    )
    from .scfl import (
        Projected,
        encode_projected,
        eps_projected,
        projected_gradient,
        projected_mse,
        sigma2_for_eps_projected,
    )
    from .steps import StepSize
    from .terms import GradientTerms, SetupTerms
    from .weights import (
        AlphaPolicy,
        Weights,
        alpha_bounds,
        alpha_estimated,
        alpha_horizon,
        coded_energy,
        device_weights,
        stable_weights,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACFLPlan",
    "AlphaPolicy",
    "DataBounds",
    "Exact",
    "FeatureMap",
    "FourierFeatures",
    "GradientTerms",
    "Moments",
    "Noise",
    "NoisedRecords",
    "NoisedSetup",
    "Projected",
    "SetupTerms",
    "SetupVariances",
    "StepSize",
    "Weighting",
    "Weights",
    "Wish",
    "accuracy",
    "alpha_bounds",
    "alpha_estimated",
    "alpha_horizon",
    "check_data",
    "clipped_gradient",
    "coded_energy",
    "device_weights",
    "encode",
    "encode_projected",
    "eps_feature",
    "eps_feature_symmetric",
    "eps_feature_tight",
    "eps_label",
    "eps_label_tight",
    "eps_projected",
    "gradient",
    "mi_epsilon",
    "mirrored",
    "moments",
    "moments_gradient",
    "noise_split",
    "one_hot",
    "predict",
    "projected_gradient",
    "projected_mse",
    "record_epsilon",
    "record_mu",
    "sigma2_for_eps",
    "sigma2_for_eps_projected",
    "stable_weights",
    "symmetrise",
    "upper",
]
