"""Plans the request of a private evaluation: its terms, with a grid that its noise needs."""

import math

from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.grid import CODE_LIMIT

from .options import PrivateEvaluation
from .terms import EvaluationTerms

__all__ = ["planned_terms"]

_FINEST = {"record": -1, "user": -12}
"""Exponent of the coarsest grid: half a record, or far below what one client changes."""

_SHARE_STEPS = 4  # at least so many steps of the grid are a party's noise
_GAP = 16.0  # `discretisation_gap` of noise of s steps, for up to 3 entries, is below this over s^2


def planned_terms(
    option: PrivateEvaluation,
    *,
    unit: str,
    neighbours: str,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    gap: float,
    parties: int = 0,
    by_server: bool = False,
) -> EvaluationTerms:
    """Return the terms of an evaluation, on the coarsest grid that its noise allows.

    Raises
    ------
    InvalidParameterError
        If there is none.

    Parameters
    ----------
    option : PrivateEvaluation
        What the user chose.
    unit, neighbours, noise_multiplier, epsilon, delta, gap, parties, by_server
        As of `EvaluationTerms`.
    """

    def on(exponent: int) -> EvaluationTerms:
        return EvaluationTerms(
            unit=unit,
            neighbours=neighbours,
            accuracy=option.accuracy,
            loss_cap=float(option.loss_cap or 0.0),
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            delta=delta,
            gap=gap,
            grid=exponent,
            parties=parties,
            by_server=by_server,
        )

    terms = on(0)
    step = min(
        2.0 ** _FINEST[unit],
        terms.own_sigma() / _SHARE_STEPS,
        terms.sigma() / math.sqrt(_GAP / gap),
    )
    # As coarse as the codes of the noise need, which stays far below the noise.
    room = math.frexp(terms.code_limit() / CODE_LIMIT)[1]
    planned = on(max(math.frexp(step)[1] - 1, room))
    planned.plan({}, Facts())  # what a client would refuse is refused now
    return planned
